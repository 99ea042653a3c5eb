// CudaOperations: tensors to the device, and results from it.
#include <algorithm>
#include <cstring>

#include "kernels/cpu/backend.h"
#include "kernels/cuda/merge/merge.h"
#include "kernels/cuda/prefill/narrow.h"
#include "worker/cuda/nvtx_range.h"
#include "worker/cuda/operations/operations.h"
#include "worker/cuda/status.h"
#include "worker/status_conversion.h"

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
    if (output.o.region != 0) {
      cuda::SetOutput(output.format, rank_.regions().Find(output.o).data, &args);
    }
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

}  // namespace tributary::worker
