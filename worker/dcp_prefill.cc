#include "worker/dcp_prefill.h"

#include <algorithm>
#include <array>

#include "kernels/cpu/backend.h"
#include "kernels/lse.h"
#include "worker/append.h"
#include "worker/context_attention.h"
#include "worker/status_conversion.h"
#include "worker/status_macros.h"

namespace tributary::worker {

absl::Status DcpPrefillWrapper::Run(const StepPlan& plan, const StepOperands& operands,
                                    StepResults* results) {
  TRIBUTARY_RETURN_IF_ERROR(AppendOrCompare(plan, operands, rank_, results));
  const CacheSpec& spec = operands.spec;
  Slice slice;
  slice.heads = collective::SliceOfRank(spec.q_heads, rank_.comm.size(), rank_.comm.rank());
  const size_t row_heads =
      static_cast<size_t>(plan.query_rows) * static_cast<size_t>(slice.heads.count);
  slice.o = rank_.workspace.slice_o.Reserve(row_heads * static_cast<size_t>(spec.head_dim));
  slice.lse = rank_.workspace.slice_lse.Reserve(row_heads);
  {
    const TimedSection timed(results->times.attend);
    TRIBUTARY_RETURN_IF_ERROR(AttendNewTokens(plan, operands, slice));
  }
  for (const RowPass& pass : plan.passes) {
    TRIBUTARY_RETURN_IF_ERROR(AddContext(plan, pass, operands, slice, results));
    TRIBUTARY_RETURN_IF_ERROR(Gather(pass, operands, slice, results));
  }
  return absl::OkStatus();
}

absl::Status DcpPrefillWrapper::AttendNewTokens(const StepPlan& plan, const StepOperands& operands,
                                                const Slice& slice) {
  const CacheSpec& spec = operands.spec;
  const size_t heads = static_cast<size_t>(slice.heads.count);
  if (heads == 0) return absl::OkStatus();  // fewer heads than ranks
  const size_t dim = static_cast<size_t>(spec.head_dim);
  const size_t rows = static_cast<size_t>(plan.query_rows);
  if (plan.runs.size() != 1 || plan.runs[0].count != plan.query_rows) {
    // Rows outside of every run have no new tokens: the identity of the merge.
    std::fill_n(slice.o, rows * heads * dim, 0.0f);
    std::fill_n(slice.lse, rows * heads, EmptyLse<float>());
  }
  const size_t q_row = static_cast<size_t>(spec.q_heads) * dim * SizeOf(operands.q.dtype);
  const size_t kv_row = static_cast<size_t>(spec.kv_heads) * dim * SizeOf(operands.k.dtype);
  for (const NewTokensRun& run : plan.runs) {
    const size_t row = static_cast<size_t>(run.row_begin);
    const size_t token = static_cast<size_t>(run.token_begin);
    const NewTokensParams params{.q = operands.q.data + row * q_row,
                                 .k = operands.k.data + token * kv_row,
                                 .v = operands.v.data + token * kv_row,
                                 .q_dtype = operands.q.dtype,
                                 .kv_dtype = operands.k.dtype,
                                 .rows = run.count,
                                 .q_heads = spec.q_heads,
                                 .kv_heads = spec.kv_heads,
                                 .head_dim = spec.head_dim,
                                 .head_begin = slice.heads.begin,
                                 .head_count = slice.heads.count,
                                 .entries = run.entries,
                                 .keys = plan.new_keys.data() + row,
                                 .sm_scale = spec.sm_scale,
                                 .soft_cap = spec.soft_cap,
                                 .o = slice.o + row * heads * dim,
                                 .lse = slice.lse + row * heads};
    TRIBUTARY_RETURN_IF_ERROR(ToAbsl(cpu::NewTokens(params, rank_.pool)));
  }
  return absl::OkStatus();
}

absl::Status DcpPrefillWrapper::AddContext(const StepPlan& plan, const RowPass& pass,
                                           const StepOperands& operands, const Slice& slice,
                                           StepResults* results) {
  if (!pass.any_context) {  // on every rank alike
    const TimedSection timed(results->times.exchange);
    return MergeIntoSlice(pass, operands, slice, nullptr, nullptr);
  }
  const CacheSpec& spec = operands.spec;
  const size_t rows = static_cast<size_t>(pass.row_count);
  const size_t dim = static_cast<size_t>(spec.head_dim);
  const size_t all_heads = static_cast<size_t>(spec.q_heads);
  const size_t own_heads = static_cast<size_t>(slice.heads.count);
  float* partial_o = rank_.workspace.partial_o.Reserve(rows * all_heads * dim);
  float* partial_lse = rank_.workspace.partial_lse.Reserve(rows * all_heads);
  float* context_o = rank_.workspace.context_o.Reserve(rows * own_heads * dim);
  float* context_lse = rank_.workspace.context_lse.Reserve(rows * own_heads);
  {
    const TimedSection timed(results->times.attend);
    TRIBUTARY_RETURN_IF_ERROR(AttendContext(plan, pass, operands, rank_, partial_o, partial_lse));
  }
  const TimedSection timed(results->times.exchange);
  const collective::ExchangeParams exchange{.o = partial_o,
                                            .lse = partial_lse,
                                            .rows = pass.row_count,
                                            .heads = spec.q_heads,
                                            .head_dim = spec.head_dim,
                                            .sinks = nullptr,
                                            .placement = collective::Placement::kScattered,
                                            .strategy = rank_.strategy,
                                            .out = context_o,
                                            .lse_out = context_lse};
  TRIBUTARY_RETURN_IF_ERROR(CollectiveStatus(collective::ExchangeAndMerge(
      exchange, rank_.comm, rank_.workspace.exchange, operands.deadline)));
  return MergeIntoSlice(pass, operands, slice, context_o, context_lse);
}

absl::Status DcpPrefillWrapper::MergeIntoSlice(const RowPass& pass, const StepOperands& operands,
                                               const Slice& slice, const float* context_o,
                                               const float* context_lse) {
  const bool nothing_to_do = context_o == nullptr && operands.sinks() == nullptr;
  if (nothing_to_do || slice.heads.count == 0) return absl::OkStatus();
  const size_t before =
      static_cast<size_t>(pass.row_begin) * static_cast<size_t>(slice.heads.count);
  float* o = slice.o + before * static_cast<size_t>(operands.spec.head_dim);
  float* lse = slice.lse + before;
  const std::array<const float*, 2> sources_o = {o, context_o};
  const std::array<const float*, 2> sources_lse = {lse, context_lse};
  const size_t sources = context_o == nullptr ? 1 : 2;
  const MergeParams params{
      .o = std::span(sources_o).first(sources),
      .lse = std::span(sources_lse).first(sources),
      .rows = pass.row_count,
      .heads = slice.heads.count,
      .head_dim = operands.spec.head_dim,
      .sinks = operands.sinks() == nullptr ? nullptr : operands.sinks() + slice.heads.begin,
      .out = o,
      .lse_out = lse};
  return ToAbsl(cpu::MergePartials(params, rank_.pool));
}

absl::Status DcpPrefillWrapper::Gather(const RowPass& pass, const StepOperands& operands,
                                       const Slice& slice, StepResults* results) {
  const TimedSection timed(results->times.exchange);
  const size_t dim = static_cast<size_t>(operands.spec.head_dim);
  const size_t row = static_cast<size_t>(pass.row_begin);
  const size_t own = row * static_cast<size_t>(slice.heads.count);
  const size_t all = row * static_cast<size_t>(operands.spec.q_heads);
  const bool root = rank_.comm.rank() == 0;
  const collective::ExchangeShape shape{.rows = pass.row_count,
                                        .heads = operands.spec.q_heads,
                                        .head_dim = operands.spec.head_dim,
                                        .ranks = rank_.comm.size(),
                                        .placement = collective::Placement::kGathered};
  return CollectiveStatus(
      collective::GatherSlices(slice.o + own * dim, slice.lse + own, shape, rank_.comm,
                               rank_.workspace.exchange, root ? results->o + all * dim : nullptr,
                               root ? results->lse + all : nullptr, operands.deadline));
}

}  // namespace tributary::worker
