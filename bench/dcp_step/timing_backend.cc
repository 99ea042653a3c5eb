#include "bench/dcp_step/timing_backend.h"

#include <cuda_runtime.h>

#include <deque>
#include <utility>

#include "base/status/status_macros.h"
#include "worker/cuda/rank.h"
#include "worker/cuda/rank_backend.h"
#include "worker/cuda/shard.h"
#include "worker/cuda/status.h"
#include "worker/status_conversion.h"

namespace tributary::worker {
namespace {

constexpr int kWarmReplays = 2;
// Launches that a graph has at least, so that its own beginning and end do not count.
constexpr size_t kLeastLayersOfAGraph = 20;

// All layers of a cache, ready to be enqueued for one step.
class Layers {
 public:
  // context_only: the bare kernel over the context, in launches that do not overlap, as they do not
  // when something has to come of each.
  Layers(const PlannedStep& step, const CudaShard& shard, CudaRank& rank, bool context_only)
      : step_(step), shard_(shard), rank_(rank), context_only_(context_only) {}

  absl::Status Prepare() {
    DevicePlanOptions options = rank_.plan_options();
    options.kernels.begins_early = !context_only_;
    plan_.Make(step_.spec, step_.plan, StepTypesOf(step_), options);
    TRIBUTARY_RETURN_IF_ERROR(staged_.Reserve(plan_.bytes()));
    TRIBUTARY_RETURN_IF_ERROR(block_.Reserve(plan_.bytes()));
    plan_.Write(staged_.data());
    TRIBUTARY_CUDA_OK(cudaMemcpyAsync(block_.data(), staged_.data(), plan_.bytes(),
                                      cudaMemcpyHostToDevice, rank_.stream()));
    for (int32_t i = 0; i < static_cast<int32_t>(step_.spec.layers.size()); ++i) {
      steps_.push_back(step_);
      steps_.back().layer_index = i;
      steps_.back().outputs = {};  // results stay where they are
      const CudaPlace place{.stream = rank_.stream(), .memory = rank_.workspace()};
      operations_.push_back(std::make_unique<CudaOperations>(
          steps_.back(), plan_, block_.data(), shard_.layer(i), rank_, place, &results_));
      TRIBUTARY_RETURN_IF_ERROR(operations_.back()->Reserve(2));
    }
    return operations_.front()->StageAndEnqueueInputs();
  }

  size_t size() const { return steps_.size(); }
  bool MayBeCaptured() const { return operations_.front()->MayBeCaptured(); }

  absl::Status Enqueue() {
    for (size_t i = 0; i < steps_.size(); ++i) {
      TRIBUTARY_RETURN_IF_ERROR(context_only_ ? Context(i) : RunStep(steps_[i], *operations_[i]));
      if (!context_only_) TRIBUTARY_RETURN_IF_ERROR(operations_[i]->JoinKeptTokens());
    }
    return absl::OkStatus();
  }

 private:
  // Where a partial would be exchanged as it comes, it is left as no step expects it: but the next
  // one sees that none has ended well since.
  absl::Status Context(size_t layer) {
    for (const RowPass& pass : step_.plan.passes) {
      TRIBUTARY_RETURN_IF_ERROR(
          operations_[layer]->AttendContext(pass, operations_[layer]->ReservePass(pass)));
    }
    return absl::OkStatus();
  }

  const PlannedStep& step_;
  const CudaShard& shard_;
  CudaRank& rank_;
  const bool context_only_;
  DevicePlan plan_;
  PinnedMemory staged_;
  DeviceMemory block_;
  StepResults results_;
  std::deque<PlannedStep> steps_;
  std::vector<std::unique_ptr<CudaOperations>> operations_;
};

class TimingShard final : public Shard {
 public:
  TimingShard(std::unique_ptr<Shard> shard, CudaRank& rank, TimingSlot slot)
      : inner_(std::move(shard)), rank_(rank), slot_(std::move(slot)) {}

  size_t bytes() const override { return inner_->bytes(); }
  absl::Status CopyPages(const std::vector<PageCopy>& copies) override {
    return inner_->CopyPages(copies);
  }
  absl::Status Run(const PlannedStep& step, StepResults* results) override {
    return *slot_ == nullptr ? inner_->Run(step, results) : Time(step, *slot_);
  }

 private:
  absl::Status Time(const PlannedStep& step, LayerTiming* timing) const {
    TRIBUTARY_RETURN_IF_ERROR(rank_.Use());
    Layers layers(step, static_cast<const CudaShard&>(*inner_), rank_, timing->context_only);
    TRIBUTARY_RETURN_IF_ERROR(layers.Prepare());
    TRIBUTARY_RETURN_IF_ERROR(CollectiveStatus(step.comm.Barrier(step.deadline)));
    timing->captured = layers.MayBeCaptured();
    if (!timing->captured) return rank_.Await(step.deadline);
    // What is new takes its memory outside of graphs.
    TRIBUTARY_RETURN_IF_ERROR(layers.Enqueue());
    TRIBUTARY_RETURN_IF_ERROR(rank_.Await(step.deadline));

    const size_t rounds = (kLeastLayersOfAGraph + layers.size() - 1) / layers.size();
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t executable = nullptr;
    TRIBUTARY_CUDA_OK(cudaStreamBeginCapture(rank_.stream(), cudaStreamCaptureModeThreadLocal));
    for (size_t round = 0; round < rounds; ++round) {
      TRIBUTARY_RETURN_IF_ERROR(layers.Enqueue());
    }
    TRIBUTARY_CUDA_OK(cudaStreamEndCapture(rank_.stream(), &graph));
    TRIBUTARY_CUDA_OK(cudaGraphInstantiate(&executable, graph, 0));
    TRIBUTARY_RETURN_IF_ERROR(
        Replay(step, executable, static_cast<double>(rounds * layers.size()), timing));
    TRIBUTARY_CUDA_OK(cudaGraphExecDestroy(executable));
    TRIBUTARY_CUDA_OK(cudaGraphDestroy(graph));
    return absl::OkStatus();
  }

  absl::Status Replay(const PlannedStep& step, cudaGraphExec_t graph, double layers,
                      LayerTiming* timing) const {
    cudaEvent_t begin = nullptr;
    cudaEvent_t end = nullptr;
    TRIBUTARY_CUDA_OK(cudaEventCreate(&begin));
    TRIBUTARY_CUDA_OK(cudaEventCreate(&end));
    for (int replay = -kWarmReplays; replay < timing->replays; ++replay) {
      TRIBUTARY_RETURN_IF_ERROR(CollectiveStatus(step.comm.Barrier(step.deadline)));
      TRIBUTARY_CUDA_OK(cudaEventRecord(begin, rank_.stream()));
      TRIBUTARY_CUDA_OK(cudaGraphLaunch(graph, rank_.stream()));
      TRIBUTARY_CUDA_OK(cudaEventRecord(end, rank_.stream()));
      TRIBUTARY_RETURN_IF_ERROR(rank_.Await(step.deadline));
      float milliseconds = 0;
      TRIBUTARY_CUDA_OK(cudaEventElapsedTime(&milliseconds, begin, end));
      if (replay >= 0) timing->us.push_back(1e3 * static_cast<double>(milliseconds) / layers);
    }
    TRIBUTARY_CUDA_OK(cudaEventDestroy(begin));
    TRIBUTARY_CUDA_OK(cudaEventDestroy(end));
    return absl::OkStatus();
  }

  const std::unique_ptr<Shard> inner_;
  CudaRank& rank_;
  const TimingSlot slot_;
};

class TimingBackend final : public CudaRankBackend {
 public:
  TimingBackend(std::unique_ptr<CudaRank> rank, TimingSlot slot)
      : CudaRankBackend(std::move(rank)), slot_(std::move(slot)) {}

  absl::StatusOr<std::unique_ptr<Shard>> CreateShard(const CacheSpec& spec, size_t available,
                                                     PageFill fill) override {
    TRIBUTARY_ASSIGN_OR_RETURN(std::unique_ptr<Shard> shard,
                               CudaRankBackend::CreateShard(spec, available, fill));
    return std::make_unique<TimingShard>(std::move(shard), rank(), slot_);
  }

 private:
  const TimingSlot slot_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<Backend>> CreateTimingBackend(const CudaBackendOptions& options,
                                                             TimingSlot slot) {
  TRIBUTARY_ASSIGN_OR_RETURN(std::unique_ptr<CudaRank> rank, CudaRank::Open(options));
  return std::make_unique<TimingBackend>(std::move(rank), std::move(slot));
}

}  // namespace tributary::worker
