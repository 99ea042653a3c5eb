#include "worker/cpu_operations.h"

#include <algorithm>
#include <array>
#include <cstdint>

#include "base/status/status_macros.h"
#include "kernels/cpu/backend.h"
#include "kernels/lse.h"
#include "worker/append.h"
#include "worker/context_attention.h"
#include "worker/status_conversion.h"

namespace tributary::worker {
namespace {

bool IsAligned(const float* memory) {
  return memory != nullptr &&
         reinterpret_cast<uintptr_t>(memory) % __STDCPP_DEFAULT_NEW_ALIGNMENT__ == 0;
}

}  // namespace

void ReserveWorkspace(const PlannedStep& step, StepWorkspace* workspace) {
  const LayerGeometry g = step.geometry();
  size_t pass_rows = 0;
  for (const RowPass& pass : step.plan.passes) {
    pass_rows = std::max(pass_rows, static_cast<size_t>(pass.row_count));
  }
  const size_t q_heads = static_cast<size_t>(g.q_heads);
  const size_t dim = static_cast<size_t>(g.kv.value_dim);
  workspace->partial_o.Reserve(pass_rows * q_heads * dim);
  workspace->partial_lse.Reserve(pass_rows * q_heads);
  workspace->matches.Reserve(static_cast<size_t>(step.plan.new_tokens));
  if (step.kind != StepKind::kPrefill && step.kind != StepKind::kDflash) return;
  const size_t heads = static_cast<size_t>(step.own_heads().count);
  const size_t rows = static_cast<size_t>(step.plan.query_rows);
  workspace->slice_o.Reserve(rows * heads * dim);
  workspace->slice_lse.Reserve(rows * heads);
  workspace->context_o.Reserve(pass_rows * heads * dim);
  workspace->context_lse.Reserve(pass_rows * heads);
}

CpuOperations::CpuOperations(const PlannedStep& step, const PagedKv& kv, const RankResources& rank,
                             StepResults* results)
    : step_(step),
      rank_(rank),
      operands_{.spec = step.spec,
                .layer = step.layer(),
                .geometry = step.geometry(),
                .kv = kv,
                .q = step.q,
                .k = step.k,
                .v = step.v,
                .deadline = step.deadline},
      results_(*results),
      exchange_(step, rank.strategy, rank.workspace.exchange, *results) {}

StepOperations::Partial CpuOperations::ReserveSlice(collective::HeadSlice heads) {
  const size_t row_heads =
      static_cast<size_t>(step_.plan.query_rows) * static_cast<size_t>(heads.count);
  return {rank_.workspace.slice_o.Reserve(row_heads * ValueDim()),
          rank_.workspace.slice_lse.Reserve(row_heads)};
}

// Kernels are given memory that is aligned as the workspace is.
StepOperations::Partial CpuOperations::ReservePass(const RowPass& pass) {
  if (step_.kind == StepKind::kDecode && step_.comm.size() == 1) {
    const Partial result = exchange_.ResultOf(pass);
    if (IsAligned(result.o) && IsAligned(result.lse)) return result;
  }
  const size_t row_heads =
      static_cast<size_t>(pass.row_count) * static_cast<size_t>(operands_.geometry.q_heads);
  return {rank_.workspace.partial_o.Reserve(row_heads * ValueDim()),
          rank_.workspace.partial_lse.Reserve(row_heads)};
}

absl::Status CpuOperations::AppendOrCompare() {
  return worker::AppendOrCompare(step_.plan, operands_, rank_, &results_);
}

absl::Status CpuOperations::AttendContext(const RowPass& pass, Partial out) {
  const TimedSection timed(results_.times.attend);
  return worker::AttendContext(step_.plan, pass, operands_, rank_, out.o, out.lse);
}

absl::Status CpuOperations::AttendNewTokens(collective::HeadSlice slice, Partial out) {
  const TimedSection timed(results_.times.attend);
  const StepPlan& plan = step_.plan;
  const LayerGeometry& g = operands_.geometry;
  const size_t heads = static_cast<size_t>(slice.count);
  if (heads == 0) return absl::OkStatus();  // fewer heads than ranks
  const size_t dim = ValueDim();
  const size_t rows = static_cast<size_t>(plan.query_rows);
  if (plan.runs.size() != 1 || plan.runs[0].count != plan.query_rows) {
    // Rows outside of every run have no new tokens: the identity of the merge.
    std::fill_n(out.o, rows * heads * dim, 0.0f);
    std::fill_n(out.lse, rows * heads, EmptyLse<float>());
  }
  const size_t q_row = BytesOf(step_.q.dtype, int64_t{g.q_heads} * g.kv.key_dim);
  const size_t k_row = BytesOf(step_.k.dtype, int64_t{g.kv.kv_heads} * g.kv.key_dim);
  const size_t v_row = BytesOf(step_.v.dtype, int64_t{g.kv.kv_heads} * g.kv.value_dim);
  for (const NewTokensRun& run : plan.runs) {
    const size_t row = static_cast<size_t>(run.row_begin);
    const size_t token = static_cast<size_t>(run.token_begin);
    const NewTokensParams params{.q = step_.q.data + row * q_row,
                                 .k = step_.k.data + token * k_row,
                                 .v = step_.v.data + token * v_row,
                                 .q_dtype = step_.q.dtype,
                                 .kv_dtype = step_.k.dtype,
                                 .rows = run.count,
                                 .q_heads = g.q_heads,
                                 .kv_heads = g.kv.kv_heads,
                                 .key_dim = g.kv.key_dim,
                                 .value_dim = g.kv.value_dim,
                                 .head_begin = slice.begin,
                                 .head_count = slice.count,
                                 .entries = run.entries,
                                 .keys = plan.new_keys.data() + row,
                                 .sm_scale = g.sm_scale,
                                 .soft_cap = operands_.soft_cap(),
                                 .o = out.o + row * heads * dim,
                                 .lse = out.lse + row * heads};
    TRIBUTARY_RETURN_IF_ERROR(ToAbsl(cpu::NewTokens(params, rank_.pool)));
  }
  return absl::OkStatus();
}

absl::Status CpuOperations::AddBlock(const RowPass& pass, collective::HeadSlice heads,
                                     Partial partial) {
  if (heads.count == 0) return absl::OkStatus();
  if (!block_.has_value()) {
    block_ = ReserveSlice(heads);
    TRIBUTARY_RETURN_IF_ERROR(AttendNewTokens(heads, *block_));
  }
  const TimedSection timed(results_.times.attend);
  const Partial added = RowsOf(pass, heads, *block_);
  // A rank with all heads has them alike in both; else a row's slice is part of a wider row.
  const int32_t rows = heads.count == operands_.geometry.q_heads ? pass.row_count : 1;
  const size_t dim = ValueDim();
  for (int32_t row = 0; row < pass.row_count; row += rows) {
    const size_t from = static_cast<size_t>(row) * static_cast<size_t>(heads.count);
    const size_t into = static_cast<size_t>(row) * static_cast<size_t>(operands_.geometry.q_heads) +
                        static_cast<size_t>(heads.begin);
    const std::array<const float*, 2> sources_o = {partial.o + into * dim, added.o + from * dim};
    const std::array<const float*, 2> sources_lse = {partial.lse + into, added.lse + from};
    const MergeParams params{.o = sources_o,
                             .lse = sources_lse,
                             .rows = rows,
                             .heads = heads.count,
                             .value_dim = operands_.geometry.kv.value_dim,
                             .out = partial.o + into * dim,
                             .lse_out = partial.lse + into};
    TRIBUTARY_RETURN_IF_ERROR(ToAbsl(cpu::MergePartials(params, rank_.pool)));
  }
  return absl::OkStatus();
}

absl::Status CpuOperations::MergeToRoot(const RowPass& pass, Partial partial) {
  return exchange_.MergeToRoot(pass, partial);
}

absl::StatusOr<StepOperations::Partial> CpuOperations::MergeToSlices(const RowPass& pass,
                                                                     Partial partial) {
  const collective::HeadSlice heads = step_.own_heads();
  const size_t row_heads = static_cast<size_t>(pass.row_count) * static_cast<size_t>(heads.count);
  const Partial out{rank_.workspace.context_o.Reserve(row_heads * ValueDim()),
                    rank_.workspace.context_lse.Reserve(row_heads)};
  TRIBUTARY_RETURN_IF_ERROR(exchange_.MergeToSlices(pass, partial, out));
  return out;
}

absl::Status CpuOperations::AddToSlice(const RowPass& pass, collective::HeadSlice heads,
                                       Partial context, Partial slice) {
  const bool nothing_to_do = context.o == nullptr && operands_.sinks() == nullptr;
  if (nothing_to_do || heads.count == 0) return absl::OkStatus();
  const TimedSection timed(results_.times.exchange);
  const Partial rows = RowsOf(pass, heads, slice);
  const std::array<const float*, 2> sources_o = {rows.o, context.o};
  const std::array<const float*, 2> sources_lse = {rows.lse, context.lse};
  const size_t sources = context.o == nullptr ? 1 : 2;
  const MergeParams params{
      .o = std::span(sources_o).first(sources),
      .lse = std::span(sources_lse).first(sources),
      .rows = pass.row_count,
      .heads = heads.count,
      .value_dim = operands_.geometry.kv.value_dim,
      .sinks = operands_.sinks() == nullptr ? nullptr : operands_.sinks() + heads.begin,
      .out = rows.o,
      .lse_out = rows.lse};
  return ToAbsl(cpu::MergePartials(params, rank_.pool));
}

absl::Status CpuOperations::GatherToRoot(const RowPass& pass, collective::HeadSlice heads,
                                         Partial slice) {
  return exchange_.GatherToRoot(pass, RowsOf(pass, heads, slice));
}

StepOperations::Partial CpuOperations::RowsOf(const RowPass& pass, collective::HeadSlice heads,
                                              Partial slice) const {
  const size_t before = static_cast<size_t>(pass.row_begin) * static_cast<size_t>(heads.count);
  return {slice.o + before * ValueDim(), slice.lse + before};
}

}  // namespace tributary::worker
