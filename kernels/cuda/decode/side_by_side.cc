#include "kernels/cuda/decode/side_by_side.h"

#include <algorithm>
#include <numeric>

namespace tributary::cuda {
namespace {

// What a launch gets at least.
constexpr int32_t kFewest = 8;

}  // namespace

SideBySide DealMultiprocessors(const DeviceProperties& device, const SharingCosts& costs,
                               const SharedPlan& plan) {
  const int32_t all = device.multiprocessors;
  if (plan.entries.size() != 1 || plan.rest_reads == 0 || all < 2 * kFewest) return {};
  const int64_t share = all * plan.shared_reads / (plan.shared_reads + plan.rest_reads);
  // A whole number of multiprocessors for each job, an even one for clusters of two.
  const int64_t jobs = ReadsOf(plan.most_rows, costs) * costs.kv_heads;
  const int64_t unit = jobs <= all - kFewest ? std::lcm(jobs, int64_t{2}) : 2;
  int64_t shared = (share + unit / 2) / unit * unit;
  if (shared > all - kFewest) shared -= unit;
  if (shared < kFewest) return {};
  return {.shared = static_cast<int32_t>(shared), .rest = all - static_cast<int32_t>(shared)};
}

DeviceProperties PartOf(const DeviceProperties& device, int32_t multiprocessors) {
  DeviceProperties part = device;
  part.multiprocessors = multiprocessors;
  for (int32_t& clusters : part.clusters) {
    clusters = clusters * multiprocessors / std::max(1, device.multiprocessors);
  }
  return part;
}

bool MayRunSideBySide(const KernelChoice& shared, const KernelChoice& rest) {
  return rest.kind == KernelKind::kMma && shared.begins_early && rest.begins_early;
}

bool GainSideBySide(const KernelChoice& shared, const KernelChoice& rest) {
  return MayRunSideBySide(shared, rest) && shared.tile_rows > 16 && rest.tile_rows <= 8;
}

AttentionShape ShapeOfShared(const AttentionShape& call, const SharedPlan& plan) {
  AttentionShape shape = call;
  shape.max_rows = plan.most_rows;
  shape.sequences = static_cast<int32_t>(plan.entries.size());
  shape.total_keys = plan.total_keys;
  return shape;
}

SharedChoice ChooseShared(const DeviceProperties& device, const AttentionShape& shared,
                          const AttentionShape& rest, const KernelOptions& options,
                          const SideBySide& deal) {
  const auto choose = [&](const DeviceProperties& of_shared, const DeviceProperties& of_rest) {
    return SharedChoice{.shared = ChooseKernel(of_shared, shared, options),
                        .rest = ChooseKernel(of_rest, rest, options),
                        .shared_device = of_shared,
                        .rest_device = of_rest};
  };
  if (!deal.one_after_the_other()) {
    SharedChoice beside = choose(PartOf(device, deal.shared), PartOf(device, deal.rest));
    beside.side_by_side = GainSideBySide(beside.shared, beside.rest);
    if (beside.side_by_side) return beside;
  }
  return choose(device, device);
}

}  // namespace tributary::cuda
