// Attend and Append, from acceptance to reply: a call is checked, ordered, batched with others,
// given to the workers as one step, settled in the tables and answered. A call that is more than
// one step may take has several, and others may come in between (schedule/step_split.h).
#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <thread>

#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "service/coordinator/cache_registry.h"
#include "service/coordinator/call_context.h"
#include "service/coordinator/call_order.h"
#include "service/coordinator/coordinator_options.h"
#include "service/coordinator/critical_section.h"
#include "service/coordinator/group_commands.h"
#include "service/coordinator/registered_regions.h"
#include "service/coordinator/serving_state.h"
#include "service/coordinator/step_in_flight.h"
#include "service/observe/observer.h"
#include "service/schedule/batcher.h"
#include "service/schedule/step_cost.h"
#include "service/schedule/step_request.h"
#include "service/schedule/turn_length.h"
#include "service/workers/worker_group.h"
#include "tributary/v1/attention.pb.h"

namespace tributary::service {

class StepRunner {
 public:
  using Clock = CoordinatorLock::Clock;

  // All of them outlive this.
  StepRunner(const CoordinatorOptions& options, Observer& observer, CoordinatorLock& lock,
             const ServingState& serving, GroupCommands& commands, CallOrder& order,
             const CacheRegistry& caches, RegisteredRegions& regions, const WorkerGroup& group);

  // The calls of the API.
  void Append(std::shared_ptr<const v1::AppendRequest> request, const CallContext& call,
              Done<v1::AppendReply> done) TRIBUTARY_UNLOCKED;
  void Attend(std::shared_ptr<const v1::AttendRequest> request, const CallContext& call,
              Done<v1::AttendReply> done) TRIBUTARY_UNLOCKED;

  // Begins the steps that can begin now. Called at the end of every critical section.
  void BeginSteps() TRIBUTARY_LOCKED;
  // When a batch's window closes, or BeginSteps has more to do; max() for never.
  Clock::time_point NextDue() const TRIBUTARY_LOCKED;

  int in_flight() const TRIBUTARY_LOCKED { return in_flight_; }
  // Counters of requests, steps and their times.
  const v1::Statistics& statistics() const TRIBUTARY_LOCKED { return statistics_; }

 private:
  class StepOperation;
  using StepOperationPtr = std::shared_ptr<StepOperation>;
  using StepPtr = std::shared_ptr<StepInFlight>;
  // Checks a request, without the lock.
  using Check = absl::FunctionRef<absl::StatusOr<StepRequest>(const StepContext&)>;

  void Admit(const std::string& cache_name, const CallContext& call, Check check,
             Done<v1::AttendReply> done) TRIBUTARY_UNLOCKED;
  void BeginThoseThatCan() TRIBUTARY_LOCKED;
  // Whether another step may begin. A turn takes no room from others: whoever comes meanwhile
  // stands behind it already, and need not be given to the workers when it ends.
  bool has_room() const TRIBUTARY_LOCKED {
    return in_flight_ - turns_in_flight_ < options_.pipeline_depth;
  }
  // Fixes who takes part. From here on a caller that loses interest changes nothing for the
  // workers. Returns how many calls failed instead.
  int BeginStep(const Batcher::Batch& batch) TRIBUTARY_LOCKED;
  StepCost CostOf(const StepOperation& operation) const;
  // Whether an operation can be cut into turns without changing what comes of it.
  bool CanTakeTurns(const StepOperation& operation, const StepCost& cost) const;
  // Whether it is so long that it is to be cut so now.
  bool TakesTurns(const StepOperation& operation, const StepCost& cost,
                  Clock::time_point now) const TRIBUTARY_LOCKED;
  // The most that a turn of the operation should compute now.
  double FlopsOfTurn(const StepOperation& operation, Clock::time_point now) const TRIBUTARY_LOCKED;
  // What is assumed of all workers.
  double FlopsPerSecond() const;
  // Of a step of the group as it is now.
  StepLimits limits() const;
  // Returns whether the operation takes part in the step, and adds its share to what the step
  // costs. If not, it has failed.
  bool Join(const StepOperationPtr& operation, Clock::time_point now,
            StepCost* cost_of_step) TRIBUTARY_LOCKED;
  // Cuts an operation, whose pages are reserved, into pieces: into turns, or into what a step may
  // take.
  absl::Status Split(const StepOperationPtr& operation, const StepCost& cost,
                     Clock::time_point now) TRIBUTARY_LOCKED;
  // A piece has been carried out or has failed. If it failed, so has the operation.
  void OnPieceDone(const StepOperationPtr& operation,
                   absl::StatusOr<v1::AttendReply> results) TRIBUTARY_UNLOCKED;
  // Ends an operation in pieces. Its tokens count from now on, or not at all.
  void EndPieces(StepOperation* operation, absl::Status status) TRIBUTARY_LOCKED;
  void OnStepDone(const StepPtr& step, Outcome outcome) TRIBUTARY_UNLOCKED;

  const CoordinatorOptions& options_;
  Observer& observer_;
  CoordinatorLock& lock_;
  const ServingState& serving_;
  GroupCommands& commands_;
  CallOrder& order_;
  const CacheRegistry& caches_;
  RegisteredRegions& regions_;
  const WorkerGroup& group_;

  Batcher batcher_ TRIBUTARY_GUARDED_BY(kCoordinatorLock);
  TurnLength turns_ TRIBUTARY_GUARDED_BY(kCoordinatorLock);
  int in_flight_ TRIBUTARY_GUARDED_BY(kCoordinatorLock) = 0;
  // Of those in flight, steps that are turns.
  int turns_in_flight_ TRIBUTARY_GUARDED_BY(kCoordinatorLock) = 0;
  // Whether BeginSteps left something to the next critical section.
  bool goes_on_ TRIBUTARY_GUARDED_BY(kCoordinatorLock) = false;
  // The thread that lends itself for a step of this critical section, if one does.
  std::thread::id lender_ TRIBUTARY_GUARDED_BY(kCoordinatorLock);
  v1::Statistics statistics_ TRIBUTARY_GUARDED_BY(kCoordinatorLock);
};

}  // namespace tributary::service
