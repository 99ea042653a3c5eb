#include "service/coordinator/sessions/sequenced_runner.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/strings/str_cat.h"
#include "base/status/errors.h"
#include "base/status/rpc_errors.h"
#include "base/status/status_macros.h"
#include "base/sync/spin.h"
#include "service/coordinator/conflicts.h"
#include "service/coordinator/sessions/endpoint_channel.h"
#include "service/coordinator/sessions/mailbox_channel.h"
#include "service/coordinator/sessions/message_channel.h"
#include "service/schedule/step_batch.h"
#include "service/schedule/step_pieces.h"

namespace tributary::service {
namespace {

using Clock = std::chrono::steady_clock;

// The outcome of one command, for a thread that waits for it.
class Answer {
 public:
  void Set(Outcome outcome) {
    const MutexLock lock(mutex_);
    outcome_ = std::move(outcome);
    there_ = true;
    changed_.NotifyAll();
  }
  // Every group answers every command by its deadline, so this ends. `spin`: for how long it looks
  // before it sleeps.
  Outcome Wait(std::chrono::nanoseconds spin) {
    SpinUntil([this] { return there(); }, spin);
    const MutexLock lock(mutex_);
    while (!there_) changed_.Wait(mutex_);
    return std::move(outcome_);
  }
  bool there() const { return there_.load(std::memory_order_relaxed); }

 private:
  Mutex mutex_;
  CondVar changed_;
  Outcome outcome_ TRIBUTARY_GUARDED_BY(mutex_);
  std::atomic<bool> there_{false};  // written under the mutex
};

// Adds the parts of a piece whose repeated tokens differ on some rank, each once, whatever the
// layer. The coordinator knows which entries they are of, as it does for sessions of workers.
absl::Status AddConflicts(const Outcome& outcome, const AcceptedStep& step, int32_t number,
                          worker::SessionNews* news) {
  const size_t parts = step.pieces[static_cast<size_t>(number)].parts.size();
  for (const int32_t part : ConflictsOf(outcome)) {
    if (part < 0 || static_cast<size_t>(part) >= parts) {
      return absl::InternalError(
          absl::StrCat("a rank speaks of entry ", part, " of a step of ", parts));
    }
    const std::pair<uint32_t, int32_t> conflict = {step.first_count + static_cast<uint32_t>(number),
                                                   part};
    if (absl::c_find(news->conflicts, conflict) == news->conflicts.end()) {
      news->conflicts.push_back(conflict);
    }
  }
  return absl::OkStatus();
}

// Workers to which tensors are sent send their results back, too.
worker::OutputPlace ForWorkers(const worker::OutputPlace& place, bool sends_tensors) {
  if (sends_tensors && place.data != nullptr) return {.in_reply = true};
  return place;
}

class MessageRunner final : public SequencedRunner {
 public:
  MessageRunner(const SequencedContext& context, CachePtr cache, uint64_t epoch,
                const SessionTerms& terms, std::unique_ptr<MessageChannel> messages,
                RunnerEvents events)
      : SequencedRunner(context, std::move(cache), epoch, terms, std::move(messages),
                        std::move(events)),
        messages_(static_cast<MessageChannel&>(channel())) {}

  absl::Status OnLayer(v1::LayerInput layer) override {
    messages_.Put(std::move(layer));
    return absl::OkStatus();
  }
  bool HasRoom() const override { return messages_.HasRoom(); }
  void OnStepRefused(uint64_t step_id) override { messages_.Refuse(step_id); }

 private:
  MessageChannel& messages_;
};

class MailboxRunner final : public SequencedRunner {
 public:
  using SequencedRunner::SequencedRunner;

  absl::Status OnLayer(v1::LayerInput) override { return LayersGoThroughMailbox(); }
  bool HasRoom() const override { return true; }
  void OnStepRefused(uint64_t) override {}
};

}  // namespace

absl::Status LayersGoThroughMailbox() {
  return InvalidField("layer", "the session's layers go through its mailbox");
}

SequencedRunner::SequencedRunner(const SequencedContext& context, CachePtr cache, uint64_t epoch,
                                 SessionTerms terms, std::unique_ptr<LayerChannel> channel,
                                 RunnerEvents events)
    : context_(context),
      cache_(std::move(cache)),
      epoch_(epoch),
      terms_(std::move(terms)),
      channel_(std::move(channel)),
      events_(std::move(events)),
      thread_([this] { Run(); }) {}

SequencedRunner::~SequencedRunner() {
  EndWaits(absl::CancelledError("the session is over"));
  SequencedRunner::Join();
}

void SequencedRunner::Join() {
  if (thread_.joinable()) thread_.join();
}

void SequencedRunner::Begin(AcceptedStepPtr step) {
  const MutexLock lock(mutex_);
  if (!closed_.ok()) return;  // on_end speaks for it
  steps_.push_back(std::move(step));
  changed_.NotifyAll();
}

void SequencedRunner::Close(absl::Status why) { EndWaits(std::move(why)); }

void SequencedRunner::EndWaits(absl::Status why) {
  channel_->End(why);
  const MutexLock lock(mutex_);
  if (!closed_.ok()) return;
  closed_ = std::move(why);
  changed_.NotifyAll();
}

AcceptedStepPtr SequencedRunner::NextStep() {
  const MutexLock lock(mutex_);
  while (steps_.empty() && closed_.ok()) changed_.Wait(mutex_);
  if (!closed_.ok()) return nullptr;
  AcceptedStepPtr step = std::move(steps_.front());
  steps_.pop_front();
  return step;
}

void SequencedRunner::Run() {
  worker::SessionNews news{.session = terms_.command.session};
  while (const AcceptedStepPtr step = NextStep()) {
    news.conflicts.clear();
    news.status = RunStep(*step, &news);
    if (!news.status.ok()) break;
    events_.on_news(news);
  }
  if (news.status.ok()) {
    const MutexLock lock(mutex_);
    news.status = closed_;
    news.conflicts.clear();
  }
  channel_->End(news.status);
  events_.on_news(news);
}

absl::Status SequencedRunner::RunStep(const AcceptedStep& step, worker::SessionNews* news) {
  TRIBUTARY_RETURN_IF_ERROR(TellOtherGroups(step));
  for (int32_t i = 0; i < step.range.count; ++i) {
    for (int32_t piece = 0; piece < static_cast<int32_t>(step.pieces.size()); ++piece) {
      TRIBUTARY_RETURN_IF_ERROR(RunPiece(step, i, piece, news));
      ++news->ended;
    }
  }
  return absl::OkStatus();
}

absl::Status SequencedRunner::TellOtherGroups(const AcceptedStep& step) {
  for (const GroupPages& pages : step.pages) {
    const std::vector<int32_t>& layers = cache_->layer_groups[pages.group].layers;
    const bool in_range = std::any_of(layers.begin(), layers.end(), [&](int32_t layer) {
      return layer >= step.range.first && layer < step.range.end();
    });
    if (in_range || (pages.page_updates.empty() && pages.standings.empty())) continue;
    const Outcome outcome = Execute(
        pages.group, [&pages](std::vector<worker::Standing> standings, worker::Command* command) {
          standings.insert(standings.end(), pages.standings.begin(), pages.standings.end());
          command->body = worker::SetTablesCommand{pages.page_updates, std::move(standings)};
        });
    TRIBUTARY_RETURN_IF_ERROR(outcome.status);
  }
  return absl::OkStatus();
}

absl::Status SequencedRunner::RunPiece(const AcceptedStep& step, int32_t index, int32_t number,
                                       worker::SessionNews* news) {
  const int32_t layer = step.range.first + index;
  const mailbox::Piece& piece = step.pieces[static_cast<size_t>(number)];
  const auto pieces = static_cast<int32_t>(step.pieces.size());
  const LayerCall call{.step_id = step.step_id,
                       .layer = layer,
                       .piece = number,
                       .count = step.first_count + static_cast<uint32_t>(index * pieces + number),
                       .geometry = worker::GeometryOf(cache_->spec, cache_->spec.layers[layer]),
                       .query_rows = piece.rows,
                       .new_tokens = piece.tokens};
  TRIBUTARY_ASSIGN_OR_RETURN(LayerTensors tensors,
                             channel_->Take(call, Clock::now() + terms_.command.wait_timeout));
  const LayerPlace place = cache_->layer_groups.PlaceOf(layer);
  worker::StepCommand body{.layer = place.index,
                           .kind = KindOf(step.kind, step.pieces, piece),
                           .entries = EntriesOf(step.entries, piece)};
  for (const GroupPages& pages : step.pages) {
    // The first piece of each group's first layer brings what changes in its pages.
    const std::vector<int32_t>& layers = cache_->layer_groups[pages.group].layers;
    const auto first = std::lower_bound(layers.begin(), layers.end(), step.range.first);
    if (pages.group != place.group || *first != layer || number > 0) continue;
    body.page_copies = pages.page_copies;
    body.page_updates = pages.page_updates;
    body.standings = pages.standings;
  }
  body.q = tensors.q;
  body.k = tensors.k;
  body.v = tensors.v;
  const OutputFormat format = {terms_.command.output_dtype, cache_->spec.layers[layer].o_scale};
  std::vector<worker::StepOutput> outputs;
  if (call.query_rows > 0) {
    outputs.push_back({.rows = call.query_rows,
                       .format = format,
                       .o = ForWorkers(tensors.output, context_.sends_tensors),
                       .lse = ForWorkers(tensors.lse, context_.sends_tensors)});
  }
  body.outputs = outputs;
  body.bf16_partials = terms_.command.output_dtype == DType::kBf16;
  const Outcome outcome = Execute(
      place.group, [&](const std::vector<worker::Standing>& standings, worker::Command* command) {
        body.standings.insert(body.standings.end(), standings.begin(), standings.end());
        command->body = std::move(body);
        command->owner = tensors.owner;
      });
  TRIBUTARY_RETURN_IF_ERROR(outcome.status);
  const worker::Reply& merged = outcome.replies.front();
  if (!outputs.empty()) TRIBUTARY_RETURN_IF_ERROR(CheckResult(call.geometry, outputs, merged));
  TRIBUTARY_RETURN_IF_ERROR(AddConflicts(outcome, step, number, news));
  channel_->Deliver(call, {merged.result.data(), merged.result.size()});
  return absl::OkStatus();
}

Outcome SequencedRunner::Execute(int32_t group, const FillWith& fill) {
  const auto answer = std::make_shared<Answer>();
  const bool lent = context_.commands.borrows();
  const std::thread::id waiter = lent ? std::this_thread::get_id() : std::thread::id();
  std::vector<worker::Standing> standings;
  {
    const CriticalSection section(context_.lock);
    if (context_.serving.epoch() != epoch_ || !context_.serving.ready()) {
      return {StepAborted("the group of workers has changed", context_.retry_delay), {}};
    }
    standings = cache_->table.TakeStandings(group);
    context_.commands.Send(
        cache_->ids[group],
        [fill, standings, waiter](worker::Command* command) {
          command->waiter = waiter;
          fill(standings, command);
        },
        [answer](Outcome outcome) { answer->Set(std::move(outcome)); });
  }
  if (lent) context_.commands.Lend([&answer] { return answer->there(); });
  // It spins where there is a processor for this thread and another one for the worker's.
  static const bool spins = std::thread::hardware_concurrency() > 2;
  Outcome outcome = answer->Wait(spins ? kSpin : std::chrono::microseconds(0));
  if (!outcome.status.ok() && !standings.empty()) {
    const CriticalSection section(context_.lock);
    if (context_.serving.epoch() == epoch_) {
      context_.commands.TellAgain(cache_->ids[group], std::move(standings));
    }
  }
  outcome.status = FromOutcome(outcome.status, context_.retry_delay);
  return outcome;
}

std::unique_ptr<SessionRunner> CreateMessageRunner(const SequencedContext& context, CachePtr cache,
                                                   uint64_t epoch, const SessionTerms& terms,
                                                   RunnerEvents events) {
  auto channel = std::make_unique<MessageChannel>(terms, events.send, events.on_room);
  return std::make_unique<MessageRunner>(context, std::move(cache), epoch, terms,
                                         std::move(channel), std::move(events));
}

std::unique_ptr<SessionRunner> CreateMailboxRunner(
    const SequencedContext& context, CachePtr cache, uint64_t epoch, const SessionTerms& terms,
    std::vector<std::shared_ptr<HostMailbox>> mailboxes, std::chrono::nanoseconds spin,
    RunnerEvents events) {
  std::unique_ptr<LayerChannel> channel;
  if (mailboxes.size() == 1) {
    channel = std::make_unique<MailboxChannel>(terms, std::move(mailboxes.front()), spin);
  } else {
    channel = std::make_unique<EndpointChannel>(terms, mailboxes, spin);
  }
  return std::make_unique<MailboxRunner>(context, std::move(cache), epoch, terms,
                                         std::move(channel), std::move(events));
}

}  // namespace tributary::service
