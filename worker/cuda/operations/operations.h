// The operations of a step on a GPU.
//
// Tensors come from and results go to host memory, by way of staging memory, or regions: memory of
// GPUs that other processes share, which nothing is staged for.
//
// Everything is put into the stream, and nothing is waited for before Finish, with one exception:
// several ranks without a group of GPUs exchange partials through host memory, over the group's
// host communicator.
#pragma once

#include <cuda_runtime.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "kernels/cuda/append/append.h"
#include "kernels/cuda/architectures.h"
#include "kernels/cuda/merge/merge.h"
#include "kernels/cuda/prefill/prefill.h"
#include "worker/cuda/device_exchange.h"
#include "worker/cuda/device_plan.h"
#include "worker/cuda/rank.h"
#include "worker/host_exchange.h"
#include "worker/step_operations.h"
#include "worker/step_run.h"

namespace tributary::worker {

// One layer of a shard in device memory.
struct CudaLayer {
  std::byte* pages = nullptr;      // kernels/cuda/layout/page_layout.h
  float soft_cap = 0.0f;           // 0 for none
  const float* k_scale = nullptr;  // [kv_heads]
  const float* v_scale = nullptr;  // [kv_heads]
  const float* sinks = nullptr;    // [q_heads], or null
};

// Where a step is computed: on which stream, in which memory, and where its tensors lie.
struct CudaPlace {
  cudaStream_t stream = nullptr;
  CudaRank::Workspace& memory;
  // Tensors that lie on the device already. Null: they come from the step's host memory or regions.
  const std::byte* q = nullptr;
  const std::byte* k = nullptr;
  const std::byte* v = nullptr;
  // Where rank 0's result goes, in f32. Null: it goes to the workspace.
  float* result_o = nullptr;
  float* result_lse = nullptr;
  // The append passes this gate; it is then the first launch of the layer.
  mailbox::Gate gate;
  // The launch behind the gate may begin before the layer has arrived (Gate::begun).
  bool begins_before_arrival = false;
  // Of the launch behind an append that passes the gate.
  mailbox::GatePassage passage() const {
    if (gate.begun == nullptr) return {};
    return {.counter = gate.counter, .layer = gate.layer};
  }
  // Where the layer is timed (Gate::stamps is not null): what is told when attention is over.
  mailbox::SharedGate timed_gate;
  // The group of GPUs in which partials are exchanged. Null: the rank's own.
  collective::DeviceGroup* group = nullptr;
};

class CudaOperations final : public StepOperations {
 public:
  // `plan` is the step's, and `plan_data` its copy on the device. All references outlive the
  // object.
  CudaOperations(const PlannedStep& step, const DevicePlan& plan, const std::byte* plan_data,
                 const CudaLayer& layer, CudaRank& rank, const CudaPlace& place,
                 StepResults* results);

  // Takes all the memory of the step, so that nothing after it allocates. It is called before
  // everything else. Memory whose size depends on the rank's own plan is taken for a plan `room`
  // times as large.
  absl::Status Reserve(size_t room);
  // Appends everything that launches and copies of the step depend on, apart from what memory
  // holds.
  void AppendSignature(std::vector<uint64_t>* values) const;

  // Whether the new tokens are converted for the prefill kernels, before anything reads them.
  bool narrows() const { return plan_.new_tokens() != nullptr && step_.k.dtype == DType::kF32; }

  // Puts copies of tensors that lie in regions, and are not read there, into the stream. This comes
  // first and is not part of a graph: where tensors lie in regions changes from step to step.
  absl::Status EnqueueRegionInputs();
  // Brings the result to the regions that it is wanted in, and to host memory where EnqueueResults
  // does not. This comes last and is not part of a graph either.
  absl::Status EnqueueOutputs();

  // Copies q, k and v from the step's host memory to staging memory.
  void StageInputs();
  // Whether the step may be captured in a graph as far as its exchange goes: EnqueueInputs, RunStep
  // and EnqueueResults, one after the other.
  bool MayBeCaptured() const;
  // Copies inputs from staging memory to the device, and results that the host is going to store
  // from the device to staging memory.
  absl::Status EnqueueInputs();
  absl::Status EnqueueResults();
  // What is put into the stream from now on comes behind the tokens that the replica keeps. Part of
  // EnqueueResults.
  absl::Status JoinKeptTokens();
  // Does what StageInputs and EnqueueInputs do, in pieces: one is staged while another is copied.
  // Pinned memory is copied from as it is.
  absl::Status StageAndEnqueueInputs();

  // Waits for the stream, and hands the results over.
  absl::Status Finish();

  Partial ReserveSlice(collective::HeadSlice heads) override;
  Partial ReservePass(const RowPass& pass) override;
  absl::Status AppendOrCompare() override;
  absl::Status AttendContext(const RowPass& pass, Partial out) override;
  absl::Status AttendNewTokens(collective::HeadSlice heads, Partial out) override;
  absl::Status AddBlock(const RowPass& pass, collective::HeadSlice heads, Partial partial) override;
  absl::Status MergeToRoot(const RowPass& pass, Partial partial) override;
  absl::StatusOr<Partial> MergeToSlices(const RowPass& pass, Partial partial) override;
  absl::Status AddToSlice(const RowPass& pass, collective::HeadSlice heads, Partial context,
                          Partial slice) override;
  absl::Status GatherToRoot(const RowPass& pass, collective::HeadSlice heads,
                            Partial slice) override;

 private:
  // A tensor of the step on its way to the device.
  struct Input {
    const TensorView* from;
    PinnedMemory* staged;
    DeviceMemory* device;
    size_t padded_bytes;        // what is reserved, and what a captured copy copies
    const std::byte* in_place;  // where kernels read it instead of in `device`, or null
    bool on_device;             // it lay there when the step began (CudaPlace)

    bool from_host() const { return padded_bytes > 0 && !on_device && !from->in_regions(); }
    const std::byte* data() const { return in_place != nullptr ? in_place : device->data(); }
  };
  Input InputOf(const TensorView& tensor, const std::byte* on_device, int32_t rows,
                int32_t padded_rows, PinnedMemory* staged, DeviceMemory* device) const;

  bool alone() const { return step_.comm.size() == 1; }
  bool launches_begin_early() const {
    return cuda::FeaturesOf(rank_.plan_options().device.compute_capability).early_launch;
  }
  bool is_draft() const { return step_.kind == StepKind::kDflash; }
  // A rank on its own computes the whole slice of a prefill, where the result is wanted.
  bool slice_is_result() const { return alone() && step_.kind == StepKind::kPrefill; }
  // Whether there are several ranks whose partials meet in host memory.
  bool exchanges_on_host() const { return !alone() && !device_exchange_.has_value(); }
  // Whether results are merged in this rank's device memory, and copied to the host at the end.
  bool result_on_device() const {
    return !exchanges_on_host() && step_.comm.rank() == 0 && step_.plan.query_rows > 0;
  }
  // Whether rows of the partial are exchanged as they come, while attention still runs. That is so
  // when one launch writes all of them, none is padding, and the launch comes behind an append,
  // which lets it begin only when everything before has ended.
  bool PartialArrives() const;
  // What AttentionArgs::late_strips is for the launch over the context.
  int32_t LateStrips() const;
  absl::Status ReserveArriving(size_t row_heads);
  // Whether this rank puts some of the result into regions, and into host memory.
  bool has_region_outputs() const { return has_region_outputs_; }
  bool has_host_outputs() const { return has_host_outputs_; }
  // Who converts the rows that are wanted in host memory to their format: the host where they are
  // few, or where the ranks' partials meet on the host, and the device elsewhere.
  bool host_stores() const { return has_host_outputs_ && (few_numbers_ || exchanges_on_host()); }
  bool device_stores() const { return has_host_outputs_ && !host_stores(); }
  const std::byte* q() const { return inputs_[0].data(); }
  const std::byte* k() const { return inputs_[1].data(); }
  const std::byte* v() const { return inputs_[2].data(); }
  collective::HeadSlice OwnHeads() const { return step_.own_heads(); }
  // Dimensions of an output in one head, and the number of query heads.
  size_t ValueDim() const { return static_cast<size_t>(geometry_.kv.value_dim); }
  size_t Heads() const { return static_cast<size_t>(geometry_.q_heads); }
  // Bytes of the queries of one row.
  size_t QueryRowBytes() const {
    return BytesOf(step_.q.dtype, int64_t{geometry_.q_heads} * geometry_.kv.key_dim);
  }
  // How many rows of all passes launches are made for.
  int32_t ResultRows() const;
  int32_t IndexOf(const RowPass& pass) const;
  template <typename T>
  const T* At(const Section& section) const {
    return reinterpret_cast<const T*>(plan_data_ + section.offset);
  }
  // The part of [rows, heads] that begins `row` rows further on.
  Partial Advance(Partial partial, int32_t row, size_t heads) const;
  Partial Result() const;
  // The result in staging memory from `row` on.
  Partial StagedRows(int32_t row) const {
    return Advance({memory_.staged_o.as<float>(), memory_.staged_lse.as<float>()}, row, Heads());
  }
  // The rows of a pass in the result. Null where results do not lie on this rank's device.
  Partial ResultOf(const RowPass& pass) const;

  absl::Status EnqueueContext(const RowPass& pass, Partial out) const;
  // Called ahead of an exchange: a timed layer's attention is over.
  absl::Status StampAttention() const;
  absl::Status EnqueueNarrowedTokens();
  cuda::MergeArgs ConversionOf(Partial rows, int32_t count) const;
  // Put rows [row, row + output.rows) of the result on their way to where they are wanted.
  absl::Status EnqueueToRegions(const StepOutput& output, int32_t row);
  absl::Status EnqueueToHost(const StepOutput& output, int32_t row);
  void BringFromStaging() const;
  // For one slot per token.
  cuda::AppendArgs AppendArgsFor(const Section& slots) const;
  // Puts the tokens that the replica keeps into the second stream, once in a step. What comes later
  // in the step's own is launched before, so that nothing waits for it.
  absl::Status EnqueueKeptTokens();
  bool keeps_tokens() const { return step_.replica != nullptr && plan_.kept_slots().count > 0; }
  // Whether the launch over the context of a draft attends to its block as well.
  bool ContextTakesBlock(const PassLaunch& launch) const;
  cuda::BlockPart BlockOf(const RowPass& pass) const;
  absl::Status LaunchFewRows(const RowPass& pass, const PassLaunch& launch, const std::byte* q,
                             Partial out) const;
  cuda::GatheredLaunch GatheredOf(const RowPass& pass, const SharedLaunch& shared) const;
  // The arguments that both launches of the prefill kernels take.
  cuda::PrefillArgs PrefillArgsFor(const PrefillLaunch& launch, const std::byte* q, int32_t rows,
                                   Partial out) const;
  absl::Status Merge(int32_t rows, int32_t heads, const float* sinks, Partial in, Partial other,
                     Partial out) const;
  const float* SinksFrom(int32_t head) const {
    return layer_.sinks == nullptr ? nullptr : layer_.sinks + head;
  }
  // Copies [rows, heads] of a partial to staging memory and waits for it.
  absl::StatusOr<Partial> BringToHost(Partial partial, int32_t rows, size_t heads);

  const PlannedStep& step_;
  const LayerGeometry geometry_;
  const DevicePlan& plan_;
  const std::byte* const plan_data_;
  const CudaLayer& layer_;
  CudaRank& rank_;
  const CudaPlace place_;
  CudaRank::Workspace& memory_;
  StepResults& results_;
  const cudaStream_t stream_;
  const std::array<Input, 3> inputs_;
  HostExchange host_exchange_;
  std::optional<DeviceExchange> device_exchange_;
  bool kept_tokens_wait_ = false;  // the streams were parted, and EnqueueKeptTokens is to come
  bool partial_arrives_ = false;
  bool has_region_outputs_ = false;
  bool has_host_outputs_ = false;
  bool few_numbers_ = false;  // whether outputs are small, on average
};

}  // namespace tributary::worker
