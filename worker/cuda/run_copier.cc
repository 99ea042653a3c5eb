#include "worker/cuda/run_copier.h"

#include <algorithm>
#include <chrono>
#include <cstring>

#include "kernels/cuda/append/plain_tokens.h"
#include "worker/cuda/nvtx_range.h"
#include "worker/cuda/status.h"
#include "worker/status_conversion.h"

namespace tributary::worker {
namespace {

// Of one piece that is staged.
constexpr size_t kStagedBytes = size_t{16} << 20;
// The bus takes milliseconds for what one command moves.
constexpr std::chrono::seconds kCopyPatience{30};

// Where the GPU reaches [data, data + bytes) of host memory; null where it does not.
std::byte* OnBus(std::byte* data, size_t bytes) {
  for (const std::byte* end : {data, data + bytes - 1}) {
    cudaPointerAttributes attributes;
    const cudaError_t error = cudaPointerGetAttributes(&attributes, end);
    if (error != cudaSuccess) cudaGetLastError();
    if (error != cudaSuccess || attributes.type != cudaMemoryTypeHost) return nullptr;
  }
  void* reached = nullptr;
  if (cudaHostGetDevicePointer(&reached, data, 0) == cudaSuccess) {
    return static_cast<std::byte*>(reached);
  }
  cudaGetLastError();  // it concerns nobody else
  return nullptr;
}

}  // namespace

RunCopier::RunCopier(CudaRank& rank, const CacheSpec& spec, std::byte* pages)
    : rank_(rank), layout_(spec), page_size_(spec.page_size) {
  for (size_t i = 0; i < spec.layers.size(); ++i) {
    const KvGeometry geometry = GeometryOf(spec, spec.layers[i]).kv;
    const size_t bytes = PageBytes(geometry, spec.page_size) * static_cast<size_t>(spec.num_pages);
    if (groups_.empty() || !(groups_.back().geometry == geometry)) {
      groups_.push_back({.first = i, .geometry = geometry, .pages = pages, .layer_bytes = bytes});
    }
    ++groups_.back().count;
    pages += bytes;
  }
}

absl::Status RunCopier::Read(std::span<const int64_t> first, int32_t slots, std::byte* out) {
  return Copy(Direction::kRead, first, slots, out);
}

absl::Status RunCopier::Write(std::span<const int64_t> first, int32_t slots, const std::byte* in) {
  return Copy(Direction::kWrite, first, slots, const_cast<std::byte*>(in));  // reads it only
}

absl::Status RunCopier::Copy(Direction direction, std::span<const int64_t> first, int32_t slots,
                             std::byte* data) {
  if (first.empty()) return absl::OkStatus();
  const NvtxRange range(direction == Direction::kRead ? "read runs" : "write runs", 0);
  TRIBUTARY_RETURN_IF_ERROR(rank_.Use());
  const auto deadline = std::chrono::steady_clock::now() + kCopyPatience;
  TRIBUTARY_RETURN_IF_ERROR(rank_.AwaitBeside(deadline));  // it may still read what is staged
  CudaRank::Workspace& memory = rank_.workspace();
  const size_t slot_bytes = first.size() * sizeof(int64_t);
  TRIBUTARY_RETURN_IF_ERROR(memory.staged_slots.Reserve(slot_bytes));
  TRIBUTARY_RETURN_IF_ERROR(memory.run_slots.Reserve(slot_bytes));
  std::memcpy(memory.staged_slots.data(), first.data(), slot_bytes);
  TRIBUTARY_RETURN_IF_ERROR(rank_.PartBeside(rank_.stream()));
  TRIBUTARY_RETURN_IF_ERROR(rank_.EnterBeside());
  TRIBUTARY_CUDA_OK(cudaMemcpyAsync(memory.run_slots.data(), memory.staged_slots.data(), slot_bytes,
                                    cudaMemcpyHostToDevice, rank_.beside()));
  const size_t bytes = run_bytes(slots);
  std::byte* const direct = OnBus(data, bytes * first.size());
  const size_t most = direct != nullptr ? first.size() : std::max<size_t>(1, kStagedBytes / bytes);
  if (direct == nullptr) {
    TRIBUTARY_RETURN_IF_ERROR(memory.staged_runs.Reserve(std::min(most, first.size()) * bytes));
  }
  for (size_t at = 0; at < first.size(); at += most) {
    const size_t runs = std::min(most, first.size() - at);
    std::byte* const plain = direct != nullptr ? direct : memory.staged_runs.data();
    if (direct == nullptr && direction == Direction::kWrite) {
      std::memcpy(plain, data + at * bytes, runs * bytes);
    }
    TRIBUTARY_RETURN_IF_ERROR(Launch(direction, memory.run_slots.as<int64_t>() + at,
                                     static_cast<int32_t>(runs), slots, plain));
    TRIBUTARY_RETURN_IF_ERROR(rank_.AwaitBeside(deadline));
    if (direct == nullptr && direction == Direction::kRead) {
      std::memcpy(data + at * bytes, plain, runs * bytes);
    }
  }
  return absl::OkStatus();
}

absl::Status RunCopier::Launch(Direction direction, const int64_t* slots_on_device, int32_t runs,
                               int32_t slots, std::byte* plain) const {
  for (const Group& group : groups_) {
    const cuda::PlainRunsArgs args{
        .cache = group.pages,
        .layer_bytes = group.layer_bytes,
        .geometry = group.geometry,
        .page_size = page_size_,
        .layers = group.count,
        .first = slots_on_device,
        .runs = runs,
        .slots = slots,
        .plain = plain + layout_.before[group.first] * static_cast<size_t>(slots),
        .run_bytes = run_bytes(slots)};
    TRIBUTARY_RETURN_IF_ERROR(ToAbsl(direction == Direction::kRead
                                         ? cuda::LaunchReadRuns(args, rank_.beside())
                                         : cuda::LaunchWriteRuns(args, rank_.beside())));
  }
  return absl::OkStatus();
}

}  // namespace tributary::worker
