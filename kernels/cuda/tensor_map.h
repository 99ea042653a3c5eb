// Descriptions of tensors for the copy engine (sm_90), made on the host.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace tributary::cuda {

// A tensor [rows, heads, head_dim] of 16-bit elements, read in boxes of 64 elements of one head by
// `box_rows` rows, which land in shared memory with 128-byte swizzle. Rows beyond the tensor's read
// as zeros. Needs a driver that knows tensor maps; touches no device.
cudaError_t EncodeRows(const void* base, int64_t rows, int32_t heads, int32_t head_dim,
                       int32_t box_rows, CUtensorMap* map);

}  // namespace tributary::cuda
