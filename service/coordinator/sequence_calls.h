// The calls of the API that open, fork, truncate and close sequences.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "base/telemetry/log.h"
#include "service/coordinator/cache_registry.h"
#include "service/coordinator/call_context.h"
#include "service/coordinator/call_order.h"
#include "service/coordinator/coordinator_options.h"
#include "service/coordinator/critical_section.h"
#include "service/coordinator/group_commands.h"
#include "service/journal/journal.h"
#include "service/schedule/client_quota.h"
#include "service/schedule/leases.h"
#include "tributary/v1/attention.pb.h"

namespace tributary::service {

// Each call waits for its sequences like a step does, and takes effect under the lock. Workers are
// told of it, and nobody waits for them: later commands come after this one.
class SequenceCalls {
 public:
  // All of them outlive this.
  SequenceCalls(const CoordinatorOptions& options, const telemetry::Logger& log,
                CoordinatorLock& lock, const CacheRegistry& caches, GroupCommands& commands,
                CallOrder& order, OnRefused on_refused);

  void Open(const v1::OpenSequenceRequest& request, const CallContext& call,
            Done<v1::OpenSequenceReply> done);
  void Fork(const v1::ForkSequenceRequest& request, const CallContext& call,
            Done<v1::ForkSequenceReply> done);
  void Truncate(const v1::TruncateSequenceRequest& request, const CallContext& call,
                Done<v1::TruncateSequenceReply> done);
  void Close(const v1::CloseSequenceRequest& request, const CallContext& call,
             Done<v1::CloseSequenceReply> done);

  // Closes a sequence whose lease has ended, unless it belongs to another lease by then.
  void CloseLeased(const std::string& cache_name, worker::SequenceId id, const LeasePtr& lease);

  // Many of the above for one cache, all of them or none.
  void Update(const v1::UpdateSequencesRequest& request, const CallContext& call,
              Done<v1::UpdateSequencesReply> done);

  // The account of what a caller's sequences hold; null when nothing is limited.
  ClientAccountPtr AccountOf(const std::string& caller) TRIBUTARY_LOCKED {
    return clients_.Of(caller);
  }
  // Sequences were opened or forked by a call: they belong to the lease that it presents, if it
  // presents one, and the journal is told of it.
  void GiveLease(const CachePtr& cache, const std::vector<worker::SequenceId>& made,
                 const CallContext& call) TRIBUTARY_LOCKED;
  // Of leases that ended, over all time.
  uint64_t closed_by_leases() const TRIBUTARY_LOCKED { return closed_by_leases_; }

 private:
  class SequenceOperation;
  // Takes effect, and answers the call; called with the lock held.
  using Apply = std::function<void(const CachePtr&)>;

  // Accepts a call that is to wait for `sequences`. `fail` answers it if it does not take effect.
  void Enter(const std::string& cache_name, const CallContext& call,
             std::vector<worker::SequenceId> sequences, Apply apply,
             std::function<void(absl::Status)> fail) TRIBUTARY_UNLOCKED;
  // The same as GiveLease. Returns what the journal is to be told, if there is one.
  std::vector<JournaledLease> SetLease(const CachePtr& cache,
                                       const std::vector<worker::SequenceId>& made,
                                       const CallContext& call) TRIBUTARY_LOCKED;
  // The sequence belongs to no lease any more; the journal forgets which it was.
  void DropLease(const CachePtr& cache, worker::SequenceId id) TRIBUTARY_LOCKED;
  void ForgetLease(const CachePtr& cache, worker::SequenceId id) TRIBUTARY_LOCKED;
  // Answers a call when the journal has leases.
  void AnswerWhenKept(const std::vector<JournaledLease>& leases,
                      std::function<void()> answer) TRIBUTARY_LOCKED;
  void TellFork(const CachePtr& cache, const Sequence& child) TRIBUTARY_LOCKED;
  // Answers a call that has changed sequences when no restart can undo the change.
  void AnswerWhenSafe(const CachePtr& cache, std::function<void()> answer,
                      const std::vector<JournaledLease>& leases = {}) TRIBUTARY_LOCKED;
  // Closes it, and tells workers and journal.
  absl::Status CloseNow(const CachePtr& cache, worker::SequenceId id) TRIBUTARY_LOCKED;
  void TellClosed(const CachePtr& cache, worker::SequenceId id) TRIBUTARY_LOCKED;

  const CoordinatorOptions& options_;
  const telemetry::Logger& log_;
  CoordinatorLock& lock_;
  const CacheRegistry& caches_;
  GroupCommands& commands_;
  CallOrder& order_;

  ClientQuota clients_ TRIBUTARY_GUARDED_BY(kCoordinatorLock);
  uint64_t closed_by_leases_ TRIBUTARY_GUARDED_BY(kCoordinatorLock) = 0;
};

}  // namespace tributary::service
