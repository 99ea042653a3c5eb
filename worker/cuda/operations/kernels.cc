// CudaOperations: what is computed on the device.
#include "kernels/cuda/append/append.h"
#include "kernels/cuda/append/matches_cache.h"
#include "kernels/cuda/append/plain_tokens.h"
#include "kernels/cuda/decode/block_attention.h"
#include "kernels/cuda/decode/shared_attention.h"
#include "kernels/cuda/merge/merge.h"
#include "worker/cuda/nvtx_range.h"
#include "worker/cuda/operations/operations.h"
#include "worker/cuda/replica.h"
#include "worker/cuda/status.h"
#include "worker/status_conversion.h"

namespace tributary::worker {

StepOperations::Partial CudaOperations::Result() const {
  if (place_.result_o != nullptr) return {place_.result_o, place_.result_lse};
  return {memory_.result_o.as<float>(), memory_.result_lse.as<float>()};
}

StepOperations::Partial CudaOperations::ResultOf(const RowPass& pass) const {
  return result_on_device() ? Advance(Result(), pass.row_begin, Heads()) : Partial{};
}

StepOperations::Partial CudaOperations::Advance(Partial partial, int32_t row, size_t heads) const {
  const size_t before = static_cast<size_t>(row) * heads;
  return {partial.o + before * ValueDim(), partial.lse + before};
}

StepOperations::Partial CudaOperations::ReserveSlice(collective::HeadSlice) {
  if (slice_is_result()) return Result();
  return {memory_.slice_o.as<float>(), memory_.slice_lse.as<float>()};
}

StepOperations::Partial CudaOperations::ReservePass(const RowPass& pass) {
  // Not what is merged into the slice, which is the result.
  const bool is_merged = slice_is_result() && pass.in_two_parts;
  if (alone() && !is_merged) return ResultOf(pass);
  if (partial_arrives_) {
    return {memory_.arriving.o.as<float>(), memory_.arriving.lse.as<float>()};
  }
  return {memory_.pass_o.as<float>(), memory_.pass_lse.as<float>()};
}

cuda::AppendArgs CudaOperations::AppendArgsFor(const Section& slots) const {
  return {.cache = layer_.pages,
          .geometry = geometry_.kv,
          .page_size = step_.spec.page_size,
          .k_scale = layer_.k_scale,
          .v_scale = layer_.v_scale,
          .k = k(),
          .v = v(),
          .input_dtype = step_.k.dtype,
          .tokens = plan_.padded_tokens(),
          .slots = At<int64_t>(slots),
          .gate = place_.gate,
          .begins_early = launches_begin_early()};
}

absl::Status CudaOperations::EnqueueKeptTokens() {
  if (!kept_tokens_wait_) return absl::OkStatus();
  kept_tokens_wait_ = false;
  const auto& replica = static_cast<const CudaReplica&>(*step_.replica);
  TRIBUTARY_RETURN_IF_ERROR(rank_.EnterBeside());
  return ToAbsl(cuda::LaunchAppendPlain(AppendArgsFor(plan_.kept_slots()),
                                        replica.layer(step_.layer_index), rank_.beside()));
}

absl::Status CudaOperations::JoinKeptTokens() {
  if (!keeps_tokens()) return absl::OkStatus();
  TRIBUTARY_RETURN_IF_ERROR(EnqueueKeptTokens());
  return rank_.JoinBeside(stream_);
}

absl::Status CudaOperations::AppendOrCompare() {
  const NvtxRange range("append", step_.layer_index);
  if (keeps_tokens()) TRIBUTARY_RETURN_IF_ERROR(rank_.PartBeside(stream_));
  kept_tokens_wait_ = keeps_tokens();
  if (plan_.write_slots().count > 0) {
    cuda::AppendArgs args = AppendArgsFor(plan_.write_slots());
    args.tokens = plan_.append_places();
    if (plan_.listed_tokens().count > 0) args.listed = At<int32_t>(plan_.listed_tokens());
    TRIBUTARY_RETURN_IF_ERROR(ToAbsl(cuda::LaunchAppend(args, stream_)));
  }
  if (plan_.compare_slots().count == 0) return absl::OkStatus();
  TRIBUTARY_CUDA_OK(cudaMemsetAsync(
      memory_.differs.data(), 0, static_cast<size_t>(plan_.entries()) * sizeof(uint32_t), stream_));
  return ToAbsl(cuda::LaunchMatchesCache(AppendArgsFor(plan_.compare_slots()),
                                         At<int32_t>(plan_.entry_of_token()),
                                         memory_.differs.as<uint32_t>(), stream_));
}

bool CudaOperations::ContextTakesBlock(const PassLaunch& launch) const {
  const collective::HeadSlice heads = OwnHeads();
  const int32_t gqa_ratio = geometry_.gqa_ratio();
  const bool applies_sinks = alone() && layer_.sinks != nullptr;
  return is_draft() && !launch.many_rows && !applies_sinks && heads.begin % gqa_ratio == 0 &&
         heads.count % gqa_ratio == 0 &&
         cuda::MayAttendBlock(launch.few.choice, step_.q.dtype, step_.k.dtype, layer_.soft_cap);
}

cuda::BlockPart CudaOperations::BlockOf(const RowPass& pass) const {
  const collective::HeadSlice heads = OwnHeads();
  const int32_t gqa_ratio = geometry_.gqa_ratio();
  if (heads.count == 0) return {};  // fewer heads than ranks
  return {.keys = At<cuda::RowKeys>(plan_.block_keys()) + pass.row_begin,
          .k = k(),
          .v = v(),
          .kv_head_begin = heads.begin / gqa_ratio,
          .kv_head_count = heads.count / gqa_ratio};
}

cuda::GatheredLaunch CudaOperations::GatheredOf(const RowPass& pass,
                                                const SharedLaunch& shared) const {
  return {.choice = shared.launch.choice,
          .shape = shared.launch.shape,
          .blocks = shared.launch.blocks,
          .items = At<cuda::WorkItem>(shared.launch.items),
          .keys = At<cuda::RowKeys>(shared.launch.keys),
          .gathered_rows = shared.rows,
          .rows = shared.gathered.count > 0 ? At<int32_t>(shared.gathered) : nullptr,
          .first_row = shared.first_row,
          .q = memory_.gathered_q.data(),
          .o = memory_.gathered_o.as<float>(),
          .lse = memory_.gathered_lse.as<float>(),
          .call_rows = plan_.RowsOf(pass),
          .parts = At<cuda::RowParts>(shared.parts),
          .part_rows = At<int32_t>(shared.part_rows),
          .side_by_side = shared.side_by_side,
          .first_partial_row = shared.first_partial_row,
          .first_arrival = shared.first_arrival};
}

absl::Status CudaOperations::LaunchFewRows(const RowPass& pass, const PassLaunch& of_pass,
                                           const std::byte* q, Partial out) const {
  const AttentionLaunch& launch = of_pass.few;
  const cuda::AttentionArgs args{
      .items = At<cuda::WorkItem>(launch.items),
      .keys = At<cuda::RowKeys>(launch.keys),
      .page_tables = At<int32_t>(launch.tables),
      .cache = layer_.pages,
      .k_scale = layer_.k_scale,
      .v_scale = layer_.v_scale,
      .q = q,
      .q_dtype = step_.q.dtype,
      .q_heads = geometry_.q_heads,
      .kv_heads = geometry_.kv.kv_heads,
      .page_shift = std::countr_zero(static_cast<uint32_t>(step_.spec.page_size)),
      .sm_scale = geometry_.sm_scale,
      .soft_cap = layer_.soft_cap,
      .o = out.o,
      .lse = out.lse,
      .partial_o = memory_.split_o.as<float>(),
      .partial_lse = memory_.split_lse.as<float>(),
      .arrivals = memory_.arrivals.as<uint64_t>(),
      .late_strips = LateStrips(),
      .passage = place_.passage(),
      .block = ContextTakesBlock(of_pass) ? BlockOf(pass) : cuda::BlockPart{}};
  if (of_pass.shared.rows > 0) {
    return ToAbsl(cuda::LaunchSharedAttention(launch.choice, launch.shape, args, launch.blocks,
                                              GatheredOf(pass, of_pass.shared), stream_));
  }
  return ToAbsl(cuda::LaunchAttention(launch.choice, launch.shape, args, launch.blocks, stream_));
}

cuda::PrefillArgs CudaOperations::PrefillArgsFor(const PrefillLaunch& launch, const std::byte* q,
                                                 int32_t rows, Partial out) const {
  return {.items = At<cuda::PrefillItem>(launch.items),
          .gathers = At<cuda::PrefillGather>(launch.gathers),
          .keys = At<cuda::RowKeys>(launch.keys),
          .rows = rows,
          .q = q,
          .sm_scale = geometry_.sm_scale,
          .soft_cap = layer_.soft_cap,
          .o = out.o,
          .lse = out.lse,
          .workspace = memory_.prefill.data(),
          .workspace_slots = launch.workspace_slots};
}

absl::Status CudaOperations::AttendContext(const RowPass& pass, Partial out) {
  TRIBUTARY_RETURN_IF_ERROR(EnqueueContext(pass, out));
  return EnqueueKeptTokens();
}

absl::Status CudaOperations::EnqueueContext(const RowPass& pass, Partial out) const {
  const NvtxRange range("attend context", step_.layer_index);
  const size_t q_row = QueryRowBytes();
  const std::byte* from = q() + static_cast<size_t>(pass.row_begin) * q_row;
  const PassLaunch& launch = plan_.pass(static_cast<size_t>(IndexOf(pass)));
  if (!launch.many_rows) return LaunchFewRows(pass, launch, from, out);
  cuda::PrefillArgs args = PrefillArgsFor(launch.many, from, pass.row_count, out);
  args.page_tables = At<int32_t>(launch.many.tables);
  args.cache = layer_.pages;
  args.k_scale = layer_.k_scale;
  args.v_scale = layer_.v_scale;
  return ToAbsl(cuda::LaunchPrefill(launch.many.choice, launch.many.shape, launch.many.rounds, args,
                                    stream_));
}

absl::Status CudaOperations::AttendNewTokens(collective::HeadSlice heads, Partial out) {
  if (heads.count == 0) return absl::OkStatus();  // fewer heads than ranks
  const NvtxRange range("attend new tokens", step_.layer_index);
  const PrefillLaunch& launch = *plan_.new_tokens();
  cuda::PrefillArgs args = PrefillArgsFor(launch, q(), step_.plan.query_rows, out);
  args.k = narrows() ? memory_.k16.data() : k();
  args.v = narrows() ? memory_.v16.data() : v();
  args.tokens = step_.plan.new_tokens;
  TRIBUTARY_RETURN_IF_ERROR(
      ToAbsl(cuda::LaunchPrefill(launch.choice, launch.shape, launch.rounds, args, stream_)));
  return EnqueueKeptTokens();
}

absl::Status CudaOperations::Merge(int32_t rows, int32_t heads, const float* sinks, Partial in,
                                   Partial other, Partial out) const {
  const NvtxRange range("merge", step_.layer_index);
  cuda::MergeArgs args;
  args.o[0] = in.o;
  args.lse[0] = in.lse;
  args.o[1] = other.o;
  args.lse[1] = other.lse;
  args.sources = other.o == nullptr ? 1 : 2;
  args.rows = rows;
  args.heads = heads;
  args.value_dim = geometry_.kv.value_dim;
  args.sinks = sinks;
  args.out = out.o;
  args.lse_out = out.lse;
  args.begins_early = launches_begin_early();
  return ToAbsl(cuda::LaunchMerge(args, stream_));
}

absl::Status CudaOperations::AddToSlice(const RowPass& pass, collective::HeadSlice heads,
                                        Partial context, Partial slice) {
  const bool nothing_to_do = context.o == nullptr && layer_.sinks == nullptr;
  if (nothing_to_do || heads.count == 0) return absl::OkStatus();
  const Partial rows = Advance(slice, pass.row_begin, static_cast<size_t>(heads.count));
  return Merge(pass.row_count, heads.count, SinksFrom(heads.begin), rows, context, rows);
}

// Where the launch over the context did not take the block along, the block over itself and its
// merge are one launch, among the rows of all heads. A rank on its own has everything with that, so
// it applies the sinks as well: MergeToRoot would need another.
absl::Status CudaOperations::AddBlock(const RowPass& pass, collective::HeadSlice heads,
                                      Partial partial) {
  if (heads.count == 0) return absl::OkStatus();  // fewer heads than ranks
  const PassLaunch& of_pass = plan_.pass(static_cast<size_t>(IndexOf(pass)));
  if (ContextTakesBlock(of_pass)) return absl::OkStatus();
  const NvtxRange range("attend block", step_.layer_index);
  const BlockLaunch& launch = of_pass.block;
  const auto first_row = static_cast<size_t>(pass.row_begin);
  return ToAbsl(cuda::LaunchBlockAttention(
      {.entries = At<cuda::BlockEntry>(launch.entries),
       .entry_count = static_cast<int32_t>(launch.entries.count),
       .most_rows = launch.most_rows,
       .keys = At<cuda::RowKeys>(plan_.block_keys()) + first_row,
       .q = q() + first_row * QueryRowBytes(),
       .q_dtype = step_.q.dtype,
       .k = k(),
       .v = v(),
       .kv_dtype = step_.k.dtype,
       .q_heads = geometry_.q_heads,
       .kv_heads = geometry_.kv.kv_heads,
       .key_dim = geometry_.kv.key_dim,
       .value_dim = geometry_.kv.value_dim,
       .head_begin = heads.begin,
       .head_count = heads.count,
       .sm_scale = geometry_.sm_scale,
       .soft_cap = layer_.soft_cap,
       .sinks = alone() ? SinksFrom(heads.begin) : nullptr,
       .o = partial.o,
       .lse = partial.lse,
       // What it reads was there before the launch ahead began, which is over the context.
       .begins_early = launches_begin_early() && !place_.begins_before_arrival},
      stream_));
}

}  // namespace tributary::worker
