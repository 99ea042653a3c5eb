#include "service/coordinator/sessions/sequenced_runner.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/strings/str_cat.h"
#include "base/status/errors.h"
#include "base/status/rpc_errors.h"
#include "base/status/status_macros.h"
#include "kernels/cpu/backend.h"
#include "service/coordinator/conflicts.h"
#include "service/coordinator/sessions/mailbox_channel.h"
#include "service/coordinator/sessions/message_channel.h"
#include "service/schedule/step_batch.h"

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
  // Every group answers every command by its deadline, so this ends.
  Outcome Wait() {
    const MutexLock lock(mutex_);
    while (!there_) changed_.Wait(mutex_);
    return std::move(outcome_);
  }

 private:
  Mutex mutex_;
  CondVar changed_;
  Outcome outcome_ TRIBUTARY_GUARDED_BY(mutex_);
  bool there_ TRIBUTARY_GUARDED_BY(mutex_) = false;
};

// Adds the entries of a step whose repeated tokens differ on some rank, each once.
absl::Status AddConflicts(const Outcome& outcome, const AcceptedStep& step,
                          worker::SessionNews* news) {
  for (const int32_t entry : ConflictsOf(outcome)) {
    if (entry < 0 || static_cast<size_t>(entry) >= step.entries.size()) {
      return absl::InternalError(
          absl::StrCat("a rank speaks of entry ", entry, " of a step of ", step.entries.size()));
    }
    const std::pair<uint32_t, int32_t> conflict = {step.first_count, entry};
    if (absl::c_find(news->conflicts, conflict) == news->conflicts.end()) {
      news->conflicts.push_back(conflict);
    }
  }
  return absl::OkStatus();
}

// Rounds a result to the host's format, where the host wants it.
void WriteResult(const worker::Reply& reply, const OutputFormat& format, const LayerTensors& to) {
  if (to.output != nullptr) cpu::StoreOutput(format, reply.o.data(), reply.o.size(), to.output);
  if (to.lse != nullptr) std::memcpy(to.lse, reply.lse.data(), reply.lse.size() * sizeof(float));
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
    TRIBUTARY_RETURN_IF_ERROR(RunLayer(step, i, news));
    ++news->ended;
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

absl::Status SequencedRunner::RunLayer(const AcceptedStep& step, int32_t index,
                                       worker::SessionNews* news) {
  const int32_t layer = step.range.first + index;
  const LayerCall call{.step_id = step.step_id,
                       .layer = layer,
                       .count = step.first_count + static_cast<uint32_t>(index),
                       .geometry = worker::GeometryOf(cache_->spec, cache_->spec.layers[layer]),
                       .query_rows = step.query_rows,
                       .new_tokens = step.new_tokens};
  TRIBUTARY_ASSIGN_OR_RETURN(LayerTensors tensors,
                             channel_->Take(call, Clock::now() + terms_.command.wait_timeout));
  const LayerPlace place = cache_->layer_groups.PlaceOf(layer);
  worker::StepCommand body{.layer = place.index, .kind = step.kind, .entries = step.entries};
  for (const GroupPages& pages : step.pages) {
    // The first layer of each group brings what changes in its pages.
    const std::vector<int32_t>& layers = cache_->layer_groups[pages.group].layers;
    const auto first = std::lower_bound(layers.begin(), layers.end(), step.range.first);
    if (pages.group != place.group || *first != layer) continue;
    body.page_copies = pages.page_copies;
    body.page_updates = pages.page_updates;
    body.standings = pages.standings;
  }
  body.q = tensors.q;
  body.k = tensors.k;
  body.v = tensors.v;
  body.result_in_reply = call.query_rows > 0;
  body.bf16_partials = terms_.command.output_dtype == DType::kBf16;
  const Outcome outcome = Execute(
      place.group, [&](const std::vector<worker::Standing>& standings, worker::Command* command) {
        body.standings.insert(body.standings.end(), standings.begin(), standings.end());
        command->body = std::move(body);
        command->owner = tensors.owner;
      });
  TRIBUTARY_RETURN_IF_ERROR(outcome.status);
  if (call.query_rows > 0) {
    TRIBUTARY_RETURN_IF_ERROR(CheckResult(call.geometry, call.query_rows, outcome.replies.front()));
  }
  TRIBUTARY_RETURN_IF_ERROR(AddConflicts(outcome, step, news));
  WriteResult(outcome.replies.front(),
              {terms_.command.output_dtype, cache_->spec.layers[layer].o_scale}, tensors);
  channel_->Deliver(call);
  return absl::OkStatus();
}

Outcome SequencedRunner::Execute(int32_t group, const FillWith& fill) {
  const auto answer = std::make_shared<Answer>();
  std::vector<worker::Standing> standings;
  {
    const CriticalSection section(context_.lock);
    if (context_.serving.epoch() != epoch_ || !context_.serving.ready()) {
      return {StepAborted("the group of workers has changed", context_.retry_delay), {}};
    }
    standings = cache_->table.TakeStandings(group);
    context_.commands.Send(
        cache_->ids[group],
        [fill, standings](worker::Command* command) { fill(standings, command); },
        [answer](Outcome outcome) { answer->Set(std::move(outcome)); });
  }
  Outcome outcome = answer->Wait();
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

std::unique_ptr<SessionRunner> CreateMailboxRunner(const SequencedContext& context, CachePtr cache,
                                                   uint64_t epoch, const SessionTerms& terms,
                                                   std::shared_ptr<HostMailbox> mailbox,
                                                   std::chrono::nanoseconds spin,
                                                   RunnerEvents events) {
  return std::make_unique<MailboxRunner>(
      context, std::move(cache), epoch, terms,
      std::make_unique<MailboxChannel>(terms, std::move(mailbox), spin), std::move(events));
}

}  // namespace tributary::service
