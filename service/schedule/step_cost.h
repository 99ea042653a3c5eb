// What a call takes of a step: memory for its rows, and the workers' time.
//
// A step has all workers to itself while it runs, holds its tensors in full, and breaks the group
// when it outlives its deadline. So there is a most that one may take. A call beyond that is
// refused, calls share a step only up to that, and a step's deadline is as far away as its work
// asks for.
#pragma once

#include <chrono>
#include <cstdint>
#include <span>

#include "absl/status/status.h"
#include "worker/backends.h"
#include "worker/cache_spec.h"
#include "worker/command.h"

namespace tributary::service {

// Of one step.
struct StepLimits {
  int64_t bytes = 0;  // of queries, results and new tokens, in f32
  double flops = 0;   // of attention, and of keeping new tokens
};

// What slow workers do together.
double FlopsPerSecond(worker::Device device, int ranks);

// `flops` is what slow workers do in `step_timeout`.
StepLimits StepLimitsFor(worker::Device device, int ranks, int64_t bytes,
                         std::chrono::milliseconds step_timeout);

struct StepCost {
  int64_t bytes = 0;
  double flops = 0;

  // The larger share of the limits: at most 1 is allowed.
  double Share(const StepLimits& limits) const;
  void Add(const StepCost& more) {
    bytes += more.bytes;
    flops += more.flops;
  }
};

// Of entries of one layer. Positions may be anything; with those of a call that was accepted the
// figures are right, up to the window of a draft.
StepCost CostOf(const worker::LayerGeometry& geometry, int64_t window_left,
                std::span<const worker::StepEntry> entries);

// RESOURCE_EXHAUSTED, with the figures, when it is beyond the limits ("max_step_bytes",
// "max_step_flops").
absl::Status CheckCost(const StepCost& cost, const StepLimits& limits);

// How much later than other commands a step of so much work may end. It allows for workers ten
// times as slow as the limits do.
std::chrono::milliseconds MoreTimeFor(double flops, const StepLimits& limits,
                                      std::chrono::milliseconds step_timeout);

}  // namespace tributary::service
