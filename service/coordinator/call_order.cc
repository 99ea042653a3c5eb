#include "service/coordinator/call_order.h"

#include <algorithm>
#include <vector>

namespace tributary::service {

void CallOrder::Enter(const OperationPtr& operation) {
  operation->accepted = Clock::now();
  operation->serial = next_serial_++;
  operation->call.deadline =
      std::min(operation->call.deadline, operation->accepted + max_call_timeout_);
  waiting_.emplace(KeyOf(*operation), operation);
  if (operation->cache->order.Enter(operation.get())) operation->OnTurn();
}

void CallOrder::StopWaiting(const Operation& operation) { waiting_.erase(KeyOf(operation)); }

void CallOrder::WaitAgain(const OperationPtr& operation) {
  waiting_.emplace(KeyOf(*operation), operation);
}

OperationPtr CallOrder::Waiting(const Operation& operation) const {
  return waiting_.at(KeyOf(operation));
}

void CallOrder::Leave(Operation* leaving) {
  std::vector<SequenceOrder::Member*> runnable;
  leaving->cache->order.Leave(leaving, &runnable);
  for (SequenceOrder::Member* member : runnable) {
    runnable_.push_back(Waiting(*static_cast<Operation*>(member)));
  }
  // Whoever runs may leave at once. They run here one after the other, not nested, however many
  // there are.
  if (std::exchange(running_, true)) return;
  while (!runnable_.empty()) {
    const OperationPtr operation = std::move(runnable_.front());
    runnable_.pop_front();
    const bool waits = waiting_.contains(KeyOf(*operation));
    if (waits) operation->OnTurn();  // otherwise it failed meanwhile
  }
  running_ = false;
}

void CallOrder::Fail(const Operation& failing, const absl::Status& status) {
  const OperationPtr operation = Waiting(failing);  // it outlives its entry in the map
  StopWaiting(*operation);
  operation->OnFailed(status);
  Leave(operation.get());
}

void CallOrder::FailAll(const absl::Status& status) { FailWaiting(nullptr, status); }

void CallOrder::FailAllOf(const Cache& cache, const absl::Status& status) {
  FailWaiting(&cache, status);
}

void CallOrder::FailWaiting(const Cache* only, const absl::Status& status) {
  std::vector<OperationPtr> failing;
  for (const auto& [key, operation] : waiting_) {
    if (only == nullptr || operation->cache.get() == only) failing.push_back(operation);
  }
  // The last to arrive goes first, so that none becomes runnable when another leaves.
  std::sort(failing.begin(), failing.end(),
            [](const OperationPtr& a, const OperationPtr& b) { return a->serial > b->serial; });
  for (const OperationPtr& operation : failing) Fail(*operation, status);
}

void CallOrder::FailExpired(Clock::time_point now) {
  while (!waiting_.empty() && waiting_.begin()->first.first <= now) {
    Fail(*waiting_.begin()->second,
         absl::DeadlineExceededError("the call waited for its turn until its deadline"));
  }
}

CallOrder::Clock::time_point CallOrder::NextDeadline() const {
  return waiting_.empty() ? Clock::time_point::max() : waiting_.begin()->first.first;
}

}  // namespace tributary::service
