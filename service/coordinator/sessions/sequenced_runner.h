// Runs a session's layers from this process, one command per layer. It works with every group of
// workers, and no rank ever waits for a host.
#pragma once

#include <chrono>
#include <deque>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "base/sync/mutex.h"
#include "service/coordinator/cache.h"
#include "service/coordinator/critical_section.h"
#include "service/coordinator/group_commands.h"
#include "service/coordinator/serving_state.h"
#include "service/coordinator/sessions/layer_channel.h"
#include "service/coordinator/sessions/session_runner.h"
#include "service/data/host_mailbox.h"
#include "service/data/session_terms.h"

namespace tributary::service {

// What runners use of the coordinator. It outlives them.
struct SequencedContext {
  CoordinatorLock& lock;
  const ServingState& serving;
  GroupCommands& commands;
  std::chrono::milliseconds retry_delay;  // that callers are asked for after an abort
  bool sends_tensors = false;             // WorkerGroup::sends_tensors
};

// The session's one thread waits for the host, gives the layer to the workers, waits for them, and
// hands the result back. Waits for the host end by the session's bound, waits for the workers by
// the command's deadline, which every WorkerGroup keeps.
class SequencedRunner : public SessionRunner {
 public:
  SequencedRunner(const SequencedContext& context, CachePtr cache, uint64_t epoch,
                  SessionTerms terms, std::unique_ptr<LayerChannel> channel, RunnerEvents events);
  ~SequencedRunner() override;

  void Begin(AcceptedStepPtr step) override TRIBUTARY_LOCKED;
  void Close(absl::Status why) override TRIBUTARY_LOCKED;
  void Join() override;

 protected:
  LayerChannel& channel() { return *channel_; }

 private:
  void EndWaits(absl::Status why);
  // Of the thread.
  void Run();
  // The next step; null when the session was closed.
  AcceptedStepPtr NextStep();
  // Counts what it has done in `news`.
  absl::Status RunStep(const AcceptedStep& step, worker::SessionNews* news);
  // Carries out piece `piece` of the step's layer number `index`.
  absl::Status RunPiece(const AcceptedStep& step, int32_t index, int32_t piece,
                        worker::SessionNews* news);
  // Tells the workers the tables of groups that have no layer in the step.
  absl::Status TellOtherGroups(const AcceptedStep& step);
  // Fills a command of a group of layers, with how sequences of the group stand by now.
  using FillWith = std::function<void(std::vector<worker::Standing> standings, worker::Command*)>;
  // Gives a command to the workers and waits until all ranks have replied. The status is what the
  // host is told.
  Outcome Execute(int32_t group, const FillWith& fill);

  const SequencedContext context_;
  const CachePtr cache_;
  const uint64_t epoch_;
  const SessionTerms terms_;
  const std::unique_ptr<LayerChannel> channel_;
  const RunnerEvents events_;

  Mutex mutex_;
  CondVar changed_;
  std::deque<AcceptedStepPtr> steps_ TRIBUTARY_GUARDED_BY(mutex_);
  absl::Status closed_ TRIBUTARY_GUARDED_BY(mutex_);
  std::thread thread_;  // the last member: it uses the others
};

// Layers as messages.
std::unique_ptr<SessionRunner> CreateMessageRunner(const SequencedContext& context, CachePtr cache,
                                                   uint64_t epoch, const SessionTerms& terms,
                                                   RunnerEvents events);
// Layers through mailboxes in shared memory, one for each endpoint; `spin` as MailboxChannel has
// it.
std::unique_ptr<SessionRunner> CreateMailboxRunner(
    const SequencedContext& context, CachePtr cache, uint64_t epoch, const SessionTerms& terms,
    std::vector<std::shared_ptr<HostMailbox>> mailboxes, std::chrono::nanoseconds spin,
    RunnerEvents events);

}  // namespace tributary::service
