// One rank's share of a cache in the memory of a GPU.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <span>
#include <vector>

#include "absl/container/flat_hash_set.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "worker/backend.h"
#include "worker/cuda/device_plan.h"
#include "worker/cuda/memory.h"
#include "worker/cuda/operations/operations.h"
#include "worker/cuda/rank.h"
#include "worker/cuda/run_copier.h"
#include "worker/cuda/step_size.h"

namespace tributary::worker {

// What a step's plan on the device depends on besides its plan on the host.
StepTypes StepTypesOf(const PlannedStep& step);

class CudaShard final : public Shard {
 public:
  // See Backend::CreateShard. `rank` outlives the shard.
  static absl::StatusOr<std::unique_ptr<Shard>> Create(CudaRank& rank, const CacheSpec& spec,
                                                       size_t available, PageFill fill);
  ~CudaShard() override;

  size_t bytes() const override { return bytes_; }
  absl::Status CopyPages(const std::vector<PageCopy>& copies) override;
  absl::Status Run(const PlannedStep& step, StepResults* results) override;
  size_t page_bytes() const override { return copier_->run_bytes(page_size_); }
  absl::Status ReadPages(std::span<const int32_t> pages, std::byte* out) override;
  absl::Status WritePages(std::span<const int32_t> pages, const std::byte* in) override;
  size_t run_bytes(int32_t slots) const override { return copier_->run_bytes(slots); }
  absl::Status ReadRuns(std::span<const int64_t> first, int32_t slots, std::byte* out) override {
    return copier_->Read(first, slots, out);
  }
  absl::Status WriteRuns(std::span<const int64_t> first, int32_t slots,
                         const std::byte* in) override {
    return copier_->Write(first, slots, in);
  }
  // CopyPages, in the order of a stream.
  absl::Status CopyPages(const std::vector<PageCopy>& copies, cudaStream_t stream);

  const CudaLayer& layer(int32_t index) const { return layers_[static_cast<size_t>(index)]; }

 private:
  // The differences between layers that plans depend on.
  struct PlanKey {
    RowMask mask;
    LayerGeometry geometry;
    friend bool operator==(const PlanKey&, const PlanKey&) = default;
  };
  static constexpr int kPlans = 4;
  // A plan on the device, and what it was made for. Layers of different kinds need plans of their
  // own, so there is one for each of a few kinds. Steps that follow each other use the same memory.
  struct PlanSlot {
    explicit PlanSlot(cudaStream_t stream) : block(stream) {}
    PlanKey key;
    int64_t used = 0;
    DevicePlan plan;
    DeviceMemory block;
  };
  CudaShard(CudaRank& rank, size_t bytes)
      : rank_(rank), bytes_(bytes), pages_(rank.stream()), constants_(rank.stream()) {
    for (int i = 0; i < kPlans; ++i) plans_.emplace_back(rank.stream());
  }

  absl::Status TakeMemory(const CacheSpec& spec, PageFill fill);
  std::vector<int64_t> FirstSlots(std::span<const int32_t> pages) const;
  // Whether ranks meet before the step, which they do before the first of its size in this epoch
  // (step_size.h). The answer is the same on all ranks. It is false without a group of GPUs.
  bool FirstOfItsSize(const PlannedStep& step);
  // Whether all ranks have taken the memory of a first step of a size, which may hold up peers.
  absl::Status Agree(const PlannedStep& step, const absl::Status& own, StepResults* results);
  // Takes memory for a step `room` times as large.
  absl::StatusOr<PlanSlot*> PlanOnDevice(const PlannedStep& step, size_t room);
  // `meet`: this rank waits for the others before it enqueues anything that they may wait for.
  absl::Status RunPlanned(const PlannedStep& step, const PlanSlot& slot, bool meet,
                          StepResults* results);
  // Puts the whole step into the stream, one call at a time.
  absl::Status Enqueue(const PlannedStep& step, CudaOperations& operations);
  // The same as one graph.
  absl::Status EnqueueGraph(const PlannedStep& step, std::vector<uint64_t> signature,
                            CudaOperations& operations);
  absl::StatusOr<cudaGraphExec_t> Capture(const PlannedStep& step, CudaOperations& operations);

  // Neighbouring layers whose pages have the same size.
  struct LayerRun {
    std::byte* pages = nullptr;
    size_t page_bytes = 0;
    int32_t layers = 0;
  };

  CudaRank& rank_;
  const size_t bytes_;
  size_t num_pages_ = 0;
  int32_t page_size_ = 0;
  std::vector<LayerRun> runs_;
  DeviceMemory pages_;
  DeviceMemory constants_;  // scales and sinks of all layers
  std::vector<CudaLayer> layers_;
  std::unique_ptr<RunCopier> copier_;

  std::deque<PlanSlot> plans_;  // [kPlans]
  int64_t clock_ = 0;
  bool graphs_work_ = true;
  absl::flat_hash_set<StepSize> sizes_;  // for which ranks have met in this epoch
  uint64_t sizes_epoch_ = 0;
};

}  // namespace tributary::worker
