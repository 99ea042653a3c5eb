// A cache as the coordinator knows it.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/container/flat_hash_set.h"
#include "absl/status/statusor.h"
#include "service/coordinator/call_context.h"
#include "service/data/coordinator_lock.h"
#include "service/data/layer_groups.h"
#include "service/data/resolve_spec.h"
#include "service/schedule/sequence_order.h"
#include "service/schedule/sequence_table.h"
#include "tributary/v1/attention.pb.h"
#include "worker/backends.h"
#include "worker/cache_spec.h"
#include "worker/command.h"

namespace tributary::service {

// Owned by CacheRegistry, and by the operations that use it while it is being deleted.
struct Cache {
  // Takes one worker cache id per group of layers, from `first_id` on.
  Cache(std::string cache_name, std::string cache_owner, worker::CacheId first_id,
        ResolvedSpec resolved, worker::CacheBackends cache_backends, const TableGeometry& geometry);

  // The first of `ids`. It stands for the whole cache in logs, batches and accounts.
  worker::CacheId id() const { return ids.front(); }
  // What the workers are told of a group of layers.
  worker::CacheSpec GroupSpec(int32_t group) const TRIBUTARY_LOCKED;
  // Bytes of a page of a group of layers, on one rank; at least 1.
  int64_t PageBytes(int32_t group) const TRIBUTARY_LOCKED;
  // Whether a caller may know of it.
  bool VisibleTo(const CallContext& call) const TRIBUTARY_LOCKED {
    return call.manages_all || users.contains(call.caller);
  }

  // Fixed, and therefore read without the lock.
  const std::string name;
  const std::string owner;       // the client that created it, and whose limits it counts for
  const worker::CacheSpec spec;  // all layers
  const CacheTerms terms;
  const v1::CacheSpec public_spec;
  const worker::CacheBackends backends;
  const int ranks;

  SequenceTable table TRIBUTARY_GUARDED_BY(kCoordinatorLock);
  // [groups of layers]: what the workers call each group. An id is never used again.
  const std::vector<worker::CacheId> ids;
  const LayerGroups layer_groups;  // the table's
  SequenceOrder order TRIBUTARY_GUARDED_BY(kCoordinatorLock);
  // Its pages, on all ranks together. Set before the cache is known to others.
  uint64_t bytes TRIBUTARY_GUARDED_BY(kCoordinatorLock) = 0;
  // As its creator asked for it. Set before the cache is known to others.
  v1::CacheSpec asked TRIBUTARY_GUARDED_BY(kCoordinatorLock);
  // The clients that have asked for it, the owner among them.
  absl::flat_hash_set<std::string> users TRIBUTARY_GUARDED_BY(kCoordinatorLock);
  // Nobody finds it any more; who uses it still holds it.
  bool deleted TRIBUTARY_GUARDED_BY(kCoordinatorLock) = false;
  // Every rank has it, or had it in some epoch.
  bool created TRIBUTARY_GUARDED_BY(kCoordinatorLock) = false;
  // UNAVAILABLE with the reason while workers of this epoch refuse to hold it (GroupSetup). It can
  // be deleted all the same.
  absl::Status not_held TRIBUTARY_GUARDED_BY(kCoordinatorLock);
  // Callers that wait until it is created.
  std::vector<std::function<void(absl::StatusOr<v1::CreateCacheReply>)>> creators
      TRIBUTARY_GUARDED_BY(kCoordinatorLock);
  // Closed sequences that workers may still hold tables of.
  std::vector<worker::SequenceId> undropped TRIBUTARY_GUARDED_BY(kCoordinatorLock);
};

using CachePtr = std::shared_ptr<Cache>;

}  // namespace tributary::service
