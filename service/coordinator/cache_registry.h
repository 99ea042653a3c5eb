// The caches of a service: created on the workers, found by name, deleted.
#pragma once

#include <optional>
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
#include "service/observe/observer.h"
#include "service/schedule/leases.h"
#include "service/workers/worker_group.h"
#include "tributary/v1/attention.pb.h"

namespace tributary::service {

class CacheRegistry {
 public:
  using ByName = absl::flat_hash_map<std::string, CachePtr>;

  // All of them outlive this.
  CacheRegistry(const CoordinatorOptions& options, const telemetry::Logger& log,
                const WorkerGroup& group, CoordinatorLock& lock, const ServingState& serving,
                GroupCommands& commands, CallOrder& order, Leases& leases, OnRefused on_refused);

  // The calls of the API.
  void Create(const v1::CreateCacheRequest& request, const CallContext& call,
              Done<v1::CreateCacheReply> done) TRIBUTARY_UNLOCKED;
  void Delete(const v1::DeleteCacheRequest& request, const CallContext& call,
              Done<v1::DeleteCacheReply> done) TRIBUTARY_UNLOCKED;

  // UNAVAILABLE when the service does not serve or the workers do not hold the cache, NOT_FOUND for
  // caches that do not exist or are still being created.
  absl::StatusOr<CachePtr> Find(const std::string& name) const TRIBUTARY_LOCKED;
  // Find, for a caller that wants to delete it, whether the workers hold it or not.
  // PERMISSION_DENIED for a cache that another client created, NOT_FOUND for one that the caller
  // has nothing to do with.
  absl::StatusOr<CachePtr> FindToDelete(const std::string& name,
                                        const CallContext& call) const TRIBUTARY_LOCKED;
  // What a caller may know of, in the order of their names.
  std::vector<CachePtr> VisibleTo(const CallContext& call) const TRIBUTARY_LOCKED;
  // Caches that are still being created are among them.
  const ByName& all() const TRIBUTARY_LOCKED { return caches_; }

  // A coordinator that has restarted goes on: makes the caches of the journal again, with the
  // sequences that all ranks hold. `held`: [ranks], nothing for ranks that are fresh.
  void Adopt(const std::vector<std::optional<worker::Holdings>>& held) TRIBUTARY_LOCKED;
  // The group has formed anew, and the ranks that are `fresh` hold nothing: marks the sequences of
  // which they held something as lost.
  void MarkLost(const std::vector<bool>& fresh) TRIBUTARY_LOCKED;
  // Sends again what workers of an earlier epoch may not have heard of.
  void DropAgain() TRIBUTARY_LOCKED;

  // Makes a cache anew for so many ranks, under ids that were never used. Nobody knows of it before
  // Replace. `hosts`: where those ranks are. An error: so many ranks cannot have it.
  absl::StatusOr<CachePtr> MakeFor(const Cache& cache,
                                   const std::vector<std::string>& hosts) TRIBUTARY_LOCKED;
  // From now on these caches stand for those of their names, and have their sequences.
  void Replace(const std::vector<CachePtr>& caches) TRIBUTARY_LOCKED;

 private:
  // Find, whether the workers hold it or not.
  absl::StatusOr<CachePtr> Lookup(const std::string& name) const TRIBUTARY_LOCKED;
  // RESOURCE_EXHAUSTED when the client has as many caches, or bytes of them, as it may have.
  absl::StatusOr<CachePtr> Admit(const std::string& name, const std::string& client,
                                 ResolvedSpec resolved,
                                 worker::CacheBackends backends) TRIBUTARY_LOCKED;
  absl::Status CheckLimits(const std::string& client, uint64_t bytes) const TRIBUTARY_LOCKED;
  // Creates the groups of layers on the workers, from this one on.
  void CreateGroup(const CachePtr& cache, int32_t group) TRIBUTARY_LOCKED;
  // A cache that nobody knows of yet.
  absl::StatusOr<CachePtr> Make(const std::string& name, const std::string& client,
                                worker::CacheId first_id, ResolvedSpec resolved,
                                worker::CacheBackends backends, int ranks) const TRIBUTARY_LOCKED;
  // By where the workers are now.
  int StrideOfReplicas() const;
  worker::CacheBackends BackendsFor(const ResolvedSpec& resolved) const;
  // Adds a cache of the journal, without sequences.
  absl::StatusOr<CachePtr> AddAgain(const JournaledCache& journaled,
                                    const std::vector<std::optional<worker::Holdings>>& held)
      TRIBUTARY_LOCKED;
  // Workers hold caches that are not among ours: they are told to drop them, and their ids are not
  // used again.
  void LeaveOthers(const std::vector<std::optional<worker::Holdings>>& held) TRIBUTARY_LOCKED;
  // Sequences that have been adopted belong to the leases that the journal knows.
  void RestoreLeases() TRIBUTARY_LOCKED;
  void AnswerCreators(const CachePtr& cache, const absl::Status& failure) TRIBUTARY_LOCKED;
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
  Leases& leases_;
  const OnRefused on_refused_;

  ByName caches_ TRIBUTARY_GUARDED_BY(kCoordinatorLock);
  worker::CacheId next_id_ TRIBUTARY_GUARDED_BY(kCoordinatorLock) = 1;
  // Caches that were deleted, or never created everywhere, and that workers may still hold.
  std::vector<worker::CacheId> undropped_ TRIBUTARY_GUARDED_BY(kCoordinatorLock);
};

}  // namespace tributary::service
