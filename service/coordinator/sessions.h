// The sessions of a service: how they are opened, given steps and ended, and how steps are settled.
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
#include "service/coordinator/sessions/admission.h"
#include "service/coordinator/sessions/sequenced_runner.h"
#include "service/data/host_mailbox.h"
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

  // The functions from here to Abandon carry out what the host says. The listener is told
  // SessionOpened, or the end with the refusal. `local`: whether the caller is on this machine.
  SessionPtr Open(const v1::OpenSession& request, const CallContext& call, bool local,
                  std::shared_ptr<SessionListener> listener) TRIBUTARY_UNLOCKED;
  // Another endpoint's stream. Its listener is told SessionOpened, or the end with the refusal.
  SessionPtr Join(const v1::JoinSession& request, const CallContext& call, bool local,
                  std::shared_ptr<SessionListener> listener) TRIBUTARY_UNLOCKED;
  void Submit(const SessionPtr& session, const v1::SubmitStep& request) TRIBUTARY_UNLOCKED;
  // The host has timed round trips, as SessionProbe asked for.
  void Probed(const SessionPtr& session, const v1::ProbeResult& times) TRIBUTARY_UNLOCKED;
  // Takes a layer that came in a message. HasRoom says whether there is room for another.
  absl::Status Layer(const SessionPtr& session, v1::LayerInput layer) TRIBUTARY_UNLOCKED;
  static bool HasRoom(const SessionPtr& session) {
    return session->runner == nullptr || session->runner->HasRoom();
  }
  // Ends the session when its steps in flight are over.
  void Close(const SessionPtr& session) TRIBUTARY_UNLOCKED;
  // Ends the session at once, because the host, or an endpoint of it, is gone.
  void Abandon(const SessionPtr& session, int32_t endpoint = 0) TRIBUTARY_UNLOCKED;

  // The workers tell how far a session has come.
  void OnNews(const worker::SessionNews& news) TRIBUTARY_UNLOCKED;

  // Ends all sessions. What they had enqueued ends with the group that broke.
  void OnGroupBroken(const absl::Status& why) TRIBUTARY_LOCKED;
  // Ends the sessions of a cache that is about to be deleted.
  void EndAllOf(const Cache& cache, const absl::Status& why) TRIBUTARY_LOCKED;
  // Ends all sessions, because the service is stopping.
  void EndAll(const absl::Status& why) TRIBUTARY_LOCKED;
  // Refuses new sessions and steps from now on. A session ends when its steps are over.
  void StartDraining() TRIBUTARY_LOCKED;
  // Waits until nothing of any session runs in this process. Called after EndAll.
  void Join() TRIBUTARY_UNLOCKED;

  int64_t open() const TRIBUTARY_LOCKED { return static_cast<int64_t>(sessions_.size()); }
  // Adds the open sessions of these caches to a reply, ordered by id.
  void AddTo(const std::vector<CachePtr>& caches,
             v1::GetTopologyReply* reply) const TRIBUTARY_LOCKED;

  // When FailExpired has something to do.
  CoordinatorLock::Clock::time_point NextDue() const TRIBUTARY_LOCKED;
  // Ends the sessions of hosts that have not timed round trips in time.
  void FailExpired(CoordinatorLock::Clock::time_point now) TRIBUTARY_LOCKED;

 private:
  class StepOperation;

  absl::StatusOr<SessionPtr> Admit(const v1::OpenSession& request, const CallContext& call,
                                   bool local, const std::shared_ptr<SessionListener>& listener)
      TRIBUTARY_UNLOCKED;
  absl::StatusOr<SessionPtr> AdmitEndpoint(const v1::JoinSession& request, const CallContext& call,
                                           const std::shared_ptr<SessionListener>& listener)
      TRIBUTARY_UNLOCKED;
  // Waits for the runners of sessions that have ended, which takes no longer than a layer.
  void Reap() TRIBUTARY_UNLOCKED;
  void OnOpened(const SessionPtr& session, const Outcome& outcome) TRIBUTARY_UNLOCKED;
  // Opens a session on a GPU whose mailbox is there and whose way of waiting has been chosen.
  void FinishOpening(const SessionPtr& session) TRIBUTARY_LOCKED;
  // Makes the mailboxes in shared memory, which takes long where they are large.
  void OpenHostMailboxes(const SessionPtr& session,
                         const std::shared_ptr<SessionListener>& listener) TRIBUTARY_UNLOCKED;
  // One for each endpoint.
  absl::StatusOr<std::vector<std::shared_ptr<HostMailbox>>> MakeMailboxes(
      const Session& session) const TRIBUTARY_UNLOCKED;
  // What a runner tells of the session. The session outlives its runner.
  RunnerEvents EventsOf(Session* session, const std::shared_ptr<SessionListener>& listener);
  SequencedContext RunnerContext() {
    return {lock_, serving_, commands_, options_.retry_delay, group_.sends_tensors()};
  }
  // Opens a session whose steps `runner` carries out.
  void OpenRunner(const SessionPtr& session, std::unique_ptr<SessionRunner> runner,
                  v1::SessionReply opened) TRIBUTARY_LOCKED;

  // Gives the first step that waits its place among the calls of its sequences.
  void EnterNext(const SessionPtr& session) TRIBUTARY_LOCKED;
  // Accepts a step whose sequences are free.
  void Accept(const SessionPtr& session, const SessionStepPtr& step) TRIBUTARY_LOCKED;
  void Refuse(const SessionPtr& session, const SessionStepPtr& step,
              const absl::Status& why) TRIBUTARY_LOCKED;
  void Send(const SessionPtr& session, const SessionStepPtr& step) TRIBUTARY_LOCKED;
  // Sends the workers what is to be sent next of the session's steps.
  void SendCommands(const SessionPtr& session) TRIBUTARY_LOCKED;
  // Frees the step's place among the calls of its sequences.
  void LeaveOrder(SessionStep* step) TRIBUTARY_LOCKED;
  // Settles the steps whose layers have all been carried out.
  void SettleDone(const SessionPtr& session) TRIBUTARY_LOCKED;
  void TellEnded(const SessionPtr& session, const SessionStep& step, const absl::Status& status,
                 uint32_t layers_done) TRIBUTARY_LOCKED;

  // Accepts nothing any more and tells the workers to end the session. Then comes FinishEnd.
  void BeginEnd(const SessionPtr& session, const absl::Status& why) TRIBUTARY_LOCKED;
  // Undoes what was not carried out and tells the host.
  void FinishEnd(const SessionPtr& session) TRIBUTARY_LOCKED;
  void EndIfIdle(const SessionPtr& session) TRIBUTARY_LOCKED;
  // Adds a message to the outboxes of all endpoints, which send it when the critical section has
  // ended.
  void Tell(const SessionPtr& session, v1::SessionReply reply) TRIBUTARY_LOCKED;
  // The same for the last message about a step, which refuses the step or tells its end.
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
  SessionAdmission admission_;

  worker::SessionId next_id_ TRIBUTARY_GUARDED_BY(kCoordinatorLock) = 1;
  // Sessions that have not ended.
  absl::flat_hash_map<worker::SessionId, SessionPtr> sessions_
      TRIBUTARY_GUARDED_BY(kCoordinatorLock);
  // Sessions whose hosts were asked to time round trips, by their deadlines. Some may have ended.
  std::deque<SessionPtr> probed_ TRIBUTARY_GUARDED_BY(kCoordinatorLock);
  // Sessions that have ended and whose runners may still be running.
  std::vector<SessionPtr> unjoined_ TRIBUTARY_GUARDED_BY(kCoordinatorLock);
};

}  // namespace tributary::service
