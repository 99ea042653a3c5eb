// The state of the service at a moment, cheap enough to be asked for every second.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "service/workers/worker_group.h"
#include "tributary/v1/attention.pb.h"

namespace tributary::service {

struct Snapshot {
  std::string build_version;  // of the coordinator
  uint64_t epoch = 0;
  bool ready = false;
  bool draining = false;
  int64_t calls_open = 0;  // accepted and not yet answered
  int64_t calls_queued = 0;
  int32_t steps_in_flight = 0;
  int64_t caches = 0;
  // Virtual pages, summed over all caches.
  int64_t pages_total = 0;
  int64_t pages_used = 0;
  int64_t pages_shared = 0;
  double fullest_cache = 0;  // used / total of the cache where that is largest
  int64_t sequences = 0;
  int64_t sequences_lost = 0;
  // Pages that ranks, or the replicas that they keep, have yet to get from other ranks, and the
  // bytes that they have got that way.
  int64_t pages_restoring = 0;
  int64_t pages_without_replica = 0;
  int64_t leases = 0;
  uint64_t closed_by_leases = 0;  // sequences, over all time
  uint64_t bytes_restored = 0;
  uint64_t bytes_replicated = 0;
  v1::Statistics statistics;
  std::vector<Member> members;  // by rank
};

}  // namespace tributary::service
