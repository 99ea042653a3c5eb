// How many clusters of blocks a device runs at once.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace tributary::cuda {

// For clusters of 2, 4 and 8 blocks that each take a multiprocessor. Leaves the current device as
// it was.
cudaError_t QueryClusters(int device, int32_t (&clusters)[3]);

}  // namespace tributary::cuda
