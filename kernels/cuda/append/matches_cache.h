// Whether what an append would write is already in the cache, bit for bit. This is how a repeated
// append is recognised.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/cuda/append/append.h"
#include "kernels/status.h"

namespace tributary::cuda {

// Sets differs[entry_of_token[t]] to 1 for every token t of the append, its slot not kPadSlot, that
// is not there as LaunchAppend would have written it. Clears nothing. Device pointers.
Status LaunchMatchesCache(const AppendArgs& args, const int32_t* entry_of_token, uint32_t* differs,
                          cudaStream_t stream);

}  // namespace tributary::cuda
