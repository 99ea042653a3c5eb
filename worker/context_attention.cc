#include "worker/context_attention.h"

#include "kernels/cpu/backend.h"
#include "worker/status_conversion.h"

namespace tributary::worker {

absl::Status AttendContext(const StepPlan& plan, const RowPass& pass, const StepOperands& operands,
                           const RankResources& rank, float* o, float* lse) {
  const CacheSpec& spec = operands.spec;
  const size_t row_bytes = static_cast<size_t>(spec.q_heads) * static_cast<size_t>(spec.head_dim) *
                           SizeOf(operands.q.dtype);
  const AttentionParams params{
      .kv = operands.kv,
      .q = operands.q.data + static_cast<size_t>(pass.row_begin) * row_bytes,
      .q_dtype = operands.q.dtype,
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
