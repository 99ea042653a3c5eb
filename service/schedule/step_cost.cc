#include "service/schedule/step_cost.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "base/status/rpc_errors.h"

namespace tributary::service {
namespace {

// Of a rank, in attention: a few cores, and a small GPU.
constexpr double kCpuFlopsPerSecond = 2e10;
constexpr double kGpuFlopsPerSecond = 1e14;
constexpr double kSlack = 10;
// What it takes to keep a number of a new token, in operations: a CPU quantises and stores one in
// about half a nanosecond, and a GPU needs far less than that of its speed.
constexpr double kFlopsPerKept = 16;

// Pairs of a row and a key that it sees.
double PairsOf(const worker::StepEntry& entry, int64_t window_left) {
  const auto rows = static_cast<double>(entry.query_rows);
  const double first = static_cast<double>(entry.first_row_position()) + 1;
  const double all = rows * first + rows * rows / 2;
  if (window_left < 0) return all;
  return std::min(all, rows * (static_cast<double>(window_left) + 1 + rows));
}

}  // namespace

double FlopsPerSecond(worker::Device device, int ranks) {
  return ranks * (device == worker::Device::kCpu ? kCpuFlopsPerSecond : kGpuFlopsPerSecond);
}

StepLimits StepLimitsFor(worker::Device device, int ranks, int64_t bytes,
                         std::chrono::milliseconds step_timeout) {
  const double seconds = std::chrono::duration<double>(step_timeout).count();
  return {.bytes = bytes, .flops = FlopsPerSecond(device, ranks) * seconds};
}

double StepCost::Share(const StepLimits& limits) const {
  return std::max(static_cast<double>(bytes) / static_cast<double>(limits.bytes),
                  flops / limits.flops);
}

StepCost CostOf(const worker::LayerGeometry& geometry, int64_t window_left,
                std::span<const worker::StepEntry> entries) {
  const int64_t dims = int64_t{geometry.kv.key_dim} + geometry.kv.value_dim;
  const int64_t row = geometry.q_heads * dims;
  const int64_t token = geometry.kv.kv_heads * dims;
  StepCost cost;
  for (const worker::StepEntry& entry : entries) {
    cost.bytes +=
        static_cast<int64_t>(sizeof(float)) * (entry.query_rows * row + entry.new_tokens * token);
    cost.flops += 2.0 * static_cast<double>(row) * PairsOf(entry, window_left) +
                  kFlopsPerKept * static_cast<double>(token) * entry.kept_tokens();
  }
  return cost;
}

absl::Status CheckCost(const StepCost& cost, const StepLimits& limits) {
  if (cost.bytes > limits.bytes) {
    return Exhausted("max_step_bytes", absl::StrCat("the call's rows and tokens take ", cost.bytes,
                                                    " bytes in f32, a step at most ", limits.bytes,
                                                    ": send fewer of them a call"));
  }
  if (cost.flops > limits.flops) {
    return Exhausted("max_step_flops", absl::StrCat("the call's rows over what they see take ",
                                                    cost.flops, " operations, a step at most ",
                                                    limits.flops, ": send fewer rows per call"));
  }
  return absl::OkStatus();
}

std::chrono::milliseconds MoreTimeFor(double flops, const StepLimits& limits,
                                      std::chrono::milliseconds step_timeout) {
  const double share = std::min(1.0, flops / limits.flops);
  return std::chrono::milliseconds(
      static_cast<int64_t>(kSlack * share * static_cast<double>(step_timeout.count())));
}

}  // namespace tributary::service
