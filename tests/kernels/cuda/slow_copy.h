// A launch that lets the next one begin and takes its time, as a slow append would.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>

namespace tributary::cuda {

// Copies device memory after so many microseconds.
cudaError_t LaunchSlowCopy(const std::byte* from, std::byte* to, size_t bytes, int microseconds,
                           cudaStream_t stream);

}  // namespace tributary::cuda
