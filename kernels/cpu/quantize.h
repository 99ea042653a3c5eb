// Conversion of rows of elements, compiled for every instruction set and chosen at run time.
#pragma once

#include <cstddef>

#include "kernels/dtype.h"

namespace tributary::cpu {

// dst[i] = round(src[i] / scale), to nearest even. FP8 saturates; f16 and bf16 overflow to
// infinity. The same bits as StoreElement(to, dst, i, LoadElement(from, src, i) / scale).
// Not to NVFP4.
void QuantizeRow(DType from, const void* src, float scale, DType to, void* dst, size_t n);

// n numbers, whole blocks of 16, as kernels/nvfp4.h says: n / 2 bytes of elements, the first of two
// in the low bits, and n / 16 block scales.
void QuantizeNvfp4(const float* src, float tensor_scale, void* elements, void* scales, size_t n);

}  // namespace tributary::cpu
