#include "worker/append.h"

#include "base/status/status_macros.h"
#include "kernels/cpu/backend.h"
#include "worker/status_conversion.h"

namespace tributary::worker {
namespace {

AppendParams ParamsFor(const StepPlan& plan, const StepOperands& operands,
                       const std::vector<int64_t>& slots) {
  return {.kv = operands.kv,
          .k = operands.k.data,
          .v = operands.v.data,
          .input_dtype = operands.k.dtype,
          .tokens = plan.new_tokens,
          .slots = slots.data()};
}

absl::Status Compare(const StepPlan& plan, const StepOperands& operands, const RankResources& rank,
                     std::vector<int32_t>* conflicts) {
  uint8_t* matches = rank.workspace.matches.Reserve(static_cast<size_t>(plan.new_tokens));
  TRIBUTARY_RETURN_IF_ERROR(
      ToAbsl(cpu::MatchesCache(ParamsFor(plan, operands, plan.compare_slots), rank.pool, matches)));
  for (int32_t t = 0; t < plan.new_tokens; ++t) {
    const int32_t entry = plan.entry_of_token[static_cast<size_t>(t)];
    // Tokens lie entry by entry, so repeats of an entry are next to each other.
    if (!matches[t] && (conflicts->empty() || conflicts->back() != entry)) {
      conflicts->push_back(entry);
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status AppendOrCompare(const StepPlan& plan, const StepOperands& operands,
                             const RankResources& rank, StepResults* results) {
  const TimedSection timed(results->times.append);
  if (!plan.write_slots.empty()) {
    TRIBUTARY_RETURN_IF_ERROR(
        ToAbsl(cpu::Append(ParamsFor(plan, operands, plan.write_slots), rank.pool)));
  }
  if (!plan.compare_slots.empty()) {
    TRIBUTARY_RETURN_IF_ERROR(Compare(plan, operands, rank, &results->conflicts));
  }
  return absl::OkStatus();
}

}  // namespace tributary::worker
