// Captures what a function puts into a stream as a CUDA graph.
#pragma once

#include <cuda_runtime.h>

#include <functional>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace tributary::worker {

// The graph of what `enqueue` puts into the stream. None of it runs. The caller destroys the graph.
// kDataLoss: the device failed. After any other error the stream is as it was before.
absl::StatusOr<cudaGraphExec_t> CaptureGraph(cudaStream_t stream,
                                             const std::function<absl::Status()>& enqueue);

}  // namespace tributary::worker
