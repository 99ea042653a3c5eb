// Waits of a stream for a word in memory (stream memory operations of the CUDA driver). The front
// end of the GPU waits, and no kernel runs meanwhile, so that processes which take turns on a GPU
// (without MPS) need not wait for the end of each other's turns.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace tributary::cuda {

// What comes into the stream behind it begins when int32(*word - value) >= 0. It has no bound:
// whoever enqueues it sees to it that the word is written in the end. May be captured in a graph.
// cudaErrorNotSupported: the driver or the GPU has no such operations.
cudaError_t EnqueueWaitAtLeast(const uint32_t* word, uint32_t value, cudaStream_t stream);

}  // namespace tributary::cuda
