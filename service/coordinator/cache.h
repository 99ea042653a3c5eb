// A cache as the coordinator knows it.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "service/data/resolve_spec.h"
#include "service/schedule/sequence_order.h"
#include "service/schedule/sequence_table.h"
#include "tributary/v1/attention.pb.h"
#include "worker/backends.h"
#include "worker/cache_spec.h"
#include "worker/command.h"

namespace tributary::service {

struct Cache {
  // Takes ids from `first_id` on, one a group of layers.
  Cache(std::string cache_name, worker::CacheId first_id, ResolvedSpec resolved,
        worker::CacheBackends cache_backends, const TableGeometry& geometry);

  // What workers call it. Each group of layers is a cache to them.
  worker::CacheId id() const { return ids.front(); }
  worker::CacheSpec GroupSpec(int32_t group) const;

  // Fixed, and so read without the coordinator's lock.
  const std::string name;
  const worker::CacheSpec spec;  // all layers
  const CacheTerms terms;
  const v1::CacheSpec public_spec;
  const worker::CacheBackends backends;

  // Under the coordinator's lock, but for table.groups(), which is fixed.
  SequenceTable table;
  const std::vector<worker::CacheId> ids;  // [groups of layers], never used again
  SequenceOrder order;
  bool created = false;  // every rank has it
  // Callers that wait until it is.
  std::vector<std::function<void(absl::StatusOr<v1::CreateCacheReply>)>> creators;
  // Closed sequences that workers may still hold tables of.
  std::vector<worker::SequenceId> undropped;
};

}  // namespace tributary::service
