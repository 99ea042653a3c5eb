// How many clusters of blocks a device runs at once.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace tributary::cuda {

// Of the current device, for clusters of 2, 4 and 8 blocks that each take a multiprocessor.
cudaError_t QueryClusters(int32_t (&clusters)[3]);

}  // namespace tributary::cuda
