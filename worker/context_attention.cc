#include "worker/context_attention.h"

#include <span>

#include "kernels/cpu/backend.h"
#include "kernels/fp8_queries.h"
#include "worker/status_conversion.h"

namespace tributary::worker {

absl::Status AttendContext(const StepPlan& plan, const RowPass& pass, const StepOperands& operands,
                           const RankResources& rank, float* o, float* lse) {
  const LayerGeometry& g = operands.geometry;
  const size_t row_elements = static_cast<size_t>(g.q_heads) * static_cast<size_t>(g.kv.key_dim);
  const size_t row_bytes = BytesOf(operands.q.dtype, static_cast<int64_t>(row_elements));
  const auto rows = static_cast<size_t>(pass.row_count);
  const std::byte* const q = operands.q.data + static_cast<size_t>(pass.row_begin) * row_bytes;
  AttentionParams params{.kv = operands.kv,
                         .q = q,
                         .q_dtype = operands.q.dtype,
                         .rows = pass.row_count,
                         .q_heads = g.q_heads,
                         .entries = pass.entries,
                         .keys = plan.context_keys.data() + pass.row_begin,
                         .shared = pass.shared,
                         .sm_scale = g.sm_scale,
                         .soft_cap = operands.soft_cap(),
                         .o = o,
                         .lse = lse};
  if (RoundsQueries(operands.spec, g.kv.dtype)) {
    float* const rounded = rank.workspace.rounded_q.Reserve(rows * row_elements);
    RoundQueriesToFp8(operands.q.dtype, g.kv.key_dim, std::span(q, rows * row_bytes), rounded);
    params.q = rounded;
    params.q_dtype = DType::kF32;
  }
  return ToAbsl(cpu::Attention(params, rank.pool));
}

}  // namespace tributary::worker
