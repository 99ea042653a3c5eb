// What is put into a stream, as a CUDA graph.
#pragma once

#include <cuda_runtime.h>

#include <functional>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace tributary::worker {

// What `enqueue` puts into the stream, which does not run. The caller destroys the graph.
// kDataLoss: the device failed; after any other error the stream is as before.
absl::StatusOr<cudaGraphExec_t> CaptureGraph(cudaStream_t stream,
                                             const std::function<absl::Status()>& enqueue);

}  // namespace tributary::worker
