#include "worker/cuda/operations.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "collective/direct/direct_layout.h"
#include "kernels/cpu/backend.h"
#include "kernels/cuda/append/append.h"
#include "kernels/cuda/append/matches_cache.h"
#include "kernels/cuda/decode/block_attention.h"
#include "kernels/cuda/merge/merge.h"
#include "kernels/cuda/prefill/narrow.h"
#include "worker/cuda/input_use.h"
#include "worker/cuda/nvtx_range.h"
#include "worker/cuda/status.h"
#include "worker/status_conversion.h"

namespace tributary::worker {
namespace {

// Large tensors go to the device in pieces: while one is copied, the next one is staged.
constexpr size_t kPiece = size_t{4} << 20;

// 0 without rows, whatever the tensor says: it is nobody's then.
size_t PaddedBytes(const TensorView& tensor, int32_t rows, int32_t padded_rows) {
  if (rows == 0) return 0;
  return tensor.bytes / static_cast<size_t>(rows) * static_cast<size_t>(padded_rows);
}

uint64_t AsNumber(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer); }

}  // namespace

CudaOperations::CudaOperations(const PlannedStep& step, const DevicePlan& plan,
                               const std::byte* block, const CudaLayer& layer, CudaRank& rank,
                               const CudaPlace& place, StepResults* results)
    : step_(step),
      geometry_(step.geometry()),
      plan_(plan),
      block_(block),
      layer_(layer),
      rank_(rank),
      place_(place),
      memory_(place.memory),
      results_(*results),
      stream_(place.stream),
      inputs_{InputOf(step.q, place.q, step.plan.query_rows, plan.padded_rows(), &memory_.staged_q,
                      &memory_.q),
              InputOf(step.k, place.k, step.plan.new_tokens, plan.padded_tokens(),
                      &memory_.staged_k, &memory_.k),
              InputOf(step.v, place.v, step.plan.new_tokens, plan.padded_tokens(),
                      &memory_.staged_v, &memory_.v)},
      host_exchange_(step, rank.options().strategy, memory_.exchange, *results) {
  collective::DeviceGroup* group = rank.group();
  if (group != nullptr) {
    device_exchange_.emplace(step, rank.options().strategy, *group, stream_,
                             rank.options().batch_invariant);
    partial_arrives_ = PartialArrives();
  }
}

CudaOperations::Input CudaOperations::InputOf(const TensorView& tensor, const std::byte* on_device,
                                              int32_t rows, int32_t padded_rows,
                                              PinnedMemory* staged, DeviceMemory* device) const {
  Input input{.from = &tensor,
              .staged = staged,
              .device = device,
              .padded_bytes = PaddedBytes(tensor, rows, padded_rows),
              .in_place = on_device,
              .on_device = on_device != nullptr};
  if (input.on_device || input.padded_bytes == 0 || !tensor.in_regions()) return input;
  const DeviceRegions::Place place = rank_.regions().Find(tensor.parts.front());
  const InputUse use{.kind = step_.kind,
                     .parts = tensor.parts.size(),
                     .padded = input.padded_bytes != tensor.bytes,
                     .same_gpu = place.same_gpu,
                     .read_often = &tensor == &step_.q};
  if (MayBeReadInPlace(use)) input.in_place = place.data;
  return input;
}

int32_t CudaOperations::ResultRows() const {
  return step_.plan.passes.size() == 1 ? plan_.padded_rows() : step_.plan.query_rows;
}

int32_t CudaOperations::IndexOf(const RowPass& pass) const {
  return static_cast<int32_t>(&pass - step_.plan.passes.data());
}

bool CudaOperations::PartialArrives() const {
  return step_.kind == StepKind::kDecode && plan_.write_slots().count > 0 &&
         step_.plan.passes.size() == 1 && !plan_.pass(0).many_rows &&
         plan_.padded_rows() == step_.plan.query_rows &&
         device_exchange_->MayArrive(step_.plan.query_rows);
}

int32_t CudaOperations::LateStrips() const {
  const bool behind_append = step_.kind == StepKind::kDecode && step_.plan.passes.size() == 1 &&
                             plan_.write_slots().count > 0 && plan_.compare_slots().count == 0;
  // No sequence gets more than all of them get.
  return behind_append ? cuda::LateStripsOf(plan_.padded_tokens()) : 0;
}

absl::Status CudaOperations::ReserveArriving(size_t row_heads) {
  CudaRank::ArrivingPartial& partial = memory_.arriving;
  const bool fits = partial.o.bytes() >= row_heads * ValueDim() && partial.lse.bytes() >= row_heads;
  TRIBUTARY_RETURN_IF_ERROR(partial.o.Reserve(row_heads * ValueDim()));
  TRIBUTARY_RETURN_IF_ERROR(partial.lse.Reserve(row_heads));
  if (!fits) partial.dirty = true;
  if (!partial_arrives_) return absl::OkStatus();
  if (partial.dirty) {
    static_assert(collective::kNotArrived == 0xffffffffu);
    for (const DeviceMemory* memory : {&partial.o, &partial.lse}) {
      TRIBUTARY_CUDA_OK(cudaMemsetAsync(memory->data(), 0xff, memory->bytes(), stream_));
    }
  }
  partial.dirty = true;  // until Finish
  return absl::OkStatus();
}

absl::Status CudaOperations::Reserve(size_t room) {
  absl::Status status;
  // One after the other until one fails.
  const auto reserve = [&](auto& memory, size_t bytes) {
    if (status.ok()) status = memory.Reserve(bytes);
  };
  for (const Input& input : inputs_) {
    if (input.on_device) continue;
    // Wherever else it lies: what is taken must depend on the step's size alone (step_size.h).
    reserve(*input.staged, input.padded_bytes);
    reserve(*input.device, input.padded_bytes);
  }
  const size_t columns = static_cast<size_t>(plan_.partial_columns()) * room;
  reserve(memory_.piece_o, columns * ValueDim() * sizeof(float));
  reserve(memory_.piece_lse, columns * sizeof(float));
  TRIBUTARY_RETURN_IF_ERROR(status);
  TRIBUTARY_RETURN_IF_ERROR(memory_.arrivals.ReserveZeroed(
      static_cast<size_t>(plan_.arrivals()) * sizeof(uint64_t) * room, stream_));
  const size_t differs = static_cast<size_t>(plan_.entries()) * sizeof(uint32_t) * room;
  reserve(memory_.differs, differs);
  reserve(memory_.staged_differs, differs);
  if (step_.plan.query_rows == 0) return status;

  int32_t pass_rows = 0;
  for (const RowPass& pass : step_.plan.passes) pass_rows = std::max(pass_rows, plan_.RowsOf(pass));
  const size_t rows = static_cast<size_t>(pass_rows);
  // Not ResultRows: memory follows the step's size alone (step_size.h).
  const auto result_rows = static_cast<size_t>(plan_.padded_rows());
  reserve(memory_.prefill, plan_.workspace_bytes() * room);
  if (narrows()) {
    reserve(memory_.staged_k16, inputs_[1].padded_bytes / 2);
    reserve(memory_.staged_v16, inputs_[2].padded_bytes / 2);
    reserve(memory_.k16, inputs_[1].padded_bytes / 2);
    reserve(memory_.v16, inputs_[2].padded_bytes / 2);
  }
  const size_t row_heads = Heads() * sizeof(float);
  reserve(memory_.pass_o, rows * row_heads * ValueDim());
  reserve(memory_.pass_lse, rows * row_heads);
  // Also where this step's rows do not arrive, being padded: the next one of its size may be exact.
  if (status.ok() && step_.kind == StepKind::kDecode && device_exchange_.has_value()) {
    status = ReserveArriving(rows * row_heads);
  }
  const bool result_has_place = place_.result_o != nullptr;
  if (!result_has_place && (result_on_device() || has_outputs())) {
    reserve(memory_.result_o, result_rows * row_heads * ValueDim());
    reserve(memory_.result_lse, result_rows * row_heads);
  }
  if (exchanges_on_host() && has_outputs() && results_.o == nullptr) {
    reserve(memory_.staged_result_o, result_rows * row_heads * ValueDim());
    reserve(memory_.staged_result_lse, result_rows * row_heads);
    results_.o = memory_.staged_result_o.as<float>();
    results_.lse = memory_.staged_result_lse.as<float>();
  }
  // A rank on its own need not take what others of the group would wait for.
  const bool result_stays = result_has_place || (alone() && results_.o == nullptr);
  const bool result_to_host = result_on_device() && !result_stays;
  const size_t staged_rows = exchanges_on_host() ? rows : result_to_host ? result_rows : 0;
  reserve(memory_.staged_o, staged_rows * row_heads * ValueDim());
  reserve(memory_.staged_lse, staged_rows * row_heads);
  if (step_.kind != StepKind::kPrefill || slice_is_result()) return status;

  // A rank without heads takes part with memory too: all ranks say alike what they exchange.
  const size_t own = static_cast<size_t>(std::max(OwnHeads().count, 1)) * sizeof(float);
  reserve(memory_.slice_o, result_rows * own * ValueDim());
  reserve(memory_.slice_lse, result_rows * own);
  reserve(memory_.context_o, rows * own * ValueDim());
  reserve(memory_.context_lse, rows * own);
  if (exchanges_on_host()) {
    reserve(memory_.staged_context_o, rows * own * ValueDim());
    reserve(memory_.staged_context_lse, rows * own);
  }
  return status;
}

bool CudaOperations::MayBeCaptured() const {
  if (alone()) return true;
  if (!device_exchange_.has_value()) return false;
  const std::vector<RowPass>& passes = step_.plan.passes;
  return std::all_of(passes.begin(), passes.end(), [this](const RowPass& pass) {
    return device_exchange_->MayBeCaptured(plan_.RowsOf(pass));
  });
}

void CudaOperations::AppendSignature(std::vector<uint64_t>* values) const {
  values->push_back(static_cast<uint64_t>(step_.kind) | static_cast<uint64_t>(step_.q.dtype) << 8 |
                    static_cast<uint64_t>(step_.k.dtype) << 16 |
                    uint64_t{step_.plan.query_rows > 0} << 24 |
                    uint64_t{step_.plan.new_tokens > 0} << 25);
  for (const Input& input : inputs_) {
    values->push_back(input.padded_bytes);
    values->push_back(input.from_host() ? AsNumber(input.staged->data()) : 0);
    values->push_back(AsNumber(input.data()));
  }
  values->push_back(results_.o != nullptr);
  for (const DeviceMemory* memory :
       {&memory_.pass_o, &memory_.pass_lse, &memory_.result_o, &memory_.result_lse,
        &memory_.piece_o, &memory_.piece_lse, &memory_.arrivals, &memory_.differs}) {
    values->push_back(AsNumber(memory->data()));
  }
  for (const PinnedMemory* memory :
       {&memory_.staged_o, &memory_.staged_lse, &memory_.staged_differs}) {
    values->push_back(AsNumber(memory->data()));
  }
  values->push_back(AsNumber(block_));
  values->push_back(AsNumber(place_.result_o));
  values->push_back(AsNumber(place_.result_lse));
  values->push_back(AsNumber(layer_.pages));
  values->push_back(device_exchange_.has_value() ? device_exchange_->epoch() : 0);
  values->push_back(step_.bf16_partials);
  values->push_back(partial_arrives_ ? AsNumber(memory_.arriving.o.data()) : 0);
  values->push_back(partial_arrives_ ? AsNumber(memory_.arriving.lse.data()) : 0);
}

// ------------------------------------------------------------------------------- in and out

absl::Status CudaOperations::EnqueueRegionInputs() {
  for (const Input& input : inputs_) {
    const bool wanted = input.padded_bytes > 0 && input.from->in_regions();
    if (!wanted || input.in_place != nullptr) continue;
    std::byte* to = input.device->data();
    for (const RegionPart& part : input.from->parts) {
      TRIBUTARY_CUDA_OK(cudaMemcpyAsync(to, rank_.regions().Find(part).data, part.bytes,
                                        cudaMemcpyDefault, stream_));
      to += part.bytes;
    }
  }
  return absl::OkStatus();
}

absl::Status CudaOperations::EnqueueRegionOutputs() {
  if (!has_outputs()) return absl::OkStatus();
  const NvtxRange range("outputs", step_.layer_index);
  if (exchanges_on_host()) {
    const size_t row_heads = static_cast<size_t>(step_.plan.query_rows) * Heads() * sizeof(float);
    TRIBUTARY_CUDA_OK(cudaMemcpyAsync(memory_.result_o.data(), results_.o, row_heads * ValueDim(),
                                      cudaMemcpyHostToDevice, stream_));
    TRIBUTARY_CUDA_OK(cudaMemcpyAsync(memory_.result_lse.data(), results_.lse, row_heads,
                                      cudaMemcpyHostToDevice, stream_));
  }
  int32_t row = 0;
  for (const RegionOutput& output : step_.outputs) {
    const Partial rows = Advance(Result(), row, Heads());
    row += output.rows;
    cuda::MergeArgs args;  // of one source: a copy that converts
    args.o[0] = rows.o;
    args.lse[0] = rows.lse;
    args.sources = 1;
    args.rows = output.rows;
    args.heads = geometry_.q_heads;
    args.value_dim = geometry_.kv.value_dim;
    args.out = rank_.regions().Find(output.o).data;
    args.out_dtype = output.dtype;
    args.lse_out = reinterpret_cast<float*>(rank_.regions().Find(output.lse).data);
    if (args.out == nullptr) {
      if (args.lse_out == nullptr) continue;
      TRIBUTARY_CUDA_OK(
          cudaMemcpyAsync(args.lse_out, rows.lse, output.lse.bytes, cudaMemcpyDefault, stream_));
      continue;
    }
    TRIBUTARY_RETURN_IF_ERROR(ToAbsl(cuda::LaunchMerge(args, stream_)));
  }
  return absl::OkStatus();
}

void CudaOperations::StageInputs() {
  const NvtxRange range("stage inputs", step_.layer_index);
  for (const Input& input : inputs_) {
    if (!input.from_host()) continue;
    std::memcpy(input.staged->data(), input.from->data, input.from->bytes);
  }
}

absl::Status CudaOperations::EnqueueInputs() {
  for (const Input& input : inputs_) {
    if (!input.from_host()) continue;
    TRIBUTARY_CUDA_OK(cudaMemcpyAsync(input.device->data(), input.staged->data(),
                                      input.padded_bytes, cudaMemcpyHostToDevice, stream_));
  }
  return absl::OkStatus();
}

absl::Status CudaOperations::StageAndEnqueueInputs() {
  const NvtxRange range("stage inputs", step_.layer_index);
  for (const Input& input : inputs_) {
    if (!input.from_host()) continue;
    for (size_t at = 0; at < input.from->bytes; at += kPiece) {
      const size_t bytes = std::min(kPiece, input.from->bytes - at);
      std::memcpy(input.staged->data() + at, input.from->data + at, bytes);
      TRIBUTARY_CUDA_OK(cudaMemcpyAsync(input.device->data() + at, input.staged->data() + at, bytes,
                                        cudaMemcpyHostToDevice, stream_));
    }
  }
  return narrows() ? EnqueueNarrowedTokens() : absl::OkStatus();
}

// The prefill kernels multiply 16-bit elements.
absl::Status CudaOperations::EnqueueNarrowedTokens() {
  const auto narrow = [&](const Input& input, PinnedMemory& staged, DeviceMemory& device) {
    const size_t elements = input.from->bytes / sizeof(float);
    if (!input.from_host()) {
      return ToAbsl(cuda::LaunchNarrow(reinterpret_cast<const float*>(input.data()),
                                       device.as<uint16_t>(), static_cast<int64_t>(elements),
                                       stream_));
    }
    cpu::Convert(DType::kF32, input.from->data, DType::kBf16, staged.data(), elements);
    return FromCuda("cudaMemcpyAsync", cudaMemcpyAsync(device.data(), staged.data(), elements * 2,
                                                       cudaMemcpyHostToDevice, stream_));
  };
  TRIBUTARY_RETURN_IF_ERROR(narrow(inputs_[1], memory_.staged_k16, memory_.k16));
  return narrow(inputs_[2], memory_.staged_v16, memory_.v16);
}

absl::Status CudaOperations::EnqueueResults() {
  const NvtxRange range("results", step_.layer_index);
  if (plan_.entries() > 0) {
    TRIBUTARY_CUDA_OK(cudaMemcpyAsync(memory_.staged_differs.data(), memory_.differs.data(),
                                      static_cast<size_t>(plan_.entries()) * sizeof(uint32_t),
                                      cudaMemcpyDeviceToHost, stream_));
  }
  if (!result_on_device() || results_.o == nullptr) return absl::OkStatus();
  const size_t row_heads = static_cast<size_t>(ResultRows()) * Heads() * sizeof(float);
  TRIBUTARY_CUDA_OK(cudaMemcpyAsync(memory_.staged_o.data(), memory_.result_o.data(),
                                    row_heads * ValueDim(), cudaMemcpyDeviceToHost, stream_));
  TRIBUTARY_CUDA_OK(cudaMemcpyAsync(memory_.staged_lse.data(), memory_.result_lse.data(), row_heads,
                                    cudaMemcpyDeviceToHost, stream_));
  return absl::OkStatus();
}

absl::Status CudaOperations::Finish() {
  const NvtxRange range("finish", step_.layer_index);
  TRIBUTARY_RETURN_IF_ERROR(rank_.Await(step_.deadline));
  if (partial_arrives_) memory_.arriving.dirty = false;
  const auto* differs = memory_.staged_differs.as<uint32_t>();
  for (int32_t entry = 0; entry < plan_.entries(); ++entry) {
    if (differs[entry] != 0) results_.conflicts.push_back(entry);
  }
  if (!result_on_device() || results_.o == nullptr) return absl::OkStatus();
  const size_t row_heads = static_cast<size_t>(step_.plan.query_rows) * Heads();
  std::copy_n(memory_.staged_o.as<float>(), row_heads * ValueDim(), results_.o);
  std::copy_n(memory_.staged_lse.as<float>(), row_heads, results_.lse);
  return absl::OkStatus();
}

// ------------------------------------------------------------------------------- on the device

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
  if (alone() && !slice_is_result()) return ResultOf(pass);
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

absl::Status CudaOperations::AppendOrCompare() {
  const NvtxRange range("append", step_.layer_index);
  if (plan_.write_slots().count > 0) {
    TRIBUTARY_RETURN_IF_ERROR(
        ToAbsl(cuda::LaunchAppend(AppendArgsFor(plan_.write_slots()), stream_)));
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

absl::Status CudaOperations::LaunchFewRows(const AttentionLaunch& launch, const std::byte* q,
                                           const cuda::BlockPart& block, Partial out) const {
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
      .partial_o = memory_.piece_o.as<float>(),
      .partial_lse = memory_.piece_lse.as<float>(),
      .arrivals = memory_.arrivals.as<uint64_t>(),
      .late_strips = LateStrips(),
      .block = block};
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
  const NvtxRange range("attend context", step_.layer_index);
  const size_t q_row = QueryRowBytes();
  const std::byte* from = q() + static_cast<size_t>(pass.row_begin) * q_row;
  const PassLaunch& launch = plan_.pass(static_cast<size_t>(IndexOf(pass)));
  if (!launch.many_rows) {
    return LaunchFewRows(launch.few, from,
                         ContextTakesBlock(launch) ? BlockOf(pass) : cuda::BlockPart{}, out);
  }
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
  return ToAbsl(cuda::LaunchPrefill(launch.choice, launch.shape, launch.rounds, args, stream_));
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
       // What it reads was copied before the launch ahead, which is over the context.
       .begins_early = launches_begin_early()},
      stream_));
}

// ------------------------------------------------------------------------------- between ranks

absl::StatusOr<StepOperations::Partial> CudaOperations::BringToHost(Partial partial, int32_t rows,
                                                                    size_t heads) {
  const size_t row_heads = static_cast<size_t>(rows) * heads * sizeof(float);
  const Partial host{memory_.staged_o.as<float>(), memory_.staged_lse.as<float>()};
  if (row_heads > 0) {
    TRIBUTARY_CUDA_OK(cudaMemcpyAsync(host.o, partial.o, row_heads * ValueDim(),
                                      cudaMemcpyDeviceToHost, stream_));
    TRIBUTARY_CUDA_OK(
        cudaMemcpyAsync(host.lse, partial.lse, row_heads, cudaMemcpyDeviceToHost, stream_));
  }
  const TimedSection timed(results_.times.attend);
  TRIBUTARY_RETURN_IF_ERROR(rank_.Await(step_.deadline));
  return host;
}

absl::Status CudaOperations::MergeToRoot(const RowPass& pass, Partial partial) {
  const NvtxRange range("merge to root", step_.layer_index);
  if (alone()) {
    // It lies where it belongs; AddBlock applied a draft's sinks.
    if (layer_.sinks == nullptr || is_draft()) return absl::OkStatus();
    return Merge(plan_.RowsOf(pass), geometry_.q_heads, layer_.sinks, partial, {}, partial);
  }
  if (device_exchange_.has_value()) {
    return device_exchange_->MergeToRoot(plan_.RowsOf(pass), partial, layer_.sinks, ResultOf(pass),
                                         partial_arrives_);
  }
  TRIBUTARY_ASSIGN_OR_RETURN(const Partial host, BringToHost(partial, pass.row_count, Heads()));
  return host_exchange_.MergeToRoot(pass, host);
}

absl::StatusOr<StepOperations::Partial> CudaOperations::MergeToSlices(const RowPass& pass,
                                                                      Partial partial) {
  if (alone()) return partial;
  const NvtxRange range("exchange to slices", step_.layer_index);
  const Partial context{memory_.context_o.as<float>(), memory_.context_lse.as<float>()};
  if (device_exchange_.has_value()) {
    TRIBUTARY_RETURN_IF_ERROR(device_exchange_->MergeToSlices(pass.row_count, partial, context));
    return context;
  }
  TRIBUTARY_ASSIGN_OR_RETURN(const Partial host, BringToHost(partial, pass.row_count, Heads()));
  const Partial merged{memory_.staged_context_o.as<float>(),
                       memory_.staged_context_lse.as<float>()};
  TRIBUTARY_RETURN_IF_ERROR(host_exchange_.MergeToSlices(pass, host, merged));
  const size_t row_heads =
      static_cast<size_t>(pass.row_count) * static_cast<size_t>(OwnHeads().count) * sizeof(float);
  if (row_heads == 0) return context;
  TRIBUTARY_CUDA_OK(cudaMemcpyAsync(context.o, merged.o, row_heads * ValueDim(),
                                    cudaMemcpyHostToDevice, stream_));
  TRIBUTARY_CUDA_OK(
      cudaMemcpyAsync(context.lse, merged.lse, row_heads, cudaMemcpyHostToDevice, stream_));
  return context;
}

absl::Status CudaOperations::GatherToRoot(const RowPass& pass, collective::HeadSlice heads,
                                          Partial slice) {
  if (alone()) return absl::OkStatus();  // the slice is the result
  const NvtxRange range("gather to root", step_.layer_index);
  const auto own = static_cast<size_t>(heads.count);
  const Partial rows = Advance(slice, pass.row_begin, own);
  if (device_exchange_.has_value()) {
    return device_exchange_->GatherToRoot(pass.row_count, rows, ResultOf(pass));
  }
  TRIBUTARY_ASSIGN_OR_RETURN(const Partial host, BringToHost(rows, pass.row_count, own));
  return host_exchange_.GatherToRoot(pass, host);
}

}  // namespace tributary::worker
