// From an accepted Attend or Append to its reply: order, batch, plan, command, settle.
#include <algorithm>
#include <utility>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "base/status/rpc_errors.h"
#include "service/coordinator/coordinator.h"
#include "service/coordinator/operation.h"
#include "service/schedule/step_batch.h"

namespace tributary::service {
namespace {

bool Cancelled(const CallContext& call) {
  return call.cancelled != nullptr && call.cancelled->load(std::memory_order_acquire);
}

// Entries (of the whole step) whose repeated tokens differ on some rank.
absl::flat_hash_set<int32_t> Conflicts(const Outcome& outcome) {
  absl::flat_hash_set<int32_t> conflicts;
  for (const worker::Reply& reply : outcome.replies) {
    conflicts.insert(reply.conflicts.begin(), reply.conflicts.end());
  }
  return conflicts;
}

}  // namespace

// ------------------------------------------------------------------------------------- admission

void Coordinator::Append(std::shared_ptr<const v1::AppendRequest> request, const CallContext& call,
                         Done<v1::AppendReply> done) {
  AdmitStep(
      request->cache_id(), call,
      [request](const StepContext& context) { return CheckAppend(request, context); },
      [done = std::move(done)](absl::StatusOr<v1::AttendReply> attended) {
        if (!attended.ok()) return done(attended.status());
        v1::AppendReply reply;
        reply.mutable_lengths()->Swap(attended->mutable_lengths());
        done(std::move(reply));
      });
}

void Coordinator::Attend(std::shared_ptr<const v1::AttendRequest> request, const CallContext& call,
                         Done<v1::AttendReply> done) {
  AdmitStep(
      request->cache_id(), call,
      [request](const StepContext& context) { return CheckAttend(request, context); },
      [done = std::move(done),
       id = request->request_id()](absl::StatusOr<v1::AttendReply> attended) {
        if (attended.ok()) attended->set_request_id(id);
        done(std::move(attended));
      });
}

void Coordinator::AdmitStep(
    const std::string& cache_name, const CallContext& call,
    const std::function<absl::StatusOr<StepRequest>(const StepContext&)>& check,
    std::function<void(absl::StatusOr<v1::AttendReply>)> done) {
  absl::StatusOr<CachePtr> cache = [&] {
    std::lock_guard lock(mutex_);
    return FindCache(cache_name);
  }();
  // Tensors are checked without the lock.
  absl::StatusOr<StepRequest> request = [&]() -> absl::StatusOr<StepRequest> {
    if (!cache.ok()) return cache.status();
    return check({.cache = (*cache)->id(),
                  .spec = &(*cache)->spec,
                  .terms = &(*cache)->terms,
                  .backends = &(*cache)->backends,
                  .regions = &regions_,
                  .max_message_bytes = options_.max_message_bytes});
  }();
  Turn turn(this);
  ++open_calls_;
  // It may have been deleted, and the group may have broken, in between.
  absl::Status refused = request.status();
  if (refused.ok()) refused = FindCache(cache_name).status();
  if (refused.ok()) refused = UseRegions(*request);
  if (!refused.ok()) {
    statistics_.set_requests_failed(statistics_.requests_failed() + 1);
    turn.Answer([done = std::move(done), refused] { done(refused); });
    return;
  }
  auto operation = std::make_shared<Operation>();
  for (const worker::StepEntry& entry : request->entries) {
    operation->sequences.push_back(entry.sequence);
  }
  operation->cache = *std::move(cache);
  operation->call = call;
  operation->step = *std::move(request);
  operation->attended = std::move(done);
  statistics_.set_requests(statistics_.requests() + 1);
  Accept(std::move(operation), turn);
}

void Coordinator::Accept(OperationPtr operation, Turn& turn) {
  operation->accepted = Clock::now();
  operation->serial = next_serial_++;
  operation->call.deadline =
      std::min(operation->call.deadline, operation->accepted + options_.max_call_timeout);
  waiting_.emplace(std::make_pair(operation->call.deadline, operation->serial), operation);
  if (operation->cache->order.Enter(operation.get())) Run(operation, turn);
}

void Coordinator::StopWaiting(const OperationPtr& operation) {
  waiting_.erase({operation->call.deadline, operation->serial});
}

// ----------------------------------------------------------------------------------------- order

// Its turn at all its sequences has come.
void Coordinator::Run(const OperationPtr& operation, Turn& turn) {
  if (operation->step.has_value()) {
    const StepRequest& request = *operation->step;
    batcher_.Add(request.key, {.request = operation.get(),
                               .rows = request.rows(),
                               .entries = static_cast<int32_t>(request.entries.size()),
                               .arrival = operation->accepted});
    return;
  }
  if (Cancelled(operation->call)) {
    return Fail(operation, absl::CancelledError("cancelled before it took effect"), turn);
  }
  StopWaiting(operation);
  operation->apply(*operation->cache, turn);
  Leave(operation.get(), turn);
}

void Coordinator::Leave(Operation* leaving, Turn& turn) {
  std::vector<SequenceOrder::Member*> runnable;
  leaving->cache->order.Leave(leaving, &runnable);
  for (SequenceOrder::Member* member : runnable) {
    auto* next = static_cast<Operation*>(member);
    runnable_.push_back(waiting_.at({next->call.deadline, next->serial}));
  }
  // Whoever runs may leave in turn: here one after the other, however many are queued, not nested.
  if (std::exchange(running_, true)) return;
  while (!runnable_.empty()) {
    const OperationPtr operation = std::move(runnable_.front());
    runnable_.pop_front();
    const bool waits = waiting_.contains({operation->call.deadline, operation->serial});
    if (waits) Run(operation, turn);  // else it failed meanwhile
  }
  running_ = false;
}

// Of an operation that no step has taken yet.
void Coordinator::Fail(const OperationPtr& failing, const absl::Status& status, Turn& turn) {
  const OperationPtr operation = failing;  // outlives the map's own
  StopWaiting(operation);
  if (operation->step.has_value()) {
    batcher_.Remove(operation->step->key, operation.get());
    ReleaseRegions(*operation->step, turn);
    statistics_.set_requests_failed(statistics_.requests_failed() + 1);
  }
  turn.Answer([operation, status] {
    if (operation->step.has_value()) {
      operation->attended(status);
    } else {
      operation->failed(status);
    }
  });
  Leave(operation.get(), turn);
}

// All of them, or those of one cache.
void Coordinator::FailWaiting(const absl::Status& status, const Cache* only, Turn& turn) {
  std::vector<OperationPtr> failing;
  for (const auto& [key, operation] : waiting_) {
    if (only == nullptr || operation->cache.get() == only) failing.push_back(operation);
  }
  // The last to arrive first, so that none becomes runnable by another's leaving.
  std::sort(failing.begin(), failing.end(),
            [](const OperationPtr& a, const OperationPtr& b) { return a->serial > b->serial; });
  for (const OperationPtr& operation : failing) Fail(operation, status, turn);
}

// ----------------------------------------------------------------------------------------- steps

void Coordinator::BeginSteps(Turn& turn) {
  while (state_ == State::kReady && steps_in_flight_ < options_.pipeline_depth &&
         !batcher_.empty()) {
    const auto batch = batcher_.Take(Clock::now());
    if (!batch.has_value()) return;
    BeginStep(*batch, turn);
  }
}

// Fixes who takes part. From here on a caller that loses interest changes nothing for the workers.
void Coordinator::BeginStep(const Batcher::Batch& batch, Turn& turn) {
  const Clock::time_point now = Clock::now();
  auto step = std::make_shared<Step>();
  step->epoch = epoch_;
  step->record.begun = now;
  for (void* request : batch.requests) {
    auto* candidate = static_cast<Operation*>(request);
    const OperationPtr operation = waiting_.at({candidate->call.deadline, candidate->serial});
    if (!JoinStep(operation, now, turn)) continue;
    step->operations.push_back(operation);
    step->record.calls.push_back({operation->accepted, operation->call.trace});
  }
  if (step->operations.empty()) return;
  step->cache = step->operations.front()->cache;
  ++steps_in_flight_;
  const LayerPlace place = step->cache->table.groups().PlaceOf(batch.key.layer);
  Send(
      step->cache->ids[place.group],
      [this, step, place](worker::Command* command) {
        std::vector<PlannedRequest> requests;
        for (const OperationPtr& o : step->operations) requests.push_back({&*o->step, &o->plan});
        BuiltStep built = BuildStep(requests);
        built.command.layer = place.index;
        command->body = std::move(built.command);
        command->owner = std::move(built.owner);
        TellSubmitted(step.get(), command);
      },
      [this, step](Outcome outcome) { OnStepDone(step, std::move(outcome)); }, turn);
}

bool Coordinator::JoinStep(const OperationPtr& operation, Clock::time_point now, Turn& turn) {
  if (Cancelled(operation->call)) {
    Fail(operation, absl::CancelledError("cancelled before it took effect"), turn);
    return false;
  }
  if (operation->call.deadline <= now) {
    Fail(operation, absl::DeadlineExceededError("the deadline passed before the call took effect"),
         turn);
    return false;
  }
  absl::StatusOr<StepPlan> plan = operation->cache->table.Plan(
      operation->step->key.layer, operation->step->key.kind, operation->step->entries);
  if (!plan.ok()) {
    Fail(operation, plan.status(), turn);
    return false;
  }
  operation->plan = *std::move(plan);
  StopWaiting(operation);
  statistics_.set_queue_seconds(statistics_.queue_seconds() +
                                std::chrono::duration<double>(now - operation->accepted).count());
  return true;
}

void Coordinator::OnStepDone(const StepPtr& step, Outcome outcome) {
  step->record.done = Clock::now();
  Turn turn(this);
  --steps_in_flight_;
  // A group formed since was told the tables without this step's changes.
  if (step->epoch != epoch_) outcome.status = absl::AbortedError("the group has re-formed");
  if (outcome.status.ok()) {
    CountStep(outcome);
  } else {
    statistics_.set_steps_aborted(statistics_.steps_aborted() + 1);
  }
  Settle(step.get(), outcome);
  // Before those of calls that follow: replies of one sequence come in the order of effect.
  for (size_t i = 1; i < step->operations.size(); ++i) turn.Answer([] {});
  turn.Answer([this, step, outcome = std::make_shared<const Outcome>(std::move(outcome))] {
    AnswerStep(*step, *outcome);
    TellEnded(step.get(), *outcome);
  });
  for (const OperationPtr& operation : step->operations) {
    ReleaseRegions(*operation->step, turn);
    Leave(operation.get(), turn);
  }
}

// Commits or rolls back each request by itself: one that conflicts takes nothing from the others.
void Coordinator::Settle(Step* step, const Outcome& outcome) {
  const absl::Status common = FromOutcome(outcome.status, options_.retry_delay);
  const absl::flat_hash_set<int32_t> conflicts = Conflicts(outcome);
  SequenceTable& table = step->cache->table;
  int32_t first = 0;  // entry of the command
  for (const OperationPtr& operation : step->operations) {
    operation->settled = common;
    const int32_t count = static_cast<int32_t>(operation->plan.entries.size());
    for (int32_t i = 0; i < count && operation->settled.ok(); ++i) {
      if (!conflicts.contains(first + i)) continue;
      operation->settled =
          Conflict(absl::StrCat("entries[", i, "].first_position"),
                   "other K/V are held at these positions; truncate the sequence to replace them");
    }
    first += count;
    if (!operation->settled.ok()) {
      table.Rollback(operation->plan);
      statistics_.set_requests_failed(statistics_.requests_failed() + 1);
      continue;
    }
    table.Commit(operation->plan);
    statistics_.set_query_rows(statistics_.query_rows() + operation->step->query_rows);
    for (const worker::StepEntry& entry : operation->plan.entries) {
      if (entry.replay) {
        statistics_.set_replays(statistics_.replays() + 1);
      } else if (operation->step->key.kind != worker::StepKind::kDflash) {
        statistics_.set_tokens_appended(statistics_.tokens_appended() + entry.new_tokens);
      }
    }
  }
}

void Coordinator::CountStep(const Outcome& outcome) {
  worker::StepTimes slowest;
  for (const worker::Reply& reply : outcome.replies) {
    slowest.plan = std::max(slowest.plan, reply.times.plan);
    slowest.append = std::max(slowest.append, reply.times.append);
    slowest.attend = std::max(slowest.attend, reply.times.attend);
    slowest.exchange = std::max(slowest.exchange, reply.times.exchange);
  }
  statistics_.set_steps(statistics_.steps() + 1);
  statistics_.set_plan_seconds(statistics_.plan_seconds() + slowest.plan);
  statistics_.set_append_seconds(statistics_.append_seconds() + slowest.append);
  statistics_.set_attend_seconds(statistics_.attend_seconds() + slowest.attend);
  statistics_.set_exchange_seconds(statistics_.exchange_seconds() + slowest.exchange);
}

// Without the lock: the operations are settled and nobody else looks at them.
void Coordinator::AnswerStep(const Step& step, const Outcome& outcome) const {
  int64_t first_row = 0;
  for (const OperationPtr& operation : step.operations) {
    const StepRequest& request = *operation->step;
    const int64_t row = first_row;
    first_row += request.query_rows;
    if (!operation->settled.ok()) {
      operation->attended(operation->settled);
      continue;
    }
    // The caller may have given its output region to another use.
    if (Cancelled(operation->call)) {
      operation->attended(absl::CancelledError("cancelled while it took effect"));
      continue;
    }
    v1::AttendReply reply;
    if (request.output.has_value()) {
      const worker::Reply& merged = outcome.replies.front();
      WriteReply(request, step.cache->spec, row, merged.o, merged.lse, &reply);
    }
    for (const StepPlan::Change& change : operation->plan.changes) {
      reply.add_lengths(change.length);
    }
    operation->attended(std::move(reply));
  }
}

}  // namespace tributary::service
