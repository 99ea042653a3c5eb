#include "worker/cuda/replica.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status/status_macros.h"
#include "worker/cuda/status.h"

namespace tributary::worker {
namespace {

// Pinned at once: takes tens of milliseconds.
constexpr size_t kPinnedBytes = size_t{256} << 20;
// A page of many layers is copied by several threads.
constexpr size_t kCopiedBytes = size_t{256} << 10;

void CopyOut(const std::byte* kept, std::byte* travelling, size_t bytes) {
  std::memcpy(travelling, kept, bytes);
}

void CopyIn(std::byte* kept, const std::byte* travelling, size_t bytes) {
  std::memcpy(kept, travelling, bytes);
}

}  // namespace

absl::StatusOr<std::unique_ptr<Shard>> CudaReplica::Create(ReplicaHost& host, int gpu,
                                                           const CacheSpec& spec, size_t available,
                                                           PageFill fill) {
  const size_t bytes =
      PlainLayout(spec).RunBytes(spec.page_size) * static_cast<size_t>(spec.num_pages);
  TRIBUTARY_ASSIGN_OR_RETURN(std::shared_ptr<ShardMemory> memory,
                             ShardMemory::Create(bytes, available, fill));
  TRIBUTARY_ASSIGN_OR_RETURN(std::unique_ptr<HostMemoryLedger::Claim> claim,
                             host.ledger->Take(memory->bytes()));
  return std::unique_ptr<Shard>(
      new CudaReplica(host, gpu, spec, std::move(memory), std::move(claim)));
}

CudaReplica::CudaReplica(ReplicaHost& host, int gpu, const CacheSpec& spec,
                         std::shared_ptr<ShardMemory> memory,
                         std::unique_ptr<HostMemoryLedger::Claim> claim)
    : host_(host),
      gpu_(gpu),
      layout_(spec),
      page_size_(spec.page_size),
      memory_(std::move(memory)),
      taker_(std::make_unique<MemoryTaker>(memory_, std::move(claim), host_.memory_threads)) {}

CudaReplica::~CudaReplica() {
  if (pins_.empty() || cudaSetDevice(gpu_) != cudaSuccess) return;
  for (std::byte* pin : pins_) cudaHostUnregister(pin);
}

absl::StatusOr<bool> CudaReplica::TakeMemory(std::chrono::steady_clock::time_point until) {
  if (taker_ != nullptr) {
    TRIBUTARY_ASSIGN_OR_RETURN(const bool taken, taker_->Await(until));
    if (!taken) return false;
    taker_.reset();
  }
  TRIBUTARY_CUDA_OK(cudaSetDevice(gpu_));
  while (pinned_ < memory_->bytes()) {
    std::byte* const begin = memory_->data() + pinned_;
    const size_t bytes = std::min(kPinnedBytes, memory_->bytes() - pinned_);
    const cudaError_t error =
        cudaHostRegister(begin, bytes, cudaHostRegisterPortable | cudaHostRegisterMapped);
    if (error == cudaErrorMemoryAllocation) {
      cudaGetLastError();  // it concerns nobody else
      return absl::ResourceExhaustedError(
          absl::StrCat("the system does not pin ", memory_->bytes(), " bytes of host memory"));
    }
    TRIBUTARY_RETURN_IF_ERROR(FromCuda("cudaHostRegister", error));
    pins_.push_back(begin);
    void* reached = nullptr;
    TRIBUTARY_CUDA_OK(cudaHostGetDevicePointer(&reached, begin, 0));
    if (on_bus_ == nullptr) on_bus_ = static_cast<std::byte*>(reached);
    if (reached != on_bus_ + pinned_) {
      return absl::FailedPreconditionError(
          "this GPU does not reach host memory at the addresses that the host has");
    }
    pinned_ += bytes;
    if (pinned_ < memory_->bytes() && std::chrono::steady_clock::now() >= until) return false;
  }
  return true;
}

absl::Status CudaReplica::CopyPages(const std::vector<PageCopy>& copies) {
  for (const PageCopy& copy : copies) {
    if (copy.source == copy.destination) continue;
    std::memcpy(Page(copy.destination), Page(copy.source), page_bytes());
  }
  return absl::OkStatus();
}

template <typename Bytes, typename Copy>
void CudaReplica::ForEachPiece(std::span<const int32_t> pages, Bytes* travelling,
                               const Copy& copy) const {
  const size_t parts = (page_bytes() + kCopiedBytes - 1) / kCopiedBytes;
  host_.pool.Run(static_cast<int>(pages.size() * parts), [&](int i) {
    const size_t page = static_cast<size_t>(i) / parts;
    const size_t at = static_cast<size_t>(i) % parts * kCopiedBytes;
    copy(Page(pages[page]) + at, travelling + page * page_bytes() + at,
         std::min(kCopiedBytes, page_bytes() - at));
  });
}

template <typename Bytes, typename Copy>
void CudaReplica::ForEachPiece(std::span<const int64_t> first, int32_t slots, Bytes* travelling,
                               const Copy& copy) const {
  host_.pool.Run(static_cast<int>(first.size()), [&](int i) {
    const int64_t slot = first[static_cast<size_t>(i)];
    std::byte* const page = Page(static_cast<int32_t>(slot / page_size_));
    Bytes* const run = travelling + static_cast<size_t>(i) * run_bytes(slots);
    for (size_t layer = 0; layer + 1 < layout_.before.size(); ++layer) {
      const size_t token = layout_.TokenBytes(layer);
      copy(page + layout_.before[layer] * static_cast<size_t>(page_size_) +
               static_cast<size_t>(slot % page_size_) * token,
           run + layout_.before[layer] * static_cast<size_t>(slots),
           token * static_cast<size_t>(slots));
    }
  });
}

absl::Status CudaReplica::ReadPages(std::span<const int32_t> pages, std::byte* out) {
  ForEachPiece(pages, out, CopyOut);
  return absl::OkStatus();
}

absl::Status CudaReplica::WritePages(std::span<const int32_t> pages, const std::byte* in) {
  ForEachPiece(pages, in, CopyIn);
  return absl::OkStatus();
}

absl::Status CudaReplica::ReadRuns(std::span<const int64_t> first, int32_t slots, std::byte* out) {
  ForEachPiece(first, slots, out, CopyOut);
  return absl::OkStatus();
}

absl::Status CudaReplica::WriteRuns(std::span<const int64_t> first, int32_t slots,
                                    const std::byte* in) {
  ForEachPiece(first, slots, in, CopyIn);
  return absl::OkStatus();
}

absl::Status CudaReplica::Run(const PlannedStep&, StepResults*) {
  return absl::InternalError("a replica attends over nothing");
}

}  // namespace tributary::worker
