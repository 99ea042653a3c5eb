#include "worker/cuda/shard.h"

#include <algorithm>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "kernels/cuda/append/copy_page.h"
#include "kernels/kv_geometry.h"
#include "worker/agreement.h"
#include "worker/cuda/capture.h"
#include "worker/cuda/nvtx_range.h"
#include "worker/cuda/status.h"
#include "worker/status_conversion.h"

namespace tributary::worker {
namespace {

// For steps of one size (step_size.h).
constexpr size_t kRoom = 2;

const char* NameOf(StepKind kind) {
  switch (kind) {
    case StepKind::kAppend:
      return "step: append";
    case StepKind::kDecode:
      return "step: decode";
    case StepKind::kPrefill:
      return "step: prefill";
    case StepKind::kDflash:
      return "step: dflash";
  }
  return "step";
}

void AddPerHead(const std::vector<float>& scale, int32_t kv_heads, std::vector<float>* out) {
  for (int32_t h = 0; h < kv_heads; ++h) {
    out->push_back(scale[scale.size() == 1 ? 0 : static_cast<size_t>(h)]);
  }
}

}  // namespace

StepTypes StepTypesOf(const PlannedStep& step) {
  return {.q = step.q.dtype,
          .geometry = step.geometry(),
          .new_kv = step.k.dtype == DType::kF16 ? DType::kF16 : DType::kBf16,
          .heads = step.own_heads(),
          .draft = step.kind == StepKind::kDflash};
}

absl::StatusOr<std::unique_ptr<Shard>> CudaShard::Create(CudaRank& rank, const CacheSpec& spec,
                                                         size_t available, PageFill fill) {
  TRIBUTARY_ASSIGN_OR_RETURN(const size_t bytes, ShardBytes(spec));
  if (bytes > available) return ShardOutOfMemory(bytes, absl::StrCat(available, " are available"));
  TRIBUTARY_RETURN_IF_ERROR(rank.Use());
  std::unique_ptr<CudaShard> shard(new CudaShard(rank, bytes));
  const absl::Status taken = shard->TakeMemory(spec, fill);
  if (absl::IsResourceExhausted(taken)) return ShardOutOfMemory(bytes, taken.message());
  if (!taken.ok()) return taken;
  return shard;
}

absl::Status CudaShard::TakeMemory(const CacheSpec& spec, PageFill fill) {
  TRIBUTARY_RETURN_IF_ERROR(pages_.Reserve(bytes_));
  TRIBUTARY_CUDA_OK(
      cudaMemsetAsync(pages_.data(), fill == PageFill::kPoison ? 0xff : 0, bytes_, rank_.stream()));
  num_pages_ = static_cast<size_t>(spec.num_pages);
  page_size_ = spec.page_size;
  copier_ = std::make_unique<RunCopier>(rank_, spec, pages_.data());

  std::vector<float> constants;
  std::vector<size_t> begins;
  for (const LayerSpec& layer : spec.layers) {
    begins.push_back(constants.size());
    const int32_t kv_heads = GeometryOf(spec, layer).kv.kv_heads;
    AddPerHead(layer.k_scale, kv_heads, &constants);
    AddPerHead(layer.v_scale, kv_heads, &constants);
    constants.insert(constants.end(), layer.sinks.begin(), layer.sinks.end());
  }
  TRIBUTARY_RETURN_IF_ERROR(constants_.Reserve(constants.size() * sizeof(float)));
  TRIBUTARY_CUDA_OK(cudaMemcpyAsync(constants_.data(), constants.data(),
                                    constants.size() * sizeof(float), cudaMemcpyHostToDevice,
                                    rank_.stream()));
  TRIBUTARY_CUDA_OK(cudaStreamSynchronize(rank_.stream()));  // the source goes
  std::byte* pages = pages_.data();
  for (size_t i = 0; i < spec.layers.size(); ++i) {
    const LayerSpec& layer = spec.layers[i];
    const float* begin = constants_.as<float>() + begins[i];
    const KvGeometry geometry = GeometryOf(spec, layer).kv;
    layers_.push_back({.pages = pages,
                       .soft_cap = SoftCap(spec, layer),
                       .k_scale = begin,
                       .v_scale = begin + geometry.kv_heads,
                       .sinks = layer.sinks.empty() ? nullptr : begin + 2 * geometry.kv_heads});
    const size_t page_bytes = PageBytes(geometry, spec.page_size);
    if (runs_.empty() || runs_.back().page_bytes != page_bytes)
      runs_.push_back({pages, page_bytes});
    ++runs_.back().layers;
    pages += page_bytes * num_pages_;
  }
  return absl::OkStatus();
}

CudaShard::~CudaShard() {
  if (!rank_.Use().ok()) return;
  cudaStreamSynchronize(rank_.stream());
  // Those of other shards come back soon; this one's must not be found by another at its place.
  rank_.graphs().Forget();
  // All of it goes back to the GPU, and nobody's kernels are waited for.
  pages_.Free();
  constants_.Free();
  plans_.clear();
  cudaStreamSynchronize(rank_.stream());
}

absl::Status CudaShard::CopyPages(const std::vector<PageCopy>& copies) {
  return CopyPages(copies, rank_.stream());
}

absl::Status CudaShard::CopyPages(const std::vector<PageCopy>& copies, cudaStream_t stream) {
  if (copies.empty()) return absl::OkStatus();
  TRIBUTARY_RETURN_IF_ERROR(rank_.Use());
  for (const PageCopy& copy : copies) {
    for (const LayerRun& run : runs_) {
      const cuda::CopyPageArgs args{.base = run.pages,
                                    .page_bytes = run.page_bytes,
                                    .layer_bytes = run.page_bytes * num_pages_,
                                    .layers = run.layers,
                                    .source = copy.source,
                                    .destination = copy.destination};
      TRIBUTARY_RETURN_IF_ERROR(ToAbsl(cuda::LaunchCopyPage(args, stream)));
    }
  }
  return absl::OkStatus();
}

std::vector<int64_t> CudaShard::FirstSlots(std::span<const int32_t> pages) const {
  std::vector<int64_t> first;
  first.reserve(pages.size());
  for (const int32_t page : pages) first.push_back(int64_t{page} * page_size_);
  return first;
}

absl::Status CudaShard::ReadPages(std::span<const int32_t> pages, std::byte* out) {
  return copier_->Read(FirstSlots(pages), page_size_, out);
}

absl::Status CudaShard::WritePages(std::span<const int32_t> pages, const std::byte* in) {
  return copier_->Write(FirstSlots(pages), page_size_, in);
}

absl::Status CudaShard::Run(const PlannedStep& step, StepResults* results) {
  const NvtxRange range(NameOf(step.kind), step.layer_index);
  TRIBUTARY_RETURN_IF_ERROR(rank_.Use());
  TRIBUTARY_RETURN_IF_ERROR(rank_.BeginStep(step.deadline));
  const bool meet = FirstOfItsSize(step);
  const absl::StatusOr<PlanSlot*> slot = PlanOnDevice(step, meet ? kRoom : 1);
  if (!slot.ok()) return meet ? Agree(step, slot.status(), results) : slot.status();
  TRIBUTARY_RETURN_IF_ERROR(RunPlanned(step, **slot, meet, results));
  rank_.EndStep();
  return absl::OkStatus();
}

absl::Status CudaShard::Agree(const PlannedStep& step, const absl::Status& own,
                              StepResults* results) {
  if (!own.ok() && !absl::IsResourceExhausted(own)) return own;
  absl::Status agreed = AgreeOnMemory(step.comm, own, step.deadline, &results->refused_by_all);
  if (!results->refused_by_all) return agreed;
  // Nothing was launched. The next step of this size finds out again whether there is memory.
  sizes_.erase(StepSizeOf(step));
  rank_.EndStep();
  return agreed;
}

bool CudaShard::FirstOfItsSize(const PlannedStep& step) {
  const collective::DeviceGroup* group = rank_.group();
  if (group == nullptr) return false;
  if (sizes_epoch_ != group->epoch()) sizes_.clear();
  sizes_epoch_ = group->epoch();
  return sizes_.insert(StepSizeOf(step)).second;
}

absl::StatusOr<CudaShard::PlanSlot*> CudaShard::PlanOnDevice(const PlannedStep& step, size_t room) {
  const PlanKey key{MaskOf(step.layer(), step.kind), step.geometry()};
  PlanSlot* slot = &plans_[0];
  for (PlanSlot& candidate : plans_) {
    if (candidate.used > 0 && candidate.key == key) {
      slot = &candidate;
      break;
    }
    if (candidate.used < slot->used) slot = &candidate;
  }
  slot->used = ++clock_;
  const StepTypes types = StepTypesOf(step);
  if (slot->plan.IsOf(step.plan, types)) return slot;
  const NvtxRange range("plan", step.layer_index);
  slot->key = key;
  slot->plan.Make(step.spec, step.plan, types, rank_.plan_options());
  absl::Cleanup forget = [slot] { slot->plan.Clear(); };
  PinnedMemory& staged = rank_.workspace().staged_plan;
  TRIBUTARY_RETURN_IF_ERROR(staged.Reserve(slot->plan.bytes() * room));
  TRIBUTARY_RETURN_IF_ERROR(slot->block.Reserve(slot->plan.bytes() * room));
  slot->plan.Write(staged.data());
  TRIBUTARY_CUDA_OK(cudaMemcpyAsync(slot->block.data(), staged.data(), slot->plan.bytes(),
                                    cudaMemcpyHostToDevice, rank_.stream()));
  std::move(forget).Cancel();
  return slot;
}

absl::Status CudaShard::RunPlanned(const PlannedStep& step, const PlanSlot& slot, bool meet,
                                   StepResults* results) {
  CudaOperations operations(step, slot.plan, slot.block.data(),
                            layers_[static_cast<size_t>(step.layer_index)], rank_,
                            {.stream = rank_.stream(), .memory = rank_.workspace()}, results);
  absl::Status reserved = operations.Reserve(meet ? kRoom : 1);
  if (meet) reserved = Agree(step, reserved, results);
  TRIBUTARY_RETURN_IF_ERROR(reserved);
  TRIBUTARY_RETURN_IF_ERROR(operations.EnqueueRegionInputs());
  const bool may_be_graph = rank_.options().graphs && graphs_work_ &&
                            step.kind != StepKind::kPrefill && slot.plan.repeatable() &&
                            !operations.narrows() && operations.MayBeCaptured() &&
                            std::max(step.plan.query_rows, step.plan.new_tokens) <= kMostGraphRows;
  if (may_be_graph) {
    std::vector<uint64_t> signature = slot.plan.Signature();
    signature.push_back(static_cast<uint64_t>(step.layer_index));
    operations.AppendSignature(&signature);
    TRIBUTARY_RETURN_IF_ERROR(EnqueueGraph(step, std::move(signature), operations));
  } else {
    TRIBUTARY_RETURN_IF_ERROR(Enqueue(step, operations));
  }
  TRIBUTARY_RETURN_IF_ERROR(operations.EnqueueOutputs());
  results->times.exchange_in_attend = rank_.group() != nullptr;
  const TimedSection timed(results->times.attend);
  return operations.Finish();
}

absl::Status CudaShard::Enqueue(const PlannedStep& step, CudaOperations& operations) {
  TRIBUTARY_RETURN_IF_ERROR(operations.StageAndEnqueueInputs());
  TRIBUTARY_RETURN_IF_ERROR(RunStep(step, operations));
  return operations.EnqueueResults();
}

absl::Status CudaShard::EnqueueGraph(const PlannedStep& step, std::vector<uint64_t> signature,
                                     CudaOperations& operations) {
  cudaGraphExec_t* graph = rank_.graphs().Seen(std::move(signature));
  if (graph == nullptr) return Enqueue(step, operations);
  if (*graph == nullptr) {
    const absl::StatusOr<cudaGraphExec_t> captured = Capture(step, operations);
    if (absl::IsDataLoss(captured.status())) return captured.status();
    if (captured.ok()) *graph = *captured;
    if (rank_.group() != nullptr) {
      // A group that broke says nothing about graphs, unless it broke of being captured.
      const tributary::Status health = rank_.group()->Health();
      if (health.code() == StatusCode::kInternal) graphs_work_ = false;
      if (!health.ok()) return CollectiveStatus(health);
    }
    if (!captured.ok()) {
      // Nothing ran. The same launches do without a graph, only more slowly.
      graphs_work_ = false;
      return Enqueue(step, operations);
    }
  }
  operations.StageInputs();
  const NvtxRange range("launch graph", step.layer_index);
  TRIBUTARY_CUDA_OK(cudaGraphLaunch(*graph, rank_.stream()));
  return absl::OkStatus();
}

absl::StatusOr<cudaGraphExec_t> CudaShard::Capture(const PlannedStep& step,
                                                   CudaOperations& operations) {
  const NvtxRange range("capture graph", step.layer_index);
  return CaptureGraph(rank_.stream(), [&] {
    absl::Status captured = operations.EnqueueInputs();
    if (captured.ok()) captured = RunStep(step, operations);
    if (captured.ok()) captured = operations.EnqueueResults();
    return captured;
  });
}

}  // namespace tributary::worker
