#include "kernels/cuda/prefill/sm90/tensor_map.h"

namespace tributary::cuda {
namespace {

using Encode = decltype(&cuTensorMapEncodeTiled);

// The driver is asked for at run time: programs must load where there is none.
Encode FindEncode() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
  const cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function,
                                                             12000, cudaEnableDefault, &found);
  if (error != cudaSuccess || found != cudaDriverEntryPointSuccess) return nullptr;
  return reinterpret_cast<Encode>(function);
}

}  // namespace

cudaError_t EncodeRows(const void* base, int64_t rows, int32_t heads, int32_t head_bytes,
                       int32_t box_bytes, int32_t box_rows, CUtensorMap* map) {
  static const Encode encode = FindEncode();
  if (encode == nullptr) return cudaErrorNotSupported;
  const auto row_bytes = cuuint64_t(head_bytes);
  const cuuint64_t sizes[3] = {row_bytes, cuuint64_t(heads), cuuint64_t(rows)};
  const cuuint64_t strides[2] = {row_bytes, row_bytes * cuuint64_t(heads)};
  const cuuint32_t box[3] = {cuuint32_t(box_bytes), 1, cuuint32_t(box_rows)};
  const cuuint32_t steps[3] = {1, 1, 1};
  const CUresult result =
      encode(map, CU_TENSOR_MAP_DATA_TYPE_UINT8, 3, const_cast<void*>(base), sizes, strides, box,
             steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
             box_bytes == 64 ? CU_TENSOR_MAP_SWIZZLE_64B : CU_TENSOR_MAP_SWIZZLE_128B,
             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

}  // namespace tributary::cuda
