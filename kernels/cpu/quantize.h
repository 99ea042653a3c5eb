// Conversion of rows of elements, compiled for every instruction set and chosen at run time.
#pragma once

#include <cstddef>

#include "kernels/dtype.h"

namespace tributary::cpu {

// dst[i] = round(src[i] / scale), to nearest even. FP8 saturates; f16 and bf16 overflow to
// infinity. The same bits as StoreElement(to, dst, i, LoadElement(from, src, i) / scale).
void QuantizeRow(DType from, const void* src, float scale, DType to, void* dst, size_t n);

}  // namespace tributary::cpu
