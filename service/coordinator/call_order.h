// The order of calls: each waits here until all its sequences are free, or until its deadline.
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <utility>

#include "absl/status/status.h"
#include "service/coordinator/critical_section.h"
#include "service/coordinator/operation.h"

namespace tributary::service {

class CallOrder {
 public:
  using Clock = CoordinatorLock::Clock;

  // No call waits longer than `max_call_timeout`.
  explicit CallOrder(std::chrono::milliseconds max_call_timeout)
      : max_call_timeout_(max_call_timeout) {}

  // An accepted call takes its place behind earlier ones of its sequences. If there are none,
  // Operation::OnTurn is called before this returns.
  void Enter(const OperationPtr& operation) TRIBUTARY_LOCKED;
  // The operation begins to take effect: from now on neither its deadline nor Fail* concerns it.
  void StopWaiting(const Operation& operation) TRIBUTARY_LOCKED;
  // The operation keeps its sequences and waits for another step. Deadline and Fail* concern it.
  void WaitAgain(const OperationPtr& operation) TRIBUTARY_LOCKED;
  // The operation is through: whoever waited for its sequences gets OnTurn.
  void Leave(Operation* operation) TRIBUTARY_LOCKED;
  // The owner of an operation that waits.
  OperationPtr Waiting(const Operation& operation) const TRIBUTARY_LOCKED;

  // Fails an operation that waits, which then leaves.
  void Fail(const Operation& operation, const absl::Status& status) TRIBUTARY_LOCKED;
  // Fails all that wait.
  void FailAll(const absl::Status& status) TRIBUTARY_LOCKED;
  // Fails all that wait and belong to `cache`.
  void FailAllOf(const Cache& cache, const absl::Status& status) TRIBUTARY_LOCKED;
  // Fails those whose deadline is not after `now`.
  void FailExpired(Clock::time_point now) TRIBUTARY_LOCKED;

  // How many operations wait.
  int64_t waiting() const TRIBUTARY_LOCKED { return static_cast<int64_t>(waiting_.size()); }
  // When FailExpired has something to do; max() when nothing waits.
  Clock::time_point NextDeadline() const TRIBUTARY_LOCKED;

 private:
  using Key = std::pair<Clock::time_point, uint64_t>;  // deadline, serial

  static Key KeyOf(const Operation& operation) {
    return {operation.call.deadline, operation.serial};
  }
  // `only` null: of all caches.
  void FailWaiting(const Cache* only, const absl::Status& status) TRIBUTARY_LOCKED;

  const std::chrono::milliseconds max_call_timeout_;

  uint64_t next_serial_ TRIBUTARY_GUARDED_BY(kCoordinatorLock) = 0;
  std::map<Key, OperationPtr> waiting_ TRIBUTARY_GUARDED_BY(kCoordinatorLock);
  // Operations whose sequences are free and whose OnTurn is yet to be called, and whether some call
  // of Leave is already working through them.
  std::deque<OperationPtr> runnable_ TRIBUTARY_GUARDED_BY(kCoordinatorLock);
  bool running_ TRIBUTARY_GUARDED_BY(kCoordinatorLock) = false;
};

}  // namespace tributary::service
