// One GPU as the shards of a rank share it: the stream, memory for the step under way, graphs of
// steps, and the group of GPUs that it exchanges with.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "collective/communicator.h"
#include "collective/direct/retired_memory.h"
#include "collective/exchange/exchange.h"
#include "collective/group/device_group.h"
#include "collective/rendezvous/rendezvous.h"
#include "kernels/cuda/decode/attention.h"
#include "worker/cuda/device_plan.h"
#include "worker/cuda/ipc_opener.h"
#include "worker/cuda/memory.h"
#include "worker/cuda/step_graphs.h"
#include "worker/cuda_backend.h"
#include "worker/opened_regions.h"

namespace tributary::worker {

// A rank is used from one thread at a time, which need not always be the same one.
class CudaRank {
 public:
  // kFailedPrecondition when there is no such GPU or it is older than the backend asks for.
  static absl::StatusOr<std::unique_ptr<CudaRank>> Open(const CudaBackendOptions& options);
  ~CudaRank();
  CudaRank(const CudaRank&) = delete;
  CudaRank& operator=(const CudaRank&) = delete;

  // Makes the GPU the calling thread's. Every thread calls this before anything else.
  absl::Status Use() const;

  cudaStream_t stream() const { return stream_; }
  const DevicePlanOptions& plan_options() const { return plan_options_; }
  const CudaBackendOptions& options() const { return options_; }
  size_t FreeMemory() const;

  // Backend::Join and Leave.
  absl::StatusOr<std::unique_ptr<collective::Communicator>> Join(
      std::unique_ptr<collective::Communicator> comm, collective::Rendezvous& rendezvous,
      collective::Deadline deadline);
  void Leave();
  // The group of GPUs of this epoch; null where partials meet in host memory.
  collective::DeviceGroup* group() const { return group_.get(); }

  // Where buffers of groups that are over wait until no peer writes to them any more.
  const std::shared_ptr<collective::RetiredMemory>& retired() const { return retired_; }

  StepGraphs& graphs() { return graphs_; }

  // Memory that other processes share with this one.
  const OpenedRegions& regions() const { return regions_; }
  absl::Status OpenRegion(RegionId region, const SharedDeviceMemory& memory);
  // Closes it once nothing works on it: a step that failed, or that passed its deadline, is waited
  // for.
  absl::Status CloseRegion(RegionId region, collective::Deadline deadline);

  // A second stream, for what runs beside a step, and for pages that leave and come back. What it
  // is given after EnterBeside comes after what `stream` was given before PartBeside. JoinBeside is
  // the other way round. All of them may be captured into a graph.
  cudaStream_t beside() const { return beside_; }
  absl::Status PartBeside(cudaStream_t stream) const;
  absl::Status EnterBeside() const;
  absl::Status JoinBeside(cudaStream_t stream) const;
  // Waits until the second stream has done all that it was given.
  absl::Status AwaitBeside(collective::Deadline deadline) const;

  // Waits until the stream has done all that it was given. After kDeadlineExceeded it is still at
  // work, and what it works on is in use. Where there is a group of GPUs, every error breaks it,
  // the deadline included. The error is then that of CollectiveStatus, and the stream has as a rule
  // ended its work.
  absl::Status Await(collective::Deadline deadline) const;

  // A step that failed, or passed its deadline, may have left the device at work on what the next
  // one needs: BeginStep waits for it. Between the two the workspace belongs to one step.
  absl::Status BeginStep(collective::Deadline deadline);
  void EndStep() { unfinished_ = false; }

  // A partial whose words are kNotArrived (collective/direct/direct_layout.h) whenever nobody works
  // on it.
  struct ArrivingPartial {
    explicit ArrivingPartial(cudaStream_t stream) : o(stream), lse(stream) {}
    DeviceMemory o, lse;
    // A step began with it and has not ended well: what it holds is anybody's guess.
    bool dirty = true;
  };
  // Memory for the step under way, which grows to the largest step. What lies in host memory is
  // staging only. Memory of the device is taken and given back in the order of `stream`, and all
  // steps that use it run on that stream.
  struct Workspace {
    explicit Workspace(cudaStream_t stream);

    PinnedMemory staged_q, staged_k, staged_v;
    DeviceMemory q, k, v;
    PinnedMemory staged_plan;
    PinnedMemory staged_runs;  // plain tokens that come from or go to other memory (run_copier.h)
    PinnedMemory staged_slots;
    DeviceMemory pass_o, pass_lse;        // partials of a pass, all heads
    ArrivingPartial arriving;             // the partial of a pass that is exchanged as it comes
    DeviceMemory slice_o, slice_lse;      // a slice of the heads, all rows
    DeviceMemory context_o, context_lse;  // the slice of a pass that came back from the exchange
    DeviceMemory result_o, result_lse;    // rank 0, where the device merges
    DeviceMemory converted;               // results in the formats of their callers
    PinnedMemory staged_o, staged_lse;    // results, and partials that the host exchanges
    PinnedMemory staged_result_o, staged_result_lse;  // rank 0: what the host merged
    PinnedMemory staged_context_o, staged_context_lse;
    DeviceMemory split_o, split_lse;  // partials of the splits of a job
    // Of rows that attend to shared pages together.
    DeviceMemory gathered_q, gathered_o, gathered_lse;
    DeviceMemory arrivals;  // zero between launches
    DeviceMemory differs;   // [entries]: whether a repeat brings other tokens
    PinnedMemory staged_differs;
    DeviceMemory run_slots;
    DeviceMemory prefill;   // workspace of the prefill kernels
    DeviceMemory k16, v16;  // new tokens that came as f32, narrowed for the prefill kernels
    collective::ExchangeWorkspace exchange;
  };
  Workspace& workspace() { return *workspace_; }

 private:
  explicit CudaRank(const CudaBackendOptions& options) : options_(options), opener_(options.gpu) {}

  const CudaBackendOptions options_;
  DevicePlanOptions plan_options_;
  cudaStream_t stream_ = nullptr;
  cudaStream_t beside_ = nullptr;
  cudaEvent_t parted_ = nullptr;
  cudaEvent_t joined_ = nullptr;
  bool unfinished_ = false;
  std::unique_ptr<Workspace> workspace_;  // of steps that are not a session's
  StepGraphs graphs_;
  IpcOpener opener_;
  OpenedRegions regions_{opener_};
  const std::shared_ptr<collective::RetiredMemory> retired_ =
      std::make_shared<collective::RetiredMemory>();
  std::shared_ptr<collective::DeviceGroup> group_;
  std::string told_;  // what on_exchange was told last
};

}  // namespace tributary::worker
