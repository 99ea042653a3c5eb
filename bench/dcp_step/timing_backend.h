// A GPU backend whose steps can be timed layer after layer instead of being run: what a step takes
// the GPUs, without the host's part.
#pragma once

#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "worker/cuda_backend.h"

namespace tributary::worker {

// What the next steps of a rank are timed for, and what came of it. All layers of the cache follow
// each other in one CUDA graph, so that each finds a cold L2 where together they exceed it.
struct LayerTiming {
  bool context_only = false;  // the bare attention kernel over the context instead of the step
  int replays = 11;

  bool captured = false;   // false: the rank's way to exchange is not one for graphs
  std::vector<double> us;  // of each replay, a layer
};

// Where a rank's shards find the timing to fill; null: steps run as usual.
using TimingSlot = std::shared_ptr<LayerTiming*>;

// As CreateCudaBackend. Timed steps bring no results.
absl::StatusOr<std::unique_ptr<Backend>> CreateTimingBackend(const CudaBackendOptions& options,
                                                             TimingSlot slot);

}  // namespace tributary::worker
