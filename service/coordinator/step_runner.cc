#include "service/coordinator/step_runner.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "base/status/rpc_errors.h"
#include "base/status/status_macros.h"
#include "service/coordinator/operation.h"
#include "service/schedule/step_batch.h"
#include "service/schedule/step_split.h"

namespace tributary::service {
namespace {

// A critical section in which so many calls have failed leaves others that were cancelled to the
// next one. A caller that cancels a stream cancels hundreds of calls, and whoever wants the lock,
// or is to be answered by the same thread, would wait for all of them.
constexpr int kMostFailed = 16;

// What a thread that has other calls to read may carry out in between: far less than a millisecond
// of attention, even where that is slow, and few new tokens. Beside longer steps the time that it
// takes to wake another thread is next to nothing.
constexpr double kLentFlops = 1e8;
constexpr int64_t kLentBytes = int64_t{1} << 20;

bool IsShort(const StepCost& cost) { return cost.flops <= kLentFlops && cost.bytes <= kLentBytes; }

// Of a step that all ranks carried out: whether the result is the one that was asked for.
absl::Status CheckAnswer(const StepInFlight& step, const Outcome& outcome) {
  if (step.outputs.empty()) return absl::OkStatus();
  const worker::CacheSpec& spec = step.cache->spec;
  const auto layer = static_cast<size_t>(step.members.front()->reservation.layer);
  return CheckResult(worker::GeometryOf(spec, spec.layers[layer]), step.outputs,
                     outcome.replies.front());
}

}  // namespace

// A request that waits for its sequences, and then in the batcher for its step, or for each of its
// steps.
class StepRunner::StepOperation final : public Operation {
 public:
  StepOperation(StepRunner* runner, StepRequest&& request, Done<v1::AttendReply> done)
      : member{.request = std::move(request), .done = std::move(done)}, runner_(*runner) {
    for (const worker::StepEntry& entry : member.request.entries) {
      const bool again = !sequences.empty() && sequences.back() == entry.sequence;
      if (!again) sequences.push_back(entry.sequence);
    }
  }

  void OnTurn() override TRIBUTARY_LOCKED {
    const StepCost cost = runner_.CostOf(*this);
    runner_.turns_.OnCall(accepted, cost.flops);
    // What takes turns holds nobody up by being long.
    const bool in_turns = runner_.TakesTurns(*this, cost, accepted);
    const double turns = in_turns ? 0 : cost.flops / runner_.FlopsOfTurn(*this, accepted);
    Gather(accepted, cost.Share(runner_.limits()), turns, in_turns);
  }
  // Waits in the batcher; `share`: of what a step may take, more than 1 for a step of its own.
  // `turns`: how many turns its attention takes.
  void Gather(Clock::time_point arrival, double share, double turns,
              bool in_turns) TRIBUTARY_LOCKED {
    const StepRequest& request = member.request;
    runner_.batcher_.Add(request.key, {.request = this,
                                       .rows = request.rows(),
                                       .entries = static_cast<int32_t>(request.entries.size()),
                                       .arrival = arrival,
                                       .share = share,
                                       .turns = turns + CallerShare::kOfACall,
                                       .in_turns = in_turns,
                                       .yield = request.yield,
                                       .caller = call.caller});
  }

  void OnFailed(const absl::Status& status) override TRIBUTARY_LOCKED {
    runner_.batcher_.Remove(member.request.key, this);
    runner_.regions_.Release(member.request);
    if (in_pieces()) cache->table.Rollback(member.reservation);
    v1::Statistics& statistics = runner_.statistics_;
    statistics.set_requests_failed(statistics.requests_failed() + 1);
    runner_.lock_.Answer([done = std::move(member.done), status] { done(status); });
  }

  bool in_pieces() const { return split != nullptr; }
  bool begun() const { return in_pieces() && split->next > 0; }
  // The part of the operation that the next step carries out.
  StepMember* current() { return in_pieces() ? &split->piece : &member; }
  // Makes `split->piece` the next piece. `self` owns this.
  void TakePiece(const StepOperationPtr& self) {
    StepMember& piece = split->piece;
    const StepPiece& cut = split->pieces[split->next];
    piece.request = PieceOf(member.request, cut);
    piece.is_piece = true;
    piece.first_entry = cut.first_entry;
    piece.reservation = {.layer = member.reservation.layer, .group = member.reservation.group};
    piece.reservation.entries = piece.request.entries;
    piece.settled = absl::OkStatus();
    if (split->next == 0) {
      piece.reservation.page_copies = member.reservation.page_copies;
      piece.reservation.page_updates = member.reservation.page_updates;
    }
    // The step keeps the operation until it has called this.
    const std::weak_ptr<StepOperation> owned = self;
    piece.done = [this, owned](absl::StatusOr<v1::AttendReply> results) {
      runner_.OnPieceDone(owned.lock(), std::move(results));
    };
  }

  // A call that has several steps, all of one epoch.
  struct SplitCall {
    std::vector<StepPiece> pieces;
    size_t next = 0;        // of `pieces`: the next one, or the one under way
    StepMember piece;       // its share of the call
    v1::AttendReply reply;  // as far as it has come
    uint64_t epoch = 0;
    bool in_turns = false;  // whether the pieces are turns
  };
  bool in_turns() const { return in_pieces() && split->in_turns; }

  StepMember member;
  // Null for a call that is one step, as nearly all are.
  std::unique_ptr<SplitCall> split;

 private:
  StepRunner& runner_;
};

StepRunner::StepRunner(const CoordinatorOptions& options, Observer& observer, CoordinatorLock& lock,
                       const ServingState& serving, GroupCommands& commands, CallOrder& order,
                       const CacheRegistry& caches, RegisteredRegions& regions,
                       const WorkerGroup& group)
    : options_(options),
      observer_(observer),
      lock_(lock),
      serving_(serving),
      commands_(commands),
      order_(order),
      caches_(caches),
      regions_(regions),
      group_(group),
      batcher_(options.batch, options.turn_memory),
      turns_(options.turn_memory) {}

// ------------------------------------------------------------------------------------- admission

void StepRunner::Append(std::shared_ptr<const v1::AppendRequest> request, const CallContext& call,
                        Done<v1::AppendReply> done) {
  Admit(
      request->cache_id(), call,
      [&request](const StepContext& context) { return CheckAppend(request, context); },
      [done = std::move(done)](absl::StatusOr<v1::AttendReply> attended) {
        if (!attended.ok()) return done(attended.status());
        v1::AppendReply reply;
        reply.mutable_lengths()->Swap(attended->mutable_lengths());
        done(std::move(reply));
      });
}

void StepRunner::Attend(std::shared_ptr<const v1::AttendRequest> request, const CallContext& call,
                        Done<v1::AttendReply> done) {
  Admit(
      request->cache_id(), call,
      [&request](const StepContext& context) { return CheckAttend(request, context); },
      std::move(done));
}

void StepRunner::Admit(const std::string& cache_name, const CallContext& call, Check check,
                       Done<v1::AttendReply> done) {
  absl::StatusOr<CachePtr> cache = [&] {
    const ReadSection section(lock_);
    return caches_.Find(cache_name);
  }();
  // Tensors are checked without the lock.
  absl::StatusOr<StepRequest> request = [&]() -> absl::StatusOr<StepRequest> {
    if (!cache.ok()) return cache.status();
    return check({.cache = (*cache)->id(),
                  .spec = &(*cache)->spec,
                  .terms = &(*cache)->terms,
                  .backends = &(*cache)->backends,
                  .regions = call.shares_memory ? &regions_.registry() : nullptr,
                  .max_message_bytes = options_.max_message_bytes});
  }();
  if (request.ok() && call.charge_reply) {
    if (absl::Status full = call.charge_reply(request->reply_bytes()); !full.ok()) request = full;
  }
  const CriticalSection section(lock_);
  lock_.AcceptCall();
  // Meanwhile the cache may have been deleted, or the group may have broken.
  absl::Status refused = request.status();
  if (refused.ok()) refused = caches_.Find(cache_name).status();
  if (refused.ok()) refused = regions_.Use(*request);
  if (!refused.ok()) {
    statistics_.set_requests_failed(statistics_.requests_failed() + 1);
    lock_.Answer([done = std::move(done), refused] { done(refused); });
    return;
  }
  const auto operation =
      std::make_shared<StepOperation>(this, *std::move(request), std::move(done));
  operation->cache = *std::move(cache);
  operation->call = call;
  statistics_.set_requests(statistics_.requests() + 1);
  if (call.lends && commands_.borrows()) lender_ = std::this_thread::get_id();
  order_.Enter(operation);
}

// ------------------------------------------------------------------------------------------ steps

void StepRunner::BeginSteps() {
  goes_on_ = false;
  BeginThoseThatCan();
  lender_ = {};
}

void StepRunner::BeginThoseThatCan() {
  int failed = 0;
  const auto left_to_later = [&failed](const void* request) {
    return failed >= kMostFailed && Cancelled(static_cast<const StepOperation*>(request)->call);
  };
  while (serving_.ready() && has_room() && !batcher_.empty()) {
    // One turn at a time, so that whoever comes waits for no more than one.
    const auto batch = batcher_.Take(Clock::now(), /*turns=*/turns_in_flight_ == 0, left_to_later);
    if (!batch.has_value()) {
      goes_on_ = failed >= kMostFailed;
      return;
    }
    failed += BeginStep(*batch);
  }
}

StepRunner::Clock::time_point StepRunner::NextDue() const {
  if (goes_on_) return Clock::time_point::min();
  if (options_.batch.window.count() == 0 || !has_room()) return Clock::time_point::max();
  return batcher_.NextDue().value_or(Clock::time_point::max());
}

int StepRunner::BeginStep(const Batcher::Batch& batch) {
  const Clock::time_point now = Clock::now();
  const auto step = std::make_shared<StepInFlight>();
  step->epoch = serving_.epoch();
  step->record.begun = now;
  step->is_turn = batch.is_turn;
  StepCost cost;
  int failed = 0;
  for (void* request : batch.requests) {
    auto operation = std::static_pointer_cast<StepOperation>(
        order_.Waiting(*static_cast<StepOperation*>(request)));
    if (!Join(operation, now, &cost)) {
      ++failed;
      continue;
    }
    step->is_turn |= operation->in_turns();
    step->members.push_back(operation->current());
    step->record.calls.push_back({operation->accepted, operation->call.trace});
    step->operations.push_back(std::move(operation));
  }
  if (step->operations.empty()) return failed;
  step->cache = step->operations.front()->cache;
  step->flops = cost.flops;
  // Behind another step there is time to wake the rank's own thread.
  const std::thread::id lender =
      in_flight_ == 0 && IsShort(cost) ? std::exchange(lender_, {}) : std::thread::id();
  ++in_flight_;
  if (step->is_turn) ++turns_in_flight_;
  const LayerPlace place = step->cache->table.groups().PlaceOf(batch.key.layer);
  step->standings = step->cache->table.TakeStandings(place.group);
  commands_.Send(
      step->cache->ids[place.group],
      [this, step, place, lender](worker::Command* command) {
        command->waiter = lender;
        BuildCommand(step.get(), place.index, group_.sends_tensors(), command);
        TellSubmitted(observer_, step.get(), command);
      },
      [this, step](Outcome outcome) { OnStepDone(step, std::move(outcome)); },
      MoreTimeFor(step->flops, limits(), options_.step_timeout));
  return failed;
}

StepLimits StepRunner::limits() const {
  return StepLimitsFor(group_.device(), group_.size(), options_.max_step_bytes,
                       options_.step_timeout);
}

double StepRunner::FlopsPerSecond() const {
  return service::FlopsPerSecond(group_.device(), group_.size());
}

// GPUs are fast, and may give a row other bytes in other company. Workers that are processes would
// be sent all tokens of a prompt with each turn.
bool StepRunner::CanTakeTurns(const StepOperation& operation, const StepCost& cost) const {
  const worker::StepKind kind = operation.member.request.key.kind;
  return group_.device() == worker::Device::kCpu && kind != worker::StepKind::kDflash &&
         (kind != worker::StepKind::kPrefill || !group_.sends_tensors()) &&
         cost.bytes <= limits().bytes;
}

double StepRunner::FlopsOfTurn(const StepOperation& operation, Clock::time_point now) const {
  return turns_.FlopsOfTurn(operation.member.request.key.kind, now, FlopsPerSecond());
}

bool StepRunner::TakesTurns(const StepOperation& operation, const StepCost& cost,
                            Clock::time_point now) const {
  return cost.flops > 2 * FlopsOfTurn(operation, now) && CanTakeTurns(operation, cost);
}

StepCost StepRunner::CostOf(const StepOperation& operation) const {
  const StepRequest& request =
      operation.in_pieces() ? operation.split->piece.request : operation.member.request;
  const worker::CacheSpec& spec = operation.cache->spec;
  const worker::LayerSpec& layer = spec.layers[static_cast<size_t>(request.key.layer)];
  return service::CostOf(worker::GeometryOf(spec, layer), layer.window.left, request.entries);
}

bool StepRunner::Join(const StepOperationPtr& operation, Clock::time_point now,
                      StepCost* cost_of_step) {
  const auto fail = [&](const absl::Status& status) TRIBUTARY_LOCKED {
    order_.Fail(*operation, status);
    return false;
  };
  if (Cancelled(operation->call))
    return fail(absl::CancelledError("cancelled before it took effect"));
  if (operation->call.deadline <= now) {
    return fail(absl::DeadlineExceededError("the deadline passed before the call took effect"));
  }
  if (operation->begun()) {
    if (operation->split->epoch != serving_.epoch()) {
      return fail(FromOutcome(absl::AbortedError("the group has re-formed"), options_.retry_delay));
    }
    operation->TakePiece(operation);
    cost_of_step->Add(CostOf(*operation));
    order_.StopWaiting(*operation);
    return true;
  }
  StepMember& member = operation->member;
  absl::StatusOr<StepReservation> reservation = operation->cache->table.Reserve(
      member.request.key.layer, member.request.key.kind, member.request.entries);
  if (!reservation.ok()) return fail(reservation.status());
  // Now that its positions are known to be right.
  member.reservation = *std::move(reservation);
  StepCost cost = CostOf(*operation);
  if (!CheckCost(cost, limits()).ok() || TakesTurns(*operation, cost, now)) {
    if (absl::Status split = Split(operation, cost, now); !split.ok()) {
      operation->cache->table.Rollback(member.reservation);
      return fail(split);
    }
    cost = CostOf(*operation);
  }
  cost_of_step->Add(cost);
  order_.StopWaiting(*operation);
  statistics_.set_queue_seconds(statistics_.queue_seconds() +
                                std::chrono::duration<double>(now - operation->accepted).count());
  return true;
}

absl::Status StepRunner::Split(const StepOperationPtr& operation, const StepCost& cost,
                               Clock::time_point now) {
  const StepMember& member = operation->member;
  const worker::CacheSpec& spec = operation->cache->spec;
  const worker::LayerSpec& layer = spec.layers[static_cast<size_t>(member.request.key.layer)];
  const worker::LayerGeometry geometry = worker::GeometryOf(spec, layer);
  const std::vector<worker::StepEntry>& entries = member.reservation.entries;
  const StepLimits most = limits();
  const auto fits = [&](const StepPiece& piece) {
    return CheckCost(service::CostOf(geometry, layer.window.left, piece.entries), most).ok();
  };
  std::vector<StepPiece> pieces;
  if (CanTakeTurns(*operation, cost)) {
    const double turn = std::min(FlopsOfTurn(*operation, now), most.flops);
    pieces = CutIntoTurns(geometry, layer.window.left, entries, turn);
  }
  const bool in_turns = !pieces.empty() && std::all_of(pieces.begin(), pieces.end(), fits);
  if (!in_turns) {
    TRIBUTARY_ASSIGN_OR_RETURN(
        pieces, SplitStep(geometry, layer.window.left, member.request.key.kind, entries, most));
  }
  if (pieces.size() == 1 || !CanBeCut(member.request, pieces, geometry)) {
    return CheckCost(cost, most);
  }
  operation->split = std::make_unique<StepOperation::SplitCall>();
  operation->split->pieces = std::move(pieces);
  operation->split->epoch = serving_.epoch();
  operation->split->in_turns = in_turns;
  operation->TakePiece(operation);
  return absl::OkStatus();
}

void StepRunner::OnPieceDone(const StepOperationPtr& operation,
                             absl::StatusOr<v1::AttendReply> results) {
  const StepRequest& request = operation->member.request;
  StepOperation::SplitCall& split = *operation->split;
  if (results.ok()) {
    PlacePiece(request, split.pieces[split.next], *results, &split.reply);
    if (absl::Status lost = request.CheckResultsWhole(); !lost.ok()) results = lost;
  }
  const CriticalSection section(lock_);
  // Whoever failed the calls that waited when it was deleted did not see this one either.
  if (operation->cache->deleted) {
    return EndPieces(operation.get(), NotFound("cache", operation->cache->name, "cache_id"));
  }
  if (!results.ok()) return EndPieces(operation.get(), results.status());
  if (++split.next == split.pieces.size()) {
    return EndPieces(operation.get(), absl::OkStatus());
  }
  // Whoever failed the calls that waited when the group broke did not see this one.
  if (!serving_.ready()) {
    return EndPieces(operation.get(),
                     FromOutcome(absl::AbortedError("the group has broken"), options_.retry_delay));
  }
  order_.WaitAgain(operation);
  operation->Gather(Clock::now(), /*share=*/2, /*turns=*/0, split.in_turns);
}

void StepRunner::EndPieces(StepOperation* operation, absl::Status status) {
  StepMember& member = operation->member;
  StepOperation::SplitCall& split = *operation->split;
  if (status.ok() && split.epoch != serving_.epoch()) {
    status = FromOutcome(absl::AbortedError("the group has re-formed"), options_.retry_delay);
  }
  if (status.ok()) {
    split.reply.set_request_id(member.request.request_id);
    operation->cache->table.Commit(member.reservation);
    CountCommitted(member, &statistics_);
    for (const StepReservation::Change& change : member.reservation.changes) {
      split.reply.add_lengths(change.length);
    }
  } else {
    operation->cache->table.Rollback(member.reservation);
  }
  regions_.Release(member.request);
  auto answer = status.ok() ? absl::StatusOr<v1::AttendReply>(std::move(split.reply))
                            : absl::StatusOr<v1::AttendReply>(std::move(status));
  lock_.Answer([done = std::move(member.done),
                answer = std::make_shared<absl::StatusOr<v1::AttendReply>>(std::move(answer))] {
    done(std::move(*answer));
  });
  order_.Leave(operation);
}

void StepRunner::OnStepDone(const StepPtr& step, Outcome outcome) {
  step->record.done = Clock::now();
  const CriticalSection section(lock_);
  --in_flight_;
  if (step->is_turn) --turns_in_flight_;
  // A group that has formed since was told the tables without this step's changes.
  if (step->epoch != serving_.epoch()) {
    outcome.status = absl::AbortedError("the group has re-formed");
  }
  if (outcome.status.ok()) outcome.status = CheckAnswer(*step, outcome);
  if (outcome.status.ok()) {
    const double seconds = CountStep(outcome, &statistics_);
    turns_.OnStep(step->record.kind, step->flops, seconds, FlopsPerSecond());
  } else {
    statistics_.set_steps_aborted(statistics_.steps_aborted() + 1);
  }
  if (!outcome.status.ok() && step->epoch == serving_.epoch() && !step->standings.empty()) {
    const LayerPlace place = step->cache->table.groups().PlaceOf(step->record.layer);
    commands_.TellAgain(step->cache->ids[place.group], std::move(step->standings));
  }
  Settle(step.get(), outcome, options_.retry_delay, &statistics_);
  step->outcome = std::move(outcome);
  // A call that has several steps is answered after the last of them.
  absl::InlinedVector<OperationPtr, 4> over;
  for (const OperationPtr& operation : step->operations) {
    if (!static_cast<StepOperation&>(*operation).in_pieces()) over.push_back(operation);
  }
  // This is deferred before the answers of calls that follow: replies of one sequence come in the
  // order in which the calls took effect.
  lock_.Answer(
      [this, step] {
        AnswerMembers(*step);
        TellEnded(observer_, step.get());
      },
      static_cast<int64_t>(over.size()));
  for (const OperationPtr& operation : over) {
    regions_.Release(static_cast<StepOperation&>(*operation).member.request);
    order_.Leave(operation.get());
  }
}

}  // namespace tributary::service
