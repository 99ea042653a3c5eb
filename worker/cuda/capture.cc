#include "worker/cuda/capture.h"

#include "absl/cleanup/cleanup.h"
#include "base/status/status_macros.h"
#include "worker/cuda/nvtx_range.h"
#include "worker/cuda/status.h"

namespace tributary::worker {

absl::StatusOr<cudaGraphExec_t> CaptureGraph(cudaStream_t stream,
                                             const std::function<absl::Status()>& enqueue) {
  TRIBUTARY_CUDA_OK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  const absl::Status captured = enqueue();
  cudaGraph_t graph = nullptr;
  const absl::Status ended = FromCuda("cudaStreamEndCapture", cudaStreamEndCapture(stream, &graph));
  const absl::Cleanup destroy = [graph] {
    if (graph != nullptr) cudaGraphDestroy(graph);
  };
  TRIBUTARY_RETURN_IF_ERROR(captured);
  TRIBUTARY_RETURN_IF_ERROR(ended);
  cudaGraphExec_t executable = nullptr;
  TRIBUTARY_CUDA_OK(cudaGraphInstantiate(&executable, graph, 0));
  return executable;
}

}  // namespace tributary::worker
