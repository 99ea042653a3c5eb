// Descriptions of tensors for the copy engine (sm_90), made on the host.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace tributary::cuda {

// A tensor [rows, heads, head bytes], read in boxes of `box_bytes` (64 or 128) of one head by
// `box_rows` rows, which land in shared memory with a swizzle of that width. Rows beyond the
// tensor's read as zeros. Needs a driver that knows tensor maps; touches no device.
cudaError_t EncodeRows(const void* base, int64_t rows, int32_t heads, int32_t head_bytes,
                       int32_t box_bytes, int32_t box_rows, CUtensorMap* map);

}  // namespace tributary::cuda
