#include "worker/cuda/operations/operations.h"

#include <algorithm>
#include <bit>

#include "collective/direct/direct_layout.h"
#include "worker/cuda/input_use.h"
#include "worker/cuda/replica.h"
#include "worker/cuda/status.h"

namespace tributary::worker {
namespace {

// 0 without rows, whatever the tensor says: it is nobody's then.
size_t PaddedBytes(const TensorView& tensor, int32_t rows, int32_t padded_rows) {
  if (rows == 0) return 0;
  return tensor.bytes / static_cast<size_t>(rows) * static_cast<size_t>(padded_rows);
}

// Up to so many bytes of a caller's result, as numbers, are stored by the host: it takes less than
// the device's launch and copies of their own do.
constexpr size_t kFewNumbers = size_t{64} << 10;

// A prompt's tensor in pinned memory is copied from there. (Steps of few rows may be graphs, which
// copy from staging memory.)
bool NeedsNoStaging(const TensorView& tensor, StepKind kind) {
  return tensor.pinned && kind == StepKind::kPrefill;
}

uint64_t AsNumber(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer); }

}  // namespace

CudaOperations::CudaOperations(const PlannedStep& step, const DevicePlan& plan,
                               const std::byte* plan_data, const CudaLayer& layer, CudaRank& rank,
                               const CudaPlace& place, StepResults* results)
    : step_(step),
      geometry_(step.geometry()),
      plan_(plan),
      plan_data_(plan_data),
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
  for (const StepOutput& output : step_.outputs) {
    has_region_outputs_ |= output.o.in_region() || output.lse.in_region();
    has_host_outputs_ |= output.o.data != nullptr || output.lse.data != nullptr;
  }
  const size_t numbers = static_cast<size_t>(step_.plan.query_rows) * Heads() * ValueDim();
  few_numbers_ = numbers * sizeof(float) <= kFewNumbers * step_.outputs.size();
  const bool own_group = place.group != nullptr;
  collective::DeviceGroup* group = own_group ? place.group : rank.group();
  if (group != nullptr) {
    // A session's own group knows one strategy, whichever the rank was asked for.
    device_exchange_.emplace(step,
                             own_group ? collective::Strategy::kAuto : rank.options().strategy,
                             *group, stream_, rank.options().batch_invariant);
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
  const OpenedRegions::Place place = rank_.regions().Find(tensor.parts.front());
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
         plan_.pass(0).shared.rows == 0 && plan_.padded_rows() == step_.plan.query_rows &&
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
  // Until Finish. With a group of its own, whoever placed the step gives up all that is there when
  // a step fails.
  partial.dirty = place_.group == nullptr;
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
    // Wherever else it lies: what is taken must depend on the step's size alone (step_size.h). A
    // rank on its own need not take what others of the group would wait for.
    if (!alone() || !NeedsNoStaging(*input.from, step_.kind)) {
      reserve(*input.staged, input.padded_bytes);
    }
    reserve(*input.device, input.padded_bytes);
  }
  const size_t columns = static_cast<size_t>(plan_.partial_columns()) * room;
  reserve(memory_.split_o, columns * ValueDim() * sizeof(float));
  reserve(memory_.split_lse, columns * sizeof(float));
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
    reserve(memory_.k16, inputs_[1].padded_bytes / 2);
    reserve(memory_.v16, inputs_[2].padded_bytes / 2);
  }
  const size_t row_heads = Heads() * sizeof(float);
  // Where peers may wait for this rank, as much as one level of sharing takes: the next step of
  // this size may share pages.
  const bool may_share =
      !alone() && step_.kind != StepKind::kPrefill && !rank_.options().batch_invariant;
  const size_t gathered =
      std::max(static_cast<size_t>(plan_.gathered_rows()) * room, may_share ? rows : 0);
  reserve(memory_.gathered_q, gathered * QueryRowBytes());
  reserve(memory_.gathered_o, gathered * row_heads * ValueDim());
  reserve(memory_.gathered_lse, gathered * row_heads);
  reserve(memory_.pass_o, rows * row_heads * ValueDim());
  reserve(memory_.pass_lse, rows * row_heads);
  // Also where this step's rows do not arrive, being padded: the next one of its size may be exact.
  if (status.ok() && step_.kind == StepKind::kDecode && device_exchange_.has_value()) {
    status = ReserveArriving(rows * row_heads);
  }
  const bool result_has_place = place_.result_o != nullptr;
  if (!result_has_place && (result_on_device() || has_region_outputs())) {
    reserve(memory_.result_o, result_rows * row_heads * ValueDim());
    reserve(memory_.result_lse, result_rows * row_heads);
  }
  if (exchanges_on_host() && step_.comm.rank() == 0) {
    reserve(memory_.staged_result_o, result_rows * row_heads * ValueDim());
    reserve(memory_.staged_result_lse, result_rows * row_heads);
    results_.o = memory_.staged_result_o.as<float>();
    results_.lse = memory_.staged_result_lse.as<float>();
  }
  const bool result_stays = result_has_place || (alone() && !has_host_outputs());
  const bool result_to_host = result_on_device() && !result_stays;
  const size_t staged_rows = exchanges_on_host() ? rows : result_to_host ? result_rows : 0;
  reserve(memory_.staged_o, staged_rows * row_heads * ValueDim());
  reserve(memory_.staged_lse, staged_rows * row_heads);
  if (result_to_host) reserve(memory_.converted, result_rows * row_heads * ValueDim());
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
  values->push_back(host_stores());
  for (const DeviceMemory* memory :
       {&memory_.pass_o, &memory_.pass_lse, &memory_.result_o, &memory_.result_lse,
        &memory_.split_o, &memory_.split_lse, &memory_.arrivals, &memory_.differs,
        &memory_.gathered_q, &memory_.gathered_o, &memory_.gathered_lse}) {
    values->push_back(AsNumber(memory->data()));
  }
  for (const PinnedMemory* memory :
       {&memory_.staged_o, &memory_.staged_lse, &memory_.staged_differs}) {
    values->push_back(AsNumber(memory->data()));
  }
  values->push_back(AsNumber(plan_data_));
  values->push_back(AsNumber(place_.result_o));
  values->push_back(AsNumber(place_.result_lse));
  values->push_back(AsNumber(layer_.pages));
  values->push_back(
      keeps_tokens()
          ? AsNumber(static_cast<const CudaReplica&>(*step_.replica).layer(step_.layer_index).base)
          : 0);
  values->push_back(device_exchange_.has_value() ? device_exchange_->epoch() : 0);
  values->push_back(step_.bf16_partials);
  values->push_back(partial_arrives_ ? AsNumber(memory_.arriving.o.data()) : 0);
  values->push_back(partial_arrives_ ? AsNumber(memory_.arriving.lse.data()) : 0);
}

}  // namespace tributary::worker
