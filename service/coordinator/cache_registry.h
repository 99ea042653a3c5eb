// The caches of a service: created on the workers, found by name, deleted.
#pragma once

#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/telemetry/log.h"
#include "service/coordinator/cache.h"
#include "service/coordinator/call_context.h"
#include "service/coordinator/call_order.h"
#include "service/coordinator/coordinator_options.h"
#include "service/coordinator/critical_section.h"
#include "service/coordinator/group_commands.h"
#include "service/coordinator/serving_state.h"
#include "service/workers/worker_group.h"
#include "tributary/v1/attention.pb.h"

namespace tributary::service {

class CacheRegistry {
 public:
  using ByName = absl::flat_hash_map<std::string, CachePtr>;

  // All of them outlive this.
  CacheRegistry(const CoordinatorOptions& options, const telemetry::Logger& log,
                const WorkerGroup& group, CoordinatorLock& lock, const ServingState& serving,
                GroupCommands& commands, CallOrder& order);

  // The calls of the API.
  void Create(const v1::CreateCacheRequest& request,
              Done<v1::CreateCacheReply> done) TRIBUTARY_UNLOCKED;
  void Delete(const v1::DeleteCacheRequest& request,
              Done<v1::DeleteCacheReply> done) TRIBUTARY_UNLOCKED;

  // UNAVAILABLE when the service does not serve, NOT_FOUND for caches that do not exist or are
  // still being created.
  absl::StatusOr<CachePtr> Find(const std::string& name) const TRIBUTARY_LOCKED;
  // Caches that are still being created are among them.
  const ByName& all() const TRIBUTARY_LOCKED { return caches_; }

  // The group has formed anew, and the ranks that are `fresh` hold nothing: marks the sequences of
  // which they held something as lost.
  void MarkLost(const std::vector<bool>& fresh) TRIBUTARY_LOCKED;
  // Sends again what workers of an earlier epoch may not have heard of.
  void DropAgain() TRIBUTARY_LOCKED;

 private:
  CachePtr Add(const std::string& name, ResolvedSpec resolved,
               worker::CacheBackends backends) TRIBUTARY_LOCKED;
  void OnCreated(const CachePtr& cache, const absl::Status& status) TRIBUTARY_UNLOCKED;
  // Tells the workers that a cache is gone. `done` is called with the lock held, whatever comes of
  // it: workers that miss the command are told again.
  void Drop(const Cache& cache, std::function<void()> done) TRIBUTARY_LOCKED;

  const CoordinatorOptions& options_;
  const telemetry::Logger& log_;
  const WorkerGroup& group_;
  CoordinatorLock& lock_;
  const ServingState& serving_;
  GroupCommands& commands_;
  CallOrder& order_;

  ByName caches_ TRIBUTARY_GUARDED_BY(kCoordinatorLock);
  worker::CacheId next_id_ TRIBUTARY_GUARDED_BY(kCoordinatorLock) = 1;
  // Caches that were deleted, or never created everywhere, and that workers may still hold.
  std::vector<worker::CacheId> undropped_ TRIBUTARY_GUARDED_BY(kCoordinatorLock);
};

}  // namespace tributary::service
