// Carries out the accepted steps of one session from this process. (Sessions whose mailbox lies on
// a GPU have none: their steps are commands to the workers.)
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "base/mailbox/pieces.h"
#include "service/coordinator/critical_section.h"
#include "service/data/coordinator_lock.h"
#include "service/schedule/range_steps.h"
#include "tributary/v1/session.pb.h"
#include "worker/backend.h"
#include "worker/command.h"

namespace tributary::service {

// What a runner needs to know of a step that was accepted. It never changes any more.
struct AcceptedStep {
  uint64_t step_id = 0;
  worker::StepKind kind = worker::StepKind::kDecode;
  LayerRange range;
  uint32_t first_count = 0;  // the session's number of the first piece of its first layer
  std::vector<worker::StepEntry> entries;
  std::vector<mailbox::Piece> pieces;  // the pieces in which each layer goes
  std::vector<GroupPages> pages;       // what the workers are told before its first layer
};

using AcceptedStepPtr = std::shared_ptr<const AcceptedStep>;

// Called on the runner's thread, one at a time, without the coordinator's lock.
struct RunnerEvents {
  // A step is done, or, with a status, the session is over and nothing of it runs any more; then
  // nothing follows.
  std::function<void(const worker::SessionNews&)> on_news;
  // Sends a message to the host.
  std::function<void(v1::SessionReply)> send;
  // There is room for another layer that comes in a message. Also called by OnStepRefused.
  std::function<void()> on_room;
};

// What a layer in a message is refused with where it belongs into the mailbox.
absl::Status LayersGoThroughMailbox();

// Thread safe.
class SessionRunner {
 public:
  virtual ~SessionRunner() = default;
  // Takes the next step, in the order in which steps were accepted. Does not wait, nor does Close.
  virtual void Begin(AcceptedStepPtr step) TRIBUTARY_LOCKED = 0;
  // Ends the session: every wait of either side ends, and the host finds why. `why` is not OK.
  // Changes nothing when the runner has ended.
  virtual void Close(absl::Status why) TRIBUTARY_LOCKED = 0;
  // Waits until nothing of it runs any more and no event follows. Called after Close, by one thread
  // that is not the runner's own.
  virtual void Join() TRIBUTARY_UNLOCKED = 0;

  // A layer came in a message.
  virtual absl::Status OnLayer(v1::LayerInput layer) = 0;
  // Whether another LayerInput may be read from the stream.
  virtual bool HasRoom() const = 0;
  // A step was refused: layers that were sent for it are left out.
  virtual void OnStepRefused(uint64_t step_id) TRIBUTARY_UNLOCKED = 0;
};

}  // namespace tributary::service
