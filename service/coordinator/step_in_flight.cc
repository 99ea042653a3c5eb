#include "service/coordinator/step_in_flight.h"

#include <algorithm>
#include <chrono>
#include <utility>
#include <variant>

#include "absl/container/flat_hash_set.h"
#include "absl/container/inlined_vector.h"
#include "absl/strings/str_cat.h"
#include "base/status/rpc_errors.h"
#include "service/coordinator/conflicts.h"
#include "service/schedule/step_batch.h"
#include "worker/output_bytes.h"

namespace tributary::service {

void CountCommitted(const StepMember& member, v1::Statistics* statistics) {
  statistics->set_query_rows(statistics->query_rows() + member.request.query_rows);
  for (const worker::StepEntry& entry : member.reservation.entries) {
    if (entry.replay) {
      statistics->set_replays(statistics->replays() + 1);
    } else if (member.request.key.kind != worker::StepKind::kDflash) {
      statistics->set_tokens_appended(statistics->tokens_appended() + entry.new_tokens);
    }
  }
}

void Settle(StepInFlight* step, const Outcome& outcome, std::chrono::milliseconds retry_delay,
            v1::Statistics* statistics) {
  const absl::Status common = FromOutcome(outcome.status, retry_delay);
  const absl::flat_hash_set<int32_t> conflicts = ConflictsOf(outcome);
  SequenceTable& table = step->cache->table;
  int32_t first = 0;  // entry of the command
  for (StepMember* member : step->members) {
    member->settled = common;
    member->settled.Update(member->request.CheckInputsWhole());
    const int32_t count = static_cast<int32_t>(member->reservation.entries.size());
    for (int32_t i = 0; i < count && member->settled.ok(); ++i) {
      if (conflicts.contains(first + i)) {
        member->settled = OtherTokensHeld(member->first_entry + i);
      }
    }
    first += count;
    if (member->settled.ok()) {
      table.Commit(member->reservation);
      if (!member->is_piece) CountCommitted(*member, statistics);
    } else {
      table.Rollback(member->reservation);
      statistics->set_requests_failed(statistics->requests_failed() + 1);
    }
  }
}

double CountStep(const Outcome& outcome, v1::Statistics* statistics) {
  worker::StepTimes slowest;
  double seconds = 0;
  for (const worker::Reply& reply : outcome.replies) {
    seconds = std::max(seconds, reply.times.append + reply.times.attend + reply.times.exchange);
    slowest.plan = std::max(slowest.plan, reply.times.plan);
    slowest.append = std::max(slowest.append, reply.times.append);
    slowest.attend = std::max(slowest.attend, reply.times.attend);
    slowest.exchange = std::max(slowest.exchange, reply.times.exchange);
  }
  statistics->set_steps(statistics->steps() + 1);
  statistics->set_plan_seconds(statistics->plan_seconds() + slowest.plan);
  statistics->set_append_seconds(statistics->append_seconds() + slowest.append);
  statistics->set_attend_seconds(statistics->attend_seconds() + slowest.attend);
  statistics->set_exchange_seconds(statistics->exchange_seconds() + slowest.exchange);
  return seconds;
}

void BuildCommand(StepInFlight* step, int32_t layer_in_group, bool copy_shared,
                  worker::Command* command) {
  absl::InlinedVector<ReservedRequest, 4> requests;
  for (const StepMember* member : step->members) {
    requests.push_back({&member->request, &member->reservation});
  }
  BuiltStep built = BuildStep(requests, copy_shared);
  built.command.layer = layer_in_group;
  built.command.standings = step->standings;
  step->outputs = built.command.outputs;
  command->body = std::move(built.command);
  command->owner = std::move(built.owner);
}

void TellSubmitted(Observer& observer, StepInFlight* step, worker::Command* command) {
  const auto& body = std::get<worker::StepCommand>(command->body);
  StepRecord& record = step->record;
  record.number = command->number;
  record.epoch = command->epoch;
  record.cache = step->cache->id();
  record.layer = step->members.front()->reservation.layer;
  record.kind = body.kind;
  record.entries = static_cast<int32_t>(body.entries.size());
  for (const worker::StepEntry& entry : body.entries) {
    record.query_rows += entry.query_rows;
    record.new_tokens += entry.new_tokens;
  }
  record.bytes_in = body.q.bytes + body.k.bytes + body.v.bytes;
  record.submitted = std::chrono::steady_clock::now();
  record.trace = observer.OnStepSubmitted(record);
  command->trace = record.trace;
}

void AnswerMembers(const StepInFlight& step) {
  const Outcome& outcome = step.outcome;
  const worker::CacheSpec& spec = step.cache->spec;
  const worker::LayerGeometry geometry =
      worker::GeometryOf(spec, spec.layers[static_cast<size_t>(step.record.layer)]);
  // The next member's results in the reply of a step that all ranks carried out.
  const std::byte* result = outcome.status.ok() ? outcome.replies.front().result.data() : nullptr;
  auto next_output = step.outputs.begin();
  for (size_t i = 0; i < step.members.size(); ++i) {
    const StepMember* member = step.members[i];
    const StepRequest& request = member->request;
    const worker::StepOutput* const output = request.output.has_value() ? &*next_output++ : nullptr;
    const std::byte* const own = result;
    if (result != nullptr && output != nullptr) {
      result += worker::BytesInReply({output, 1}, geometry);
    }
    if (!member->settled.ok()) {
      member->done(member->settled);
      continue;
    }
    // A caller that cancelled may have given its output region to another use.
    if (Cancelled(step.operations[i]->call)) {
      member->done(absl::CancelledError("cancelled while it took effect"));
      continue;
    }
    v1::AttendReply reply;
    reply.set_request_id(request.request_id);
    if (output != nullptr) WriteReply(request, *output, own, &reply);
    // Its tokens are held. The caller repeats the call with another place for the result.
    if (absl::Status lost = request.CheckResultsWhole(); !lost.ok()) {
      member->done(std::move(lost));
      continue;
    }
    for (const StepReservation::Change& change : member->reservation.changes) {
      reply.add_lengths(change.length);
    }
    member->done(std::move(reply));
  }
}

void TellEnded(Observer& observer, StepInFlight* step) {
  step->record.answered = std::chrono::steady_clock::now();
  observer.OnStepEnded(step->record, step->outcome.status, step->outcome.replies);
}

}  // namespace tributary::service
