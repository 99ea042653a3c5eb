// How much of a step the calls of one caller may be while others call.
//
// Calls that wait share a step, and all of its answers are sent before those of the next one. So
// whoever comes beside a caller that has a hundred calls at a time would wait for a step of a
// hundred and for a hundred answers. While somebody is there who has few at a time, those who have
// many get steps of about TurnLength::kTurn. Where all have as many, a step of them all is as good
// as any other order, and who is alone is not held back at all.
//
// Batcher owns it and holds the coordinator's lock. Not thread safe.
#pragma once

#include <chrono>
#include <limits>
#include <string>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/string_view.h"
#include "service/schedule/recent.h"

namespace tributary::service {

class CallerShare {
 public:
  using Clock = std::chrono::steady_clock;

  static constexpr double kNoLimit = std::numeric_limits<double>::infinity();
  // What a call takes beside its attention, in turns: to be made a part of a step (8 us), settled,
  // and answered (5 us).
  static constexpr double kOfACall = 1.0 / 16;

  // A caller is remembered for `memory` at least, and for twice as long at most. 0: nobody is.
  explicit CallerShare(Clock::duration memory) : callers_(memory) {}

  // A call has come. With it so much of the caller's waits for a step, in turns.
  void OnCall(Clock::time_point now, absl::string_view caller, double waiting);

  // The most of one caller's that a step should take now, in turns: what the caller who has least
  // had at a time, and one turn at least. kNoLimit while fewer than two callers are remembered.
  double MostOfOne(Clock::time_point now) const;
  // The most that the caller had at a time, in turns; 0 when it is not remembered.
  double PeakOf(absl::string_view caller, Clock::time_point now) const;

 private:
  // The most that each caller had waiting at a time, in turns.
  using Peaks = absl::flat_hash_map<std::string, double>;

  // Whether the two name more than one caller. Either may be null.
  static bool AreSeveral(const Peaks* last, const Peaks* before);

  Recent<Peaks> callers_;
};

}  // namespace tributary::service
