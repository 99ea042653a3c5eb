#include "worker/context_attention.h"

#include <span>

#include "kernels/cpu/backend.h"
#include "kernels/fp8_queries.h"
#include "worker/status_conversion.h"

namespace tributary::worker {

absl::Status AttendContext(const StepPlan& plan, const RowPass& pass, const StepOperands& operands,
                           const RankResources& rank, float* o, float* lse) {
  const CacheSpec& spec = operands.spec;
  const size_t row_elements =
      static_cast<size_t>(spec.q_heads) * static_cast<size_t>(spec.head_dim);
  const size_t row_bytes = row_elements * SizeOf(operands.q.dtype);
  const auto rows = static_cast<size_t>(pass.row_count);
  const std::byte* const q = operands.q.data + static_cast<size_t>(pass.row_begin) * row_bytes;
  float* rounded = nullptr;
  if (RoundsQueries(spec, operands.layer)) {
    rounded = rank.workspace.rounded_q.Reserve(rows * row_elements);
    RoundQueriesToFp8(operands.q.dtype, spec.head_dim, std::span(q, rows * row_bytes), rounded);
  }
  const AttentionParams params{.kv = operands.kv,
                               .q = rounded == nullptr ? static_cast<const void*>(q) : rounded,
                               .q_dtype = rounded == nullptr ? operands.q.dtype : DType::kF32,
                               .rows = pass.row_count,
                               .q_heads = spec.q_heads,
                               .entries = pass.entries,
                               .keys = plan.context_keys.data() + pass.row_begin,
                               .sm_scale = spec.sm_scale,
                               .soft_cap = operands.soft_cap(),
                               .o = o,
                               .lse = lse};
  return ToAbsl(cpu::Attention(params, rank.pool));
}

}  // namespace tributary::worker
