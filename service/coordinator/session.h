// A session as the coordinator knows it, and who is told of it.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "base/sync/mutex.h"
#include "service/coordinator/cache.h"
#include "service/coordinator/call_context.h"
#include "service/coordinator/operation.h"
#include "service/coordinator/sessions/session_runner.h"
#include "service/data/coordinator_lock.h"
#include "service/data/host_mailbox.h"
#include "service/data/session_terms.h"
#include "service/data/waiting_choice.h"
#include "service/schedule/session_step.h"
#include "tributary/v1/session.pb.h"
#include "worker/command.h"

namespace tributary::service {

// The host's end of a session. Called without the coordinator's lock, one call at a time, in order.
class SessionListener {
 public:
  virtual ~SessionListener() = default;
  virtual void OnReply(v1::SessionReply reply) = 0;
  // The session is over, and this is the last call. OK: the host closed it.
  virtual void OnEnd(const absl::Status& why) = 0;
  // There is room for another LayerInput. On any thread, beside the other calls.
  virtual void OnRoom() {}
};

// The messages of a session to its host. They are decided under the coordinator's lock and sent in
// that order, whichever threads send them. Thread safe.
class SessionOutbox {
 public:
  explicit SessionOutbox(std::shared_ptr<SessionListener> listener)
      : listener_(std::move(listener)) {}

  void Reply(v1::SessionReply reply);
  // Adds the last message. What is added later is dropped.
  void End(const absl::Status& why);
  // Sends what was added, or leaves that to the thread that is already doing it. Called without the
  // coordinator's lock.
  void Drain();

 private:
  const std::shared_ptr<SessionListener> listener_;
  Mutex mutex_;
  std::deque<v1::SessionReply> replies_ TRIBUTARY_GUARDED_BY(mutex_);
  bool over_ TRIBUTARY_GUARDED_BY(mutex_) = false;
  absl::Status why_ TRIBUTARY_GUARDED_BY(mutex_);
  bool told_ TRIBUTARY_GUARDED_BY(mutex_) = false;  // OnEnd was called
  bool draining_ TRIBUTARY_GUARDED_BY(mutex_) = false;
};

// One SubmitStep from its check to its end.
struct SessionStep {
  SessionStepRequest request;
  OperationPtr operation;  // from when it takes its place among the calls of its sequences
  // The following are set when the step has been accepted.
  AcceptedRange accepted;
  uint32_t first_count = 0;
  uint32_t pieces() const { return static_cast<uint32_t>(request.pieces.size()); }
  uint32_t end() const {
    return first_count + static_cast<uint32_t>(request.range.count) * pieces();
  }
  std::vector<int32_t> conflicts;  // entries whose repeated tokens differ
};
using SessionStepPtr = std::shared_ptr<SessionStep>;

// Owned by Sessions, and by commands and streams that refer to it.
struct Session {
  enum class Phase : uint8_t {
    kOpening,  // the workers are making the mailbox
    kOpen,
    kEnding,  // nothing is accepted any more; the workers end what they were given
    kEnded,   // all steps are settled and the host has been told
  };

  Session(worker::SessionId number, CachePtr in_cache, SessionTerms asked, CallContext of_call,
          std::shared_ptr<SessionListener> listener)
      : id(number),
        cache(std::move(in_cache)),
        terms(std::move(asked)),
        call(std::move(of_call)),
        outbox(std::move(listener)) {}

  // Whether the workers have the mailbox, and steps are commands to them. Then there is no runner.
  bool on_workers() const { return terms.public_terms.memory() == v1::SESSION_MEMORY_DEVICE; }

  // Fixed, and therefore read without the lock.
  const CoordinatorLock::Clock::time_point since = CoordinatorLock::Clock::now();
  const worker::SessionId id;
  const CachePtr cache;
  const SessionTerms terms;
  const CallContext call;
  SessionOutbox outbox;  // thread safe
  // Set when it is opened; null where its steps are commands to the workers.
  std::unique_ptr<SessionRunner> runner;  // thread safe

  uint64_t epoch TRIBUTARY_GUARDED_BY(kCoordinatorLock) = 0;
  // Where it has several endpoints: what they show to join, their mailboxes, and their streams. The
  // last are null for endpoint 0, whose stream is `outbox`, and for endpoints that have not joined.
  std::string endpoint_secret TRIBUTARY_GUARDED_BY(kCoordinatorLock);
  std::vector<std::shared_ptr<HostMailbox>> mailboxes TRIBUTARY_GUARDED_BY(kCoordinatorLock);
  std::vector<std::shared_ptr<SessionOutbox>> joined TRIBUTARY_GUARDED_BY(kCoordinatorLock);
  // Set while the session is being opened and the host times round trips: until when it may do so.
  std::optional<CoordinatorLock::Clock::time_point> probed_until
      TRIBUTARY_GUARDED_BY(kCoordinatorLock);
  v1::DeviceMailbox mailbox TRIBUTARY_GUARDED_BY(kCoordinatorLock);  // set where it is on a GPU
  v1::Waiting way_to_wait TRIBUTARY_GUARDED_BY(kCoordinatorLock) = v1::WAITING_UNSPECIFIED;
  WaitingChoice choice TRIBUTARY_GUARDED_BY(kCoordinatorLock);  // where the mailbox is on a GPU
  uint64_t steps_done TRIBUTARY_GUARDED_BY(kCoordinatorLock) = 0;
  uint64_t layers_done TRIBUTARY_GUARDED_BY(kCoordinatorLock) = 0;  // layers of these steps
  Phase phase TRIBUTARY_GUARDED_BY(kCoordinatorLock) = Phase::kOpening;
  // The host asked for the end, which comes when the steps in flight are over.
  bool closing TRIBUTARY_GUARDED_BY(kCoordinatorLock) = false;
  absl::Status why TRIBUTARY_GUARDED_BY(kCoordinatorLock);  // why it ends; set from kEnding on
  uint64_t last_step_id TRIBUTARY_GUARDED_BY(kCoordinatorLock) = 0;
  bool submitted TRIBUTARY_GUARDED_BY(kCoordinatorLock) = false;   // whether there was any step
  uint32_t next_count TRIBUTARY_GUARDED_BY(kCoordinatorLock) = 0;  // number of the next layer
  // How many layers each rank, and all ranks, are known to have carried out. A runner counts as one
  // rank.
  std::vector<uint32_t> ended TRIBUTARY_GUARDED_BY(kCoordinatorLock);
  uint32_t carried_out TRIBUTARY_GUARDED_BY(kCoordinatorLock) = 0;
  // Steps that were submitted and not accepted yet. The first one waits for its sequences.
  std::deque<SessionStepPtr> waiting TRIBUTARY_GUARDED_BY(kCoordinatorLock);
  // Where steps are commands to the workers (sessions/device_commands.h): accepted steps of which
  // not all has been sent, how much of the first has been, and the ends of the commands that were
  // sent and are not over, in order.
  std::deque<SessionStepPtr> to_send TRIBUTARY_GUARDED_BY(kCoordinatorLock);
  uint32_t sent_of_first TRIBUTARY_GUARDED_BY(kCoordinatorLock) = 0;
  std::deque<uint32_t> sent TRIBUTARY_GUARDED_BY(kCoordinatorLock);
  // Steps that were accepted and are not settled, in order.
  std::deque<SessionStepPtr> in_flight TRIBUTARY_GUARDED_BY(kCoordinatorLock);
};
using SessionPtr = std::shared_ptr<Session>;

}  // namespace tributary::service
