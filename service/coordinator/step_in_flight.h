// A step from the moment its membership is fixed to its callers' answers.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "absl/status/status.h"
#include "service/coordinator/call_context.h"
#include "service/coordinator/operation.h"
#include "service/observe/observer.h"
#include "service/schedule/sequence_table.h"
#include "service/schedule/step_request.h"
#include "service/workers/worker_group.h"
#include "tributary/v1/attention.pb.h"

namespace tributary::service {

// One request of a step and what became of it.
struct StepMember {
  StepRequest request;
  Done<v1::AttendReply> done;
  StepReservation reservation;  // from the beginning of the step on
  bool is_piece = false;        // of a call that has several steps
  // The number, in the call, of the entry that the request's first one is, or is a part of.
  int32_t first_entry = 0;
  absl::Status settled;  // what the caller is told, once the step is over
};

// Written under the lock until the command is queued, by the thread that builds the command, and by
// the thread that gets the outcome; never by two at once.
struct StepInFlight {
  CachePtr cache;
  uint64_t epoch = 0;
  double flops = 0;  // StepCost
  // Whether it is a turn: of a long call, or of a caller that has many calls at a time.
  bool is_turn = false;
  StepRecord record;
  std::vector<worker::Standing> standings;  // what the workers are told with the step
  std::vector<worker::StepOutput> outputs;  // the command's, for the members that attend
  Outcome outcome;                          // from its end on
  // In the order of their entries in the command.
  absl::InlinedVector<StepMember*, 4> members;
  absl::InlinedVector<OperationPtr, 4> operations;  // own the members, in the same order
};

// Counts the rows and tokens of a call that took effect.
void CountCommitted(const StepMember& member, v1::Statistics* statistics);

// Commits or rolls back each member by itself: a request that conflicts, or whose shared memory was
// cut short, takes nothing from the others. Counts the results in `statistics`; those of a call in
// pieces are counted when it ends, because pieces may share its tokens.
void Settle(StepInFlight* step, const Outcome& outcome, std::chrono::milliseconds retry_delay,
            v1::Statistics* statistics) TRIBUTARY_LOCKED;

// Counts a step that all ranks carried out. Returns the seconds that it took the slowest of them.
double CountStep(const Outcome& outcome, v1::Statistics* statistics);

// Builds the command's body from the members' tensors, as BuildStep does. Without the lock.
void BuildCommand(StepInFlight* step, int32_t layer_in_group, bool copy_shared,
                  worker::Command* command);

// Notes in `step` what its command turned out to be, and tells the observer. Without the lock.
void TellSubmitted(Observer& observer, StepInFlight* step, worker::Command* command);

// Answers the callers of a settled step. Without the lock.
void AnswerMembers(const StepInFlight& step);

// Tells the observer that the callers have their answers. Without the lock.
void TellEnded(Observer& observer, StepInFlight* step);

}  // namespace tributary::service
