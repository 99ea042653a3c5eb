#include "worker/dcp_decode.h"

#include "worker/append.h"
#include "worker/context_attention.h"
#include "worker/status_conversion.h"
#include "worker/status_macros.h"

namespace tributary::worker {

absl::Status DcpDecodeWrapper::Run(const StepPlan& plan, const StepOperands& operands,
                                   StepResults* results) {
  TRIBUTARY_RETURN_IF_ERROR(AppendOrCompare(plan, operands, rank_, results));
  for (const RowPass& pass : plan.passes) {
    TRIBUTARY_RETURN_IF_ERROR(RunPass(plan, pass, operands, results));
  }
  return absl::OkStatus();
}

absl::Status DcpDecodeWrapper::RunPass(const StepPlan& plan, const RowPass& pass,
                                       const StepOperands& operands, StepResults* results) {
  const CacheSpec& spec = operands.spec;
  const size_t heads = static_cast<size_t>(spec.q_heads);
  const size_t dim = static_cast<size_t>(spec.head_dim);
  const size_t rows = static_cast<size_t>(pass.row_count);
  float* o = rank_.workspace.partial_o.Reserve(rows * heads * dim);
  float* lse = rank_.workspace.partial_lse.Reserve(rows * heads);
  {
    const TimedSection timed(results->times.attend);
    TRIBUTARY_RETURN_IF_ERROR(AttendContext(plan, pass, operands, rank_, o, lse));
  }
  const TimedSection timed(results->times.exchange);
  const size_t before = static_cast<size_t>(pass.row_begin) * heads;
  const bool root = rank_.comm.rank() == 0;
  const collective::ExchangeParams exchange{.o = o,
                                            .lse = lse,
                                            .rows = pass.row_count,
                                            .heads = spec.q_heads,
                                            .head_dim = spec.head_dim,
                                            .sinks = operands.sinks(),
                                            .placement = collective::Placement::kGathered,
                                            .strategy = rank_.strategy,
                                            .out = root ? results->o + before * dim : nullptr,
                                            .lse_out = root ? results->lse + before : nullptr};
  return CollectiveStatus(collective::ExchangeAndMerge(
      exchange, rank_.comm, rank_.workspace.exchange, operands.deadline));
}

}  // namespace tributary::worker
