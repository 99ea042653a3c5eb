// f32 elements as bf16: what the prefill kernels multiply.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/status.h"

namespace tributary::cuda {

// Device pointers to `elements` elements, aligned to 16 and 8 bytes; a multiple of 4 of them.
// Rounds to nearest even, as kernels/half.h does.
Status LaunchNarrow(const float* from, uint16_t* to, int64_t elements, cudaStream_t stream);

}  // namespace tributary::cuda
