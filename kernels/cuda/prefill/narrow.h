// Rounds fp32 elements to bf16, which the prefill kernels can multiply. worker/cuda calls it for
// the keys and values of new tokens that the host sends in fp32.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/status.h"

namespace tributary::cuda {

// Both are device pointers: `from` is aligned to 16 bytes, `to` to 8. `elements` is a multiple
// of 4. Rounds to nearest even, as kernels/half.h does.
Status LaunchNarrow(const float* from, uint16_t* to, int64_t elements, cudaStream_t stream);

}  // namespace tributary::cuda
