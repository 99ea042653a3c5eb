// How much of a long call one step may carry out while short calls come.
//
// A step has all workers to itself, so whoever comes meanwhile waits for its end. Where everybody's
// calls are long, that is as good as any other order. Where some are short, a long step between two
// of them is the longest part of their time. So as long as short calls come, long ones are cut into
// turns (CutIntoTurns) of about kTurn, or of as much work as the shortest of those calls.
//
// StepRunner owns it and holds the coordinator's lock. Not thread safe.
#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <limits>

#include "service/schedule/recent.h"
#include "worker/command.h"

namespace tributary::service {

class TurnLength {
 public:
  using Clock = std::chrono::steady_clock;

  static constexpr std::chrono::microseconds kTurn{250};

  // A call is remembered for `memory` at least, and for twice as long at most. 0: no call is.
  explicit TurnLength(Clock::duration memory) : shortest_(memory) {}

  // A call of so much work (StepCost::flops) has come.
  void OnCall(Clock::time_point now, double flops);
  // The workers spent so long on a step of this kind, of so much work. `flops_per_second` is
  // what slow workers do together, and is assumed until a step of the kind has shown better. Short
  // steps show nothing: most of their time is spent on other things.
  void OnStep(worker::StepKind kind, double flops, double seconds, double flops_per_second);

  // The most that a step of a long call of this kind should compute now; infinity when no call is
  // remembered.
  double FlopsOfTurn(worker::StepKind kind, Clock::time_point now, double flops_per_second) const;

 private:
  static constexpr double kNone = std::numeric_limits<double>::infinity();

  // The least work of the calls that came.
  struct Shortest {
    double flops = kNone;
  };

  double SecondsPerFlop(worker::StepKind kind, double flops_per_second) const;

  Recent<Shortest> shortest_;
  // By kind, as steps have shown; 0: none has. Kinds differ by more than a factor of two.
  std::array<double, worker::kStepKinds> seconds_per_flop_ = {};
};

}  // namespace tributary::service
