// CudaOperations: tensors to the device, and results from it.
#include <algorithm>
#include <cstring>

#include "kernels/cuda/merge/merge.h"
#include "kernels/cuda/prefill/narrow.h"
#include "worker/cuda/nvtx_range.h"
#include "worker/cuda/operations/operations.h"
#include "worker/cuda/status.h"
#include "worker/output_bytes.h"
#include "worker/status_conversion.h"
#include "worker/step_output.h"

namespace tributary::worker {
namespace {

// Large tensors go to the device in pieces: while one is copied, the next one is staged.
constexpr size_t kPiece = size_t{4} << 20;

}  // namespace

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

// A launch that converts rows of the result, which lie on the device.
cuda::MergeArgs CudaOperations::ConversionOf(Partial rows, int32_t count) const {
  cuda::MergeArgs args =
      cuda::ConversionOf(rows.o, rows.lse, count, geometry_.q_heads, geometry_.kv.value_dim);
  args.begins_early = launches_begin_early();
  return args;
}

absl::Status CudaOperations::EnqueueOutputs() {
  if (!has_region_outputs() && !device_stores()) return absl::OkStatus();
  const NvtxRange range("outputs", step_.layer_index);
  if (exchanges_on_host()) {
    const size_t row_heads = static_cast<size_t>(step_.plan.query_rows) * Heads() * sizeof(float);
    TRIBUTARY_CUDA_OK(cudaMemcpyAsync(memory_.result_o.data(), results_.o, row_heads * ValueDim(),
                                      cudaMemcpyHostToDevice, stream_));
    TRIBUTARY_CUDA_OK(cudaMemcpyAsync(memory_.result_lse.data(), results_.lse, row_heads,
                                      cudaMemcpyHostToDevice, stream_));
  }
  int32_t row = 0;
  for (const StepOutput& output : step_.outputs) {
    TRIBUTARY_RETURN_IF_ERROR(EnqueueToRegions(output, row));
    if (device_stores()) TRIBUTARY_RETURN_IF_ERROR(EnqueueToHost(output, row));
    row += output.rows;
  }
  return absl::OkStatus();
}

absl::Status CudaOperations::EnqueueToRegions(const StepOutput& output, int32_t row) {
  const Partial rows = Advance(Result(), row, Heads());
  cuda::MergeArgs args = ConversionOf(rows, output.rows);
  if (output.o.in_region()) {
    cuda::SetOutput(output.format, rank_.regions().Find(output.o.part).data, &args);
  }
  args.lse_out = reinterpret_cast<float*>(rank_.regions().Find(output.lse.part).data);
  if (args.out != nullptr) return ToAbsl(cuda::LaunchMerge(args, stream_));
  if (args.lse_out == nullptr) return absl::OkStatus();
  return FromCuda("cudaMemcpyAsync", cudaMemcpyAsync(args.lse_out, rows.lse, output.lse.part.bytes,
                                                     cudaMemcpyDefault, stream_));
}

// Outputs lie in `converted` and `staged_o` where their numbers would, which take no less room.
absl::Status CudaOperations::EnqueueToHost(const StepOutput& output, int32_t row) {
  const Partial rows = Advance(Result(), row, Heads());
  if (output.lse.data != nullptr) {
    std::byte* const to =
        output.lse.pinned ? output.lse.data : reinterpret_cast<std::byte*>(StagedRows(row).lse);
    TRIBUTARY_CUDA_OK(cudaMemcpyAsync(to, rows.lse, LseBytesOf(output, geometry_),
                                      cudaMemcpyDeviceToHost, stream_));
  }
  if (output.o.data == nullptr) return absl::OkStatus();
  auto* from = reinterpret_cast<std::byte*>(rows.o);
  if (output.format.dtype != DType::kF32) {
    from = reinterpret_cast<std::byte*>(
        Advance({memory_.converted.as<float>(), nullptr}, row, Heads()).o);
    cuda::MergeArgs args = ConversionOf(rows, output.rows);
    cuda::SetOutput(output.format, from, &args);
    TRIBUTARY_RETURN_IF_ERROR(ToAbsl(cuda::LaunchMerge(args, stream_)));
  }
  std::byte* const to =
      output.o.pinned ? output.o.data : reinterpret_cast<std::byte*>(StagedRows(row).o);
  return FromCuda("cudaMemcpyAsync", cudaMemcpyAsync(to, from, OutputBytesOf(output, geometry_),
                                                     cudaMemcpyDeviceToHost, stream_));
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
    if (input.from->pinned) {
      TRIBUTARY_CUDA_OK(cudaMemcpyAsync(input.device->data(), input.from->data, input.from->bytes,
                                        cudaMemcpyHostToDevice, stream_));
      continue;
    }
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
  const auto narrow = [&](const Input& input, DeviceMemory& narrowed) {
    return ToAbsl(
        cuda::LaunchNarrow(reinterpret_cast<const float*>(input.data()), narrowed.as<uint16_t>(),
                           static_cast<int64_t>(input.from->bytes / sizeof(float)), stream_));
  };
  TRIBUTARY_RETURN_IF_ERROR(narrow(inputs_[1], memory_.k16));
  return narrow(inputs_[2], memory_.v16);
}

absl::Status CudaOperations::EnqueueResults() {
  const NvtxRange range("results", step_.layer_index);
  TRIBUTARY_RETURN_IF_ERROR(JoinKeptTokens());
  if (plan_.entries() > 0) {
    TRIBUTARY_CUDA_OK(cudaMemcpyAsync(memory_.staged_differs.data(), memory_.differs.data(),
                                      static_cast<size_t>(plan_.entries()) * sizeof(uint32_t),
                                      cudaMemcpyDeviceToHost, stream_));
  }
  if (!result_on_device() || !host_stores()) return absl::OkStatus();
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
  if (host_stores()) {
    const Partial numbers = result_on_device() ? StagedRows(0) : Partial{results_.o, results_.lse};
    StoreOutputs(step_.outputs, geometry_, numbers.o, numbers.lse, nullptr);
  } else if (device_stores()) {
    BringFromStaging();
  }
  return absl::OkStatus();
}

// Copies results that the device could not put into their place by itself.
void CudaOperations::BringFromStaging() const {
  int32_t row = 0;
  for (const StepOutput& output : step_.outputs) {
    const Partial staged = StagedRows(row);
    row += output.rows;
    if (output.o.data != nullptr && !output.o.pinned) {
      std::memcpy(output.o.data, staged.o, OutputBytesOf(output, geometry_));
    }
    if (output.lse.data != nullptr && !output.lse.pinned) {
      std::memcpy(output.lse.data, staged.lse, LseBytesOf(output, geometry_));
    }
  }
}

}  // namespace tributary::worker
