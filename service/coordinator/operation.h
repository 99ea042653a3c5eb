// The insides of the coordinator that its source files share.
#pragma once

#include "service/coordinator/coordinator.h"

namespace tributary::service {

struct Coordinator::Operation : SequenceOrder::Member {
  CachePtr cache;
  CallContext call;  // the deadline capped
  Clock::time_point accepted;
  uint64_t serial = 0;
  // Either a step's part ...
  std::optional<StepRequest> step;
  std::function<void(absl::StatusOr<v1::AttendReply>)> attended;
  StepPlan plan;
  absl::Status settled;  // of this request, when the step is over
  // ... or something done under the lock when its turn has come.
  std::function<void(Cache&, Turn&)> apply;
  std::function<void(absl::Status)> failed;
};

struct Coordinator::Step {
  CachePtr cache;
  uint64_t epoch = 0;
  StepRecord record;
  std::vector<OperationPtr> operations;  // in the order of their entries in the command
};

// Holds the lock. When it ends, steps that can begin are begun, the lock is released, commands go
// to the workers and callers are called back.
class Coordinator::Turn {
 public:
  explicit Turn(Coordinator* coordinator)
      : coordinator_(*coordinator), lock_(coordinator->mutex_) {}
  Turn(const Turn&) = delete;
  Turn& operator=(const Turn&) = delete;
  ~Turn();

  // To be called when the lock is released.
  void After(std::function<void()> call) { after_.push_back(std::move(call)); }
  // An accepted call is being answered.
  void Answer(std::function<void()> call);

 private:
  Coordinator& coordinator_;
  std::unique_lock<std::mutex> lock_;
  std::vector<std::function<void()>> after_;
  int answered_ = 0;
};

}  // namespace tributary::service
