// Making rows of floats in scratch memory: from planes of the cache (page_layout.h), and from dense
// rows of new tokens. Compiled once per target.
#if defined(TRIBUTARY_KERNELS_CPU_FLOAT_ROWS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef TRIBUTARY_KERNELS_CPU_FLOAT_ROWS_INL_H_
#undef TRIBUTARY_KERNELS_CPU_FLOAT_ROWS_INL_H_
#else
#define TRIBUTARY_KERNELS_CPU_FLOAT_ROWS_INL_H_
#endif

#include <algorithm>
#include <cstring>

#include "hwy/highway.h"
#include "kernels/cpu/chunk_tiles.h"
#include "kernels/cpu/page_layout.h"
#include "kernels/cpu/tiling.h"
#include "kernels/cpu/widen-inl.h"

HWY_BEFORE_NAMESPACE();
namespace tributary::cpu {
namespace HWY_NAMESPACE {
namespace {
namespace hn = hwy::HWY_NAMESPACE;

// The first halves of a cell's 16 pairs to `first`, the second halves to `second`.
template <DType kType>
HWY_INLINE void SplitPairs(const std::byte* pairs, float* HWY_RESTRICT first,
                           float* HWY_RESTRICT second) {
#if HWY_TARGET == HWY_SCALAR
  for (int32_t i = 0; i < kCellColumns; ++i) {
    first[i] = LoadElement(kType, pairs, 2 * i);
    second[i] = LoadElement(kType, pairs, 2 * i + 1);
  }
#else
  const hn::ScalableTag<float> d;
  constexpr int32_t kLanes = HWY_LANES(float);
  for (int32_t i = 0; i < kCellColumns; i += kLanes) {
    const std::byte* at = pairs + BytesOf(kType, 2 * i);
    const auto low = Widen<kType>(d, at);
    const auto high = Widen<kType>(d, at + BytesOf(kType, kLanes));
    hn::StoreU(hn::ConcatEven(d, high, low), d, first + i);
    hn::StoreU(hn::ConcatOdd(d, high, low), d, second + i);
  }
#endif
}

// One cell to the rows of its pairs: the halves of pair i go to rows 2 * i and 2 * i + 1.
template <DType kType>
HWY_INLINE void UnpackCell(const std::byte* cell, float* HWY_RESTRICT rows, size_t stride) {
  constexpr int32_t kPairs = CellPairs(BytesOf(kType, 1));
  if constexpr (kPairs == 1) {
    SplitPairs<kType>(cell, rows, rows + stride);
  } else {
    constexpr size_t kQuadBytes = BytesOf(kType, 4 * 2);  // four columns of a pair
    for (int32_t i = 0; i < kPairs; ++i) {
      HWY_ALIGN std::byte pairs[kCellBytes / kPairs];
      for (int32_t quad = 0; quad < kCellColumns / 4; ++quad) {
        std::memcpy(pairs + quad * kQuadBytes, cell + (quad * kPairs + i) * kQuadBytes, kQuadBytes);
      }
      SplitPairs<kType>(pairs, rows + 2 * i * stride, rows + (2 * i + 1) * stride);
    }
  }
}

// Asks memory for what lies `ahead` bytes on.
template <DType kType>
void UnpackPlane(const std::byte* plane, ptrdiff_t ahead, int32_t columns, int32_t pairs,
                 float* rows, size_t stride) {
  for (int32_t pair = 0; pair < pairs; pair += CellPairs(BytesOf(kType, 1))) {
    for (int32_t x = 0; x < columns; x += kCellColumns, plane += kCellBytes) {
      AskFor(plane + ahead);
      UnpackCell<kType>(plane, rows + 2 * pair * stride + x, stride);
    }
  }
}

HWY_INLINE void UnpackPlane(DType type, const std::byte* plane, ptrdiff_t ahead, int32_t columns,
                            int32_t pairs, float* rows, size_t stride) {
  switch (type) {
    case DType::kBf16:
      return UnpackPlane<DType::kBf16>(plane, ahead, columns, pairs, rows, stride);
    case DType::kF16:
      return UnpackPlane<DType::kF16>(plane, ahead, columns, pairs, rows, stride);
    case DType::kFp8E4M3:
      return UnpackPlane<DType::kFp8E4M3>(plane, ahead, columns, pairs, rows, stride);
    case DType::kFp8E5M2:
      return UnpackPlane<DType::kFp8E5M2>(plane, ahead, columns, pairs, rows, stride);
    case DType::kF32:
    case DType::kNvfp4:
      return;  // not in pairs
  }
}

// To rows [key_dim, kTileKeys].
HWY_INLINE void UnpackKeys(DType type, const CachedPlane& keys, int32_t key_dim, float* rows) {
  const int32_t tokens = keys.block_tokens();
  for (int32_t block = 0; block < keys.blocks(); ++block) {
    UnpackPlane(type, keys.block(block), keys.Ahead(block), tokens, key_dim / 2,
                rows + block * tokens, kTileKeys);
  }
}

// To rows [kTileKeys, value_dim].
HWY_INLINE void UnpackValues(DType type, const CachedPlane& values, int32_t value_dim,
                             float* rows) {
  const int32_t tokens = values.block_tokens();
  const size_t plane_bytes = BytesOf(type, int64_t{tokens} * kValueColumns);
  for (int32_t block = 0; block < values.blocks(); ++block) {
    for (int32_t d = 0; d < value_dim; d += kValueColumns) {
      UnpackPlane(type, values.block(block) + d / kValueColumns * plane_bytes, values.Ahead(block),
                  ValuePlaneColumns(value_dim, d), tokens / 2,
                  rows + size_t(block) * tokens * value_dim + d, value_dim);
    }
  }
}

// From dense rows, a token every row_bytes from slot 0 on, to rows [key_dim, kTileKeys]. Slots
// that are not live are not read and stand as zeros. `row` holds key_dim floats.
HWY_INLINE void TransposeDenseKeys(DType type, const std::byte* source, size_t row_bytes,
                                   const Tile& tile, int32_t key_dim, float* HWY_RESTRICT row,
                                   float* HWY_RESTRICT rows) {
  for (int64_t j = 0; j < kTileKeys; ++j) {
    if ((tile.live >> j & 1) != 0) {
      WidenRow(type, source + (tile.begin + j) * row_bytes, row, key_dim);
    } else {
      std::fill_n(row, key_dim, 0.0f);
    }
    for (int32_t i = 0; i < key_dim; ++i) rows[i * kTileKeys + j] = row[i];
  }
}

// From dense rows to rows [kTileKeys, value_dim]; of live slots only.
HWY_INLINE void WidenDenseValues(DType type, const std::byte* source, size_t row_bytes,
                                 const Tile& tile, int32_t value_dim, float* rows) {
  for (int64_t j = 0; j < kTileKeys; ++j) {
    if ((tile.live >> j & 1) == 0) continue;
    WidenRow(type, source + (tile.begin + j) * row_bytes, rows + j * value_dim, value_dim);
  }
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace tributary::cpu
HWY_AFTER_NAMESPACE();

#endif  // include guard, toggled once a target
