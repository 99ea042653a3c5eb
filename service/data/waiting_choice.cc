#include "service/data/waiting_choice.h"

#include <cmath>

#include "absl/strings/str_format.h"

namespace tributary::service {
namespace {

// A session that waits by stream memory operations makes two launches more per layer.
constexpr double kClearlyFaster = 0.5;
// Warps that run at the same time hand over faster than this.
constexpr double kTakingTurnsSeconds = 200e-6;

bool Timed(double seconds) { return std::isfinite(seconds) && seconds > 0; }

}  // namespace

WaitingChoice ChooseWaiting(const v1::ProbeResult& times, bool one_gpu) {
  const double spinning = times.spinning_seconds();
  const double memory_ops = times.memory_ops_seconds();
  WaitingChoice choice;
  const bool by_stream =
      Timed(memory_ops) && (!Timed(spinning) || memory_ops < kClearlyFaster * spinning);
  if (by_stream) choice.waiting = worker::Waiting::kStreamMemoryOps;
  const double chosen = by_stream ? memory_ops : spinning;
  if (Timed(chosen)) choice.round_trip_seconds = chosen;
  if (one_gpu && (spinning > kTakingTurnsSeconds || by_stream)) {
    choice.warning = absl::StrFormat(
        "host and worker take turns on one GPU: a round trip takes %.1f us. Under CUDA MPS "
        "(nvidia-cuda-mps-control -d, for both processes) it takes some 10 us",
        chosen * 1e6);
  }
  return choice;
}

v1::Waiting PublicWaiting(worker::Waiting waiting) {
  return waiting == worker::Waiting::kSpinningWarp ? v1::WAITING_SPINNING_WARP
                                                   : v1::WAITING_STREAM_MEMORY_OPS;
}

}  // namespace tributary::service
