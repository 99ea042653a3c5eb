// Which part of a GPU each of the two launches of shared attention gets (shared_attention.h), where
// they run side by side: the launch over what is shared, and the launch over the rest. One after
// the other, each would begin with a memory that is idle and end with multiprocessors that are; the
// first is bound by multiplying, the second by reading. Side by side one of them may be cut more
// evenly than over the whole device. Pure functions.
#pragma once

#include <cstdint>

#include "kernels/cuda/decode/choose_kernel.h"
#include "kernels/cuda/plan/shared_plan.h"

namespace tributary::cuda {

// Multiprocessors of each launch. Both 0: the launches run one after the other.
struct SideBySide {
  int32_t shared = 0;
  int32_t rest = 0;

  bool one_after_the_other() const { return shared == 0; }
};

// Deals a device's multiprocessors by what the launches read, so that each job over a single shared
// run gets as many of them as any other. Several runs are of several lengths, which the whole
// device takes better than a part of it: they run ahead of the rest.
SideBySide DealMultiprocessors(const DeviceProperties& device, const SharingCosts& costs,
                               const SharedPlan& plan);

// So many multiprocessors of a device, as a device that kernels are chosen and planned for.
DeviceProperties PartOf(const DeviceProperties& device, int32_t multiprocessors);

// Whether launches of these kernels may run side by side. Only kMma runs beside the launch ahead of
// it (Beside::kLastLaunch).
bool MayRunSideBySide(const KernelChoice& shared, const KernelChoice& rest);
// Whether they should: where one multiplies, in query tiles of 32 or 64, and the other one reads.
// Two that read only take memory from each other.
bool GainSideBySide(const KernelChoice& shared, const KernelChoice& rest);

// The shape of the launch over what is shared, in a call of this shape.
AttentionShape ShapeOfShared(const AttentionShape& call, const SharedPlan& plan);

// How the two launches run: their kernels, and what each is planned for, which is the device or its
// part of it.
struct SharedChoice {
  KernelChoice shared;
  KernelChoice rest;
  DeviceProperties shared_device;
  DeviceProperties rest_device;
  bool side_by_side = false;
};

// Side by side as dealt, where they gain by that. `shared` and `rest` are the shapes of the
// launches.
SharedChoice ChooseShared(const DeviceProperties& device, const AttentionShape& shared,
                          const AttentionShape& rest, const KernelOptions& options,
                          const SideBySide& deal);

}  // namespace tributary::cuda
