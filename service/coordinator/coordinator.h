// The coordinator: caches, sequences and steps over one group of workers.
//
// It knows nothing of gRPC. attention_service.h puts it behind the public API; tests and benchmarks
// call it in process. This class only puts its parts together; README.md says what each part does.
// The parts share one lock: critical_section.h.
#pragma once

#include <chrono>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/telemetry/log.h"
#include "service/coordinator/cache_registry.h"
#include "service/coordinator/call_context.h"
#include "service/coordinator/call_order.h"
#include "service/coordinator/coordinator_options.h"
#include "service/coordinator/critical_section.h"
#include "service/coordinator/group_commands.h"
#include "service/coordinator/group_setup.h"
#include "service/coordinator/lease_expiry.h"
#include "service/coordinator/limits.h"
#include "service/coordinator/registered_regions.h"
#include "service/coordinator/resizing.h"
#include "service/coordinator/restoration.h"
#include "service/coordinator/sequence_calls.h"
#include "service/coordinator/serving_state.h"
#include "service/coordinator/sessions.h"
#include "service/coordinator/step_runner.h"
#include "service/coordinator/timer.h"
#include "service/data/mailbox_handout.h"
#include "service/observe/observer.h"
#include "service/observe/snapshot.h"
#include "service/schedule/leases.h"
#include "service/workers/worker_group.h"
#include "tributary/v1/attention.pb.h"

namespace tributary::service {

// Thread safe. A call with a `done` answers through it; see call_context.h.
class Coordinator final : private EndOfSection {
 public:
  using Clock = CoordinatorLock::Clock;
  template <typename Reply>
  using Done = service::Done<Reply>;

  Coordinator(CoordinatorOptions options, std::unique_ptr<WorkerGroup> group,
              std::shared_ptr<const telemetry::Logger> log);
  ~Coordinator() override;  // stops

  // Starts the workers. The service becomes ready some time later.
  absl::Status Start();
  // From now on new calls are UNAVAILABLE. Accepted calls go on.
  void StartDraining();
  // Whether every accepted call has been answered by then.
  bool WaitIdle(Clock::time_point until);
  // Answers the calls that are left and lets the workers go.
  void Stop();
  bool ready() const;
  // The one in CoordinatorOptions, or one that does nothing.
  Observer& observer() const { return *observer_; }

  void CreateCache(const v1::CreateCacheRequest& request, const CallContext& call,
                   Done<v1::CreateCacheReply> done);
  void DeleteCache(const v1::DeleteCacheRequest& request, const CallContext& call,
                   Done<v1::DeleteCacheReply> done);
  void OpenSequence(const v1::OpenSequenceRequest& request, const CallContext& call,
                    Done<v1::OpenSequenceReply> done);
  void ForkSequence(const v1::ForkSequenceRequest& request, const CallContext& call,
                    Done<v1::ForkSequenceReply> done);
  void TruncateSequence(const v1::TruncateSequenceRequest& request, const CallContext& call,
                        Done<v1::TruncateSequenceReply> done);
  void CloseSequence(const v1::CloseSequenceRequest& request, const CallContext& call,
                     Done<v1::CloseSequenceReply> done);
  void UpdateSequences(const v1::UpdateSequencesRequest& request, const CallContext& call,
                       Done<v1::UpdateSequencesReply> done);
  void Append(std::shared_ptr<const v1::AppendRequest> request, const CallContext& call,
              Done<v1::AppendReply> done);
  void Attend(std::shared_ptr<const v1::AttendRequest> request, const CallContext& call,
              Done<v1::AttendReply> done);
  // After a call with CallContext::lends, on the same thread: carries out the step that the call
  // has begun, if that is short and nobody is at it. Answers may be given before this returns.
  void Lend() { commands_.LendOnce(); }
  // Caches are looked at one after the other, and sequences some at a time: what changes meanwhile
  // is told as it is when its turn comes.
  absl::StatusOr<v1::GetTopologyReply> GetTopology(const v1::GetTopologyRequest& request,
                                                   const CallContext& call) const;
  // What each client may hold: from now on, on any thread.
  ClientLimits& client_limits() { return options_.client_limits; }
  // Without the lock: but for the limits of clients it is as it was configured.
  v1::GetLimitsReply GetLimits() const { return LimitsOf(options_, *group_); }
  Snapshot TakeSnapshot() const;
  absl::StatusOr<v1::RenewLeaseReply> RenewLease(const v1::RenewLeaseRequest& request) {
    return lease_expiry_.Renew(request);
  }
  // Which callers present. Thread safe.
  Leases& leases() { return leases_; }
  // Of operators: see operations.proto.
  void ChangeWorkers(const v1::ChangeWorkersRequest& request, Done<v1::ChangeWorkersReply> done) {
    resizing_.Ask(request, std::move(done));
  }
  // Of every caller, one session per stream (sessions.h).
  Sessions& sessions() { return sessions_; }
  // Their mailboxes that wait for their hosts.
  MailboxHandout& mailboxes() { return mailboxes_; }
  // Memfds of hosts that wait to be registered.
  MemoryDeposit& deposit() { return regions_.deposit(); }
  void RegisterSharedMemory(const v1::RegisterSharedMemoryRequest& request, const CallContext& call,
                            Done<v1::RegisterSharedMemoryReply> done);
  void UnregisterSharedMemory(const v1::UnregisterSharedMemoryRequest& request,
                              const CallContext& call, Done<v1::UnregisterSharedMemoryReply> done);

 private:
  // EndOfSection.
  void BeforeRelease() override TRIBUTARY_LOCKED;
  void AfterRelease() override;

  // What the timer waits for, and what it does then.
  Clock::time_point NextDue() const TRIBUTARY_LOCKED;
  void ActOnTime(Clock::time_point now) TRIBUTARY_LOCKED;
  v1::Statistics Statistics() const TRIBUTARY_LOCKED;

  CoordinatorOptions options_;  // all but the limits of clients stays as it is
  const std::shared_ptr<const telemetry::Logger> log_;
  const std::shared_ptr<Observer> observer_;  // never null
  const Clock::time_point started_ = Clock::now();
  const std::unique_ptr<WorkerGroup> group_;

  // In this order each part knows only those before it.
  mutable CoordinatorLock lock_;
  Leases leases_;
  ServingState serving_;
  GroupCommands commands_;
  CallOrder order_;
  CacheRegistry caches_;
  RegisteredRegions regions_;
  SequenceCalls sequences_;
  LeaseExpiry lease_expiry_;
  StepRunner steps_;
  MailboxHandout mailboxes_;
  Sessions sessions_;
  Restoration restoration_;
  Resizing resizing_;
  GroupSetup setup_;
  Timer timer_;
  bool stopped_ TRIBUTARY_GUARDED_BY(kCoordinatorLock) = false;
};

}  // namespace tributary::service
