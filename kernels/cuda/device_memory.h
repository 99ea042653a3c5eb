// What processes tell each other about memory of a GPU.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <string>

#include "kernels/status.h"

namespace tributary::cuda {

// "GPU-" and 8-4-4-4-12 hexadecimal digits, as nvidia-smi -L prints it: the same in every process,
// which ordinals are not.
std::string UuidOf(const cudaDeviceProp& device);

struct Allocation {
  std::byte* base = nullptr;
  size_t bytes = 0;
};
// The whole allocation of the current process, or mapped into it, that `data` lies in.
Status FindAllocation(const void* data, Allocation* allocation);

}  // namespace tributary::cuda
