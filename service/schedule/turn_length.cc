#include "service/schedule/turn_length.h"

#include <algorithm>

namespace tributary::service {
namespace {

constexpr double kTurnSeconds = std::chrono::duration<double>(TurnLength::kTurn).count();
// How much a step counts beside those before it.
constexpr double kWeight = 1.0 / 8;
// A step may be held up by what else the machine does, and seem slow.
constexpr double kSlowest = 4;
constexpr double kFastest = 1.0 / 100;

}  // namespace

void TurnLength::OnCall(Clock::time_point now, double flops) {
  if (!shortest_.remembers()) return;
  double& least = shortest_.Now(now).flops;
  least = std::min(least, flops);
}

double TurnLength::SecondsPerFlop(worker::StepKind kind, double flops_per_second) const {
  const double shown = seconds_per_flop_[static_cast<size_t>(kind)];
  return shown > 0 ? shown : 1 / flops_per_second;
}

void TurnLength::OnStep(worker::StepKind kind, double flops, double seconds,
                        double flops_per_second) {
  const double before = SecondsPerFlop(kind, flops_per_second);
  if (seconds <= 0 || flops * before < kTurnSeconds / 2) return;
  const double shown =
      std::clamp(seconds / flops, kFastest / flops_per_second, kSlowest / flops_per_second);
  seconds_per_flop_[static_cast<size_t>(kind)] = before + kWeight * (shown - before);
}

double TurnLength::FlopsOfTurn(worker::StepKind kind, Clock::time_point now,
                               double flops_per_second) const {
  double least = kNone;
  for (const Shortest* span : {shortest_.last(now), shortest_.before(now)}) {
    if (span != nullptr) least = std::min(least, span->flops);
  }
  if (least == kNone) return kNone;
  return std::max(least, kTurnSeconds / SecondsPerFlop(kind, flops_per_second));
}

}  // namespace tributary::service
