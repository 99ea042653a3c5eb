// The sessions of a service: opened, given steps, settled as these are carried out, ended.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "base/telemetry/log.h"
#include "service/coordinator/cache_registry.h"
#include "service/coordinator/call_context.h"
#include "service/coordinator/call_order.h"
#include "service/coordinator/coordinator_options.h"
#include "service/coordinator/critical_section.h"
#include "service/coordinator/group_commands.h"
#include "service/coordinator/sequence_calls.h"
#include "service/coordinator/serving_state.h"
#include "service/coordinator/session.h"
#include "service/coordinator/sessions/sequenced_runner.h"
#include "service/data/mailbox_handout.h"
#include "service/observe/observer.h"
#include "service/workers/worker_group.h"
#include "tributary/v1/attention.pb.h"
#include "tributary/v1/session.pb.h"
#include "worker/backend.h"

namespace tributary::service {

class Sessions {
 public:
  // All of them outlive this.
  Sessions(const CoordinatorOptions& options, const telemetry::Logger& log,
           const WorkerGroup& group, CoordinatorLock& lock, const ServingState& serving,
           GroupCommands& commands, CallOrder& order, const CacheRegistry& caches,
           SequenceCalls& sequences, MailboxHandout& mailboxes, OnRefused on_refused);

  // What the host says. The listener hears SessionOpened or the end, with the refusal. `local`: the
  // caller is on this machine.
  SessionPtr Open(const v1::OpenSession& request, const CallContext& call, bool local,
                  std::shared_ptr<SessionListener> listener) TRIBUTARY_UNLOCKED;
  void Submit(const SessionPtr& session, const v1::SubmitStep& request) TRIBUTARY_UNLOCKED;
  // How long round trips took, which it was asked for.
  void Probed(const SessionPtr& session, const v1::ProbeResult& times) TRIBUTARY_UNLOCKED;
  // A layer in a message, and whether there is room for another.
  absl::Status Layer(const SessionPtr& session, v1::LayerInput layer) TRIBUTARY_UNLOCKED;
  static bool HasRoom(const SessionPtr& session) {
    return session->runner == nullptr || session->runner->HasRoom();
  }
  // Once the steps in flight are over.
  void Close(const SessionPtr& session) TRIBUTARY_UNLOCKED;
  // The host is gone: at once.
  void Abandon(const SessionPtr& session) TRIBUTARY_UNLOCKED;

  // What the workers say.
  void OnNews(const worker::SessionNews& news) TRIBUTARY_UNLOCKED;

  // All sessions end: what they had enqueued ends with the group that broke.
  void OnGroupBroken(const absl::Status& why) TRIBUTARY_LOCKED;
  // The cache is about to be deleted.
  void EndAllOf(const Cache& cache, const absl::Status& why) TRIBUTARY_LOCKED;
  // The service is stopping.
  void EndAll(const absl::Status& why) TRIBUTARY_LOCKED;
  // New sessions and steps are refused; a session ends when its steps are over.
  void StartDraining() TRIBUTARY_LOCKED;
  // After EndAll: waits until nothing of any session runs in this process.
  void Join() TRIBUTARY_UNLOCKED;

  int64_t open() const TRIBUTARY_LOCKED { return static_cast<int64_t>(sessions_.size()); }
  // Adds the open sessions of these caches, by id.
  void AddTo(const std::vector<CachePtr>& caches,
             v1::GetTopologyReply* reply) const TRIBUTARY_LOCKED;

  // When FailExpired has something to do.
  CoordinatorLock::Clock::time_point NextDue() const TRIBUTARY_LOCKED;
  // Hosts that did not time round trips in time lose their sessions.
  void FailExpired(CoordinatorLock::Clock::time_point now) TRIBUTARY_LOCKED;

 private:
  class StepOperation;

  absl::StatusOr<SessionPtr> Admit(const v1::OpenSession& request, const CallContext& call,
                                   bool local, const std::shared_ptr<SessionListener>& listener)
      TRIBUTARY_UNLOCKED;
  // Waits for the runners of sessions that have ended, which takes no longer than a layer.
  void Reap() TRIBUTARY_UNLOCKED;
  // OK when the group and the caller can share such memory.
  absl::Status CheckMemory(v1::SessionMemory memory, bool local) const;
  // RESOURCE_EXHAUSTED when one session more is too many, for the service or for the client.
  absl::Status CheckLimits(const std::string& client,
                           uint64_t mailbox_bytes) const TRIBUTARY_LOCKED;
  void OnOpened(const SessionPtr& session, const Outcome& outcome) TRIBUTARY_UNLOCKED;
  // The mailbox of a session on a GPU is there, and how to wait is known.
  void FinishOpening(const SessionPtr& session) TRIBUTARY_LOCKED;
  // Makes the mailbox in shared memory, which takes long where it is large.
  void OpenHostMailbox(const SessionPtr& session,
                       const std::shared_ptr<SessionListener>& listener) TRIBUTARY_UNLOCKED;
  // What a runner tells of the session. The session outlives its runner.
  RunnerEvents EventsOf(Session* session, const std::shared_ptr<SessionListener>& listener);
  SequencedContext RunnerContext() {
    return {lock_, serving_, commands_, options_.retry_delay, group_.sends_tensors()};
  }
  // A session whose steps are carried out by `runner` is open.
  void OpenRunner(const SessionPtr& session, std::unique_ptr<SessionRunner> runner,
                  v1::SessionReply opened) TRIBUTARY_LOCKED;

  // The first step that waits takes its place among the calls of its sequences.
  void EnterNext(const SessionPtr& session) TRIBUTARY_LOCKED;
  // Its sequences are free.
  void Accept(const SessionPtr& session, const SessionStepPtr& step) TRIBUTARY_LOCKED;
  void Refuse(const SessionPtr& session, const SessionStepPtr& step,
              const absl::Status& why) TRIBUTARY_LOCKED;
  void Send(const SessionPtr& session, const SessionStepPtr& step) TRIBUTARY_LOCKED;
  // The step's place among the calls of its sequences is free.
  void LeaveOrder(SessionStep* step) TRIBUTARY_LOCKED;
  // Settles the steps whose layers have all been carried out.
  void SettleDone(const SessionPtr& session) TRIBUTARY_LOCKED;
  void TellEnded(const SessionPtr& session, const SessionStep& step, const absl::Status& status,
                 uint32_t layers_done) TRIBUTARY_LOCKED;

  // Nothing is accepted any more, and the workers are told to end it. When they have, FinishEnd.
  void BeginEnd(const SessionPtr& session, const absl::Status& why) TRIBUTARY_LOCKED;
  // Undoes what was not carried out and tells the host.
  void FinishEnd(const SessionPtr& session) TRIBUTARY_LOCKED;
  void EndIfIdle(const SessionPtr& session) TRIBUTARY_LOCKED;
  // Says, when the critical section has ended, what has been added to the outbox.
  void Tell(const SessionPtr& session, v1::SessionReply reply) TRIBUTARY_LOCKED;
  // The same for the last that is said of a step: it refuses the step, or tells its end.
  void TellLast(const SessionPtr& session, v1::SessionReply reply) TRIBUTARY_LOCKED;

  const CoordinatorOptions& options_;
  const telemetry::Logger& log_;
  const WorkerGroup& group_;
  CoordinatorLock& lock_;
  const ServingState& serving_;
  GroupCommands& commands_;
  CallOrder& order_;
  const CacheRegistry& caches_;
  SequenceCalls& sequences_;
  MailboxHandout& mailboxes_;
  const OnRefused on_refused_;

  worker::SessionId next_id_ TRIBUTARY_GUARDED_BY(kCoordinatorLock) = 1;
  uint64_t mailbox_bytes_ TRIBUTARY_GUARDED_BY(kCoordinatorLock) = 0;
  // Those that have not ended.
  absl::flat_hash_map<worker::SessionId, SessionPtr> sessions_
      TRIBUTARY_GUARDED_BY(kCoordinatorLock);
  // Those whose hosts time round trips, in the order of their deadlines; some have ended.
  std::deque<SessionPtr> probed_ TRIBUTARY_GUARDED_BY(kCoordinatorLock);
  // Those that have ended and whose runners may not have.
  std::vector<SessionPtr> unjoined_ TRIBUTARY_GUARDED_BY(kCoordinatorLock);
};

}  // namespace tributary::service
