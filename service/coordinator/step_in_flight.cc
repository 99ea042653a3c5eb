// What the coordinator tells its observer, and what it says when asked for its state.
#include <algorithm>

#include "service/coordinator/coordinator.h"
#include "service/coordinator/operation.h"

namespace tributary::service {

// Without the lock, on the thread that builds the command.
void Coordinator::TellSubmitted(Step* step, worker::Command* command) const {
  const auto& body = std::get<worker::StepCommand>(command->body);
  StepRecord& record = step->record;
  record.number = command->number;
  record.epoch = command->epoch;
  record.cache = step->cache->id();
  record.layer = step->operations.front()->plan.layer;
  record.kind = body.kind;
  record.entries = static_cast<int32_t>(body.entries.size());
  for (const worker::StepEntry& entry : body.entries) {
    record.query_rows += entry.query_rows;
    record.new_tokens += entry.new_tokens;
  }
  record.bytes_in = body.q.bytes + body.k.bytes + body.v.bytes;
  record.submitted = Clock::now();
  record.trace = observer_->OnStepSubmitted(record);
  command->trace = record.trace;
}

// Without the lock, when the step's callers have their answers.
void Coordinator::TellEnded(Step* step, const Outcome& outcome) const {
  step->record.answered = Clock::now();
  observer_->OnStepEnded(step->record, outcome.status, outcome.replies);
}

Snapshot Coordinator::TakeSnapshot() const {
  Snapshot snapshot;
  snapshot.members = group_->members();
  std::lock_guard lock(mutex_);
  snapshot.epoch = epoch_;
  snapshot.ready = state_ == State::kReady;
  snapshot.draining = draining_;
  snapshot.calls_open = open_calls_;
  snapshot.calls_queued = static_cast<int64_t>(waiting_.size());
  snapshot.steps_in_flight = steps_in_flight_;
  snapshot.statistics = statistics_;
  for (const auto& [name, cache] : caches_) {
    if (!cache->created) continue;
    ++snapshot.caches;
    for (int32_t group = 0; group < cache->table.groups().size(); ++group) {
      const PageAllocator& pages = cache->table.pages(group);
      snapshot.pages_total += pages.total();
      snapshot.pages_used += pages.used();
      snapshot.pages_shared += pages.shared();
      snapshot.fullest_cache =
          std::max(snapshot.fullest_cache,
                   static_cast<double>(pages.used()) / std::max<double>(pages.total(), 1));
    }
    snapshot.sequences += static_cast<int64_t>(cache->table.sequences().size());
    snapshot.sequences_lost += cache->table.lost();
  }
  return snapshot;
}

}  // namespace tributary::service
