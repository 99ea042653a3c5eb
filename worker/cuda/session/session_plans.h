// The plans of a session's steps on their way to the GPU.
//
// Steps are enqueued while earlier ones wait, so what a copy reads in host memory must stay as it
// is until the step has ended: each step in flight has staging memory of its own. What kernels read
// on the GPU is overwritten in the order of the stream.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "worker/cuda/device_plan.h"
#include "worker/cuda/memory.h"
#include "worker/step_operations.h"

namespace tributary::worker {

class SessionPlans {
 public:
  // A plan and where it will lie on the GPU. Layers with the same mask and geometry share one.
  struct Slot {
    explicit Slot(cudaStream_t stream) : data(stream) {}
    DevicePlan plan;
    DeviceMemory data;
  };

  // `steps`: how many may be in flight.
  SessionPlans(cudaStream_t stream, int32_t steps);

  // Takes staging memory for the usual step, so that few steps have to.
  absl::Status Reserve();
  // A step begins; the one `steps` before it has ended.
  void BeginStep();
  // The plan of a layer of the step, made if no layer before had the same.
  absl::StatusOr<const Slot*> PlanOf(const PlannedStep& layer, const DevicePlanOptions& options);
  // Puts copies of all plans of the step into the stream.
  absl::Status Enqueue();

 private:
  // What a slot was made from in this step.
  struct Made {
    const StepPlan* plan = nullptr;
    StepTypes types;
  };

  const cudaStream_t stream_;
  std::deque<Slot> slots_;  // those of the step come first
  std::vector<Made> made_;  // [plans of the step]
  std::deque<PinnedMemory> staging_;
  size_t step_ = 0;
};

}  // namespace tributary::worker
