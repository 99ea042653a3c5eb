#include "service/observe/flight_recorder.h"

#include <algorithm>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace tributary::service {
namespace {

using Clock = Observer::Clock;

double Seconds(Clock::time_point begin, Clock::time_point end) {
  return std::chrono::duration<double>(end - begin).count();
}

v1::StepFlight::Kind KindOf(worker::StepKind kind) {
  switch (kind) {
    case worker::StepKind::kAppend:
      return v1::StepFlight::APPEND;
    case worker::StepKind::kDecode:
      return v1::StepFlight::DECODE;
    case worker::StepKind::kPrefill:
      return v1::StepFlight::PREFILL;
    default:
      return v1::StepFlight::OTHER;
  }
}

}  // namespace

FlightRecorder::FlightRecorder(int ranks) {
  for (Slot& slot : slots_) {
    const MutexLock lock(slot.mutex);
    slot.replied.resize(ranks);
    slot.times.resize(ranks);
  }
}

void FlightRecorder::Submitted(const StepRecord& step) {
  Slot& slot = SlotOf(step.number);
  const MutexLock lock(slot.mutex);
  slot.number = step.number;
  slot.epoch = step.epoch;
  slot.cache = step.cache;
  slot.layer = step.layer;
  slot.kind = step.kind;
  slot.calls = static_cast<int32_t>(step.calls.size());
  slot.entries = step.entries;
  slot.query_rows = step.query_rows;
  slot.new_tokens = step.new_tokens;
  slot.begun = step.begun;
  slot.oldest_call = step.begun;
  for (const StepRecord::Call& call : step.calls) {
    slot.oldest_call = std::min(slot.oldest_call, call.accepted);
  }
  slot.submitted = step.submitted;
  slot.ended = false;
  slot.code = absl::StatusCode::kOk;
  std::fill(slot.replied.begin(), slot.replied.end(), false);
  std::fill(slot.times.begin(), slot.times.end(), worker::StepTimes());
}

void FlightRecorder::Ended(const StepRecord& step, const absl::Status& status,
                           const std::vector<worker::Reply>& replies) {
  Slot& slot = SlotOf(step.number);
  const MutexLock lock(slot.mutex);
  if (slot.number != step.number) return;  // a later one has the slot
  slot.ended = true;
  slot.code = status.code();
  slot.done = step.done;
  slot.answered = step.answered;
  if (!replies.empty()) {  // their number may have changed
    slot.replied.resize(replies.size());
    slot.times.resize(replies.size());
  }
  for (size_t rank = 0; rank < replies.size(); ++rank) {
    slot.replied[rank] = replies[rank].epoch != 0;  // 0: never came
    slot.times[rank] = replies[rank].times;
  }
}

void FlightRecorder::Describe(const Slot& slot, Clock::time_point now, v1::StepFlight* out) {
  out->set_number(slot.number);
  out->set_epoch(slot.epoch);
  out->set_cache(slot.cache);
  out->set_layer(slot.layer);
  out->set_kind(KindOf(slot.kind));
  out->set_calls(slot.calls);
  out->set_entries(slot.entries);
  out->set_query_rows(slot.query_rows);
  out->set_new_tokens(slot.new_tokens);
  out->set_age_seconds(Seconds(slot.begun, now));
  out->set_queue_seconds(Seconds(slot.oldest_call, slot.begun));
  out->set_build_seconds(Seconds(slot.begun, slot.submitted));
  out->set_state(!slot.ended                          ? v1::StepFlight::IN_FLIGHT
                 : slot.code == absl::StatusCode::kOk ? v1::StepFlight::DONE
                                                      : v1::StepFlight::FAILED);
  out->set_code(static_cast<int32_t>(slot.code));
  out->set_workers_seconds(Seconds(slot.submitted, slot.ended ? slot.done : now));
  if (!slot.ended) return;
  out->set_reply_seconds(Seconds(slot.done, slot.answered));
  for (size_t rank = 0; rank < slot.times.size(); ++rank) {
    v1::StepFlight::Rank* of = out->add_ranks();
    of->set_replied(slot.replied[rank]);
    of->set_plan_seconds(slot.times[rank].plan);
    of->set_append_seconds(slot.times[rank].append);
    of->set_attend_seconds(slot.times[rank].attend);
    of->set_exchange_seconds(slot.times[rank].exchange);
  }
}

v1::FlightRecord FlightRecorder::Read(size_t most) const {
  const Clock::time_point now = Clock::now();
  v1::FlightRecord record;
  for (const Slot& slot : slots_) {
    const MutexLock lock(slot.mutex);
    if (slot.number != 0) Describe(slot, now, record.add_steps());
  }
  auto* steps = record.mutable_steps();
  std::sort(steps->begin(), steps->end(), [](const v1::StepFlight& a, const v1::StepFlight& b) {
    return a.number() < b.number();
  });
  const int extra = most == 0 ? 0 : std::max(0, steps->size() - static_cast<int>(most));
  steps->DeleteSubrange(0, extra);
  return record;
}

std::string Line(const v1::StepFlight& step) {
  std::string line = absl::StrFormat(
      "step %u: %s %s of cache %u layer %d, calls=%d entries=%d rows=%d tokens=%d, begun %.3fs "
      "ago, "
      "queue=%.6fs build=%.6fs workers=%.6fs",
      step.number(), v1::StepFlight::State_Name(step.state()),
      v1::StepFlight::Kind_Name(step.kind()), step.cache(), step.layer(), step.calls(),
      step.entries(), step.query_rows(), step.new_tokens(), step.age_seconds(),
      step.queue_seconds(), step.build_seconds(), step.workers_seconds());
  if (step.state() == v1::StepFlight::FAILED) {
    absl::StrAppend(&line,
                    " code=", absl::StatusCodeToString(static_cast<absl::StatusCode>(step.code())));
  }
  for (int rank = 0; rank < step.ranks_size(); ++rank) {
    const v1::StepFlight::Rank& of = step.ranks(rank);
    if (!of.replied()) {
      absl::StrAppend(&line, " rank", rank, "=silent");
      continue;
    }
    absl::StrAppendFormat(&line, " rank%d=%.6f+%.6f+%.6f+%.6fs", rank, of.plan_seconds(),
                          of.append_seconds(), of.attend_seconds(), of.exchange_seconds());
  }
  return line;
}

}  // namespace tributary::service
