// The session through which a loop of `tributary bench --session` makes its steps.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "service/cli/load.h"
#include "service/client/layer_times.h"
#include "service/client/session.h"

namespace tributary::cli {

// The tensors of every layer, in memory of the host that outlives the session. `kv` stands for keys
// and values.
struct LoadTensors {
  std::byte* q = nullptr;
  std::byte* kv = nullptr;
  std::byte* output = nullptr;
};

// Used by one thread.
class LoadSession {
 public:
  virtual ~LoadSession() = default;
  // Submits a step, and hands its layers over and takes their results. `layer_done` is told, layer
  // by layer, how many seconds that took. An error is why the session is over.
  virtual absl::Status Run(const client::SessionStep& step,
                           const std::function<void(double)>& layer_done) = 0;
  // Where the time of the layers went since the last call, where that is wanted and measured.
  virtual std::vector<client::LayerTimes> TakeTimes() { return {}; }
};

// Of the memory that the options ask for.
absl::StatusOr<std::unique_ptr<LoadSession>> OpenLoadSession(const LoadOptions& options,
                                                             const std::string& cache_id,
                                                             const LoadTensors& tensors);

// With a mailbox on a GPU: all layers of a step are one launch of the host's CUDA graph, so each is
// said to have taken its part of the step. UNIMPLEMENTED in a build without CUDA.
absl::StatusOr<std::unique_ptr<LoadSession>> OpenDeviceLoadSession(const LoadOptions& options,
                                                                   const std::string& cache_id,
                                                                   const LoadTensors& tensors);

}  // namespace tributary::cli
