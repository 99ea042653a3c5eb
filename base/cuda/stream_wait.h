// Waits of a stream for a word in memory (stream memory operations of the CUDA driver). The front
// end of the GPU waits and no kernel runs meanwhile. So processes that share a GPU by time slices,
// without MPS, do not use up their slices with waiting.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace tributary::cuda {

// Makes the stream wait until int32(*word - value) >= 0. The wait has no bound: the caller makes
// sure that the word is written in the end. The wait may be captured in a graph.
// cudaErrorNotSupported: the driver or the GPU has no such operations.
cudaError_t EnqueueWaitAtLeast(const uint32_t* word, uint32_t value, cudaStream_t stream);

}  // namespace tributary::cuda
