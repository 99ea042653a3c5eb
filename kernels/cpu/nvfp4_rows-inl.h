// Making rows of floats in scratch memory from a cache in NVFP4 (nvfp4_layout.h), block scales
// applied. Compiled once per target.
#if defined(TRIBUTARY_KERNELS_CPU_NVFP4_ROWS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef TRIBUTARY_KERNELS_CPU_NVFP4_ROWS_INL_H_
#undef TRIBUTARY_KERNELS_CPU_NVFP4_ROWS_INL_H_
#else
#define TRIBUTARY_KERNELS_CPU_NVFP4_ROWS_INL_H_
#endif

#include "hwy/highway.h"
#include "kernels/cpu/chunk_tiles.h"
#include "kernels/cpu/nvfp4_layout.h"
#include "kernels/cpu/page_layout.h"
#include "kernels/cpu/tiling.h"
#include "kernels/cpu/widen-inl.h"
#include "kernels/element.h"
#include "kernels/float8.h"

HWY_BEFORE_NAMESPACE();
namespace tributary::cpu {
namespace HWY_NAMESPACE {
namespace {
namespace hn = hwy::HWY_NAMESPACE;

// The numbers of e2m1 codes, in the four low bits of each lane.
template <class D, class V = hn::Vec<hn::RebindToUnsigned<D>>>
HWY_INLINE hn::Vec<D> WidenE2M1(D d, V codes) {
  const hn::RebindToUnsigned<D> du;
  const hn::RebindToSigned<D> di;
  const auto magnitude = hn::And(codes, hn::Set(du, 7u));
  const auto sign = hn::ShiftLeft<28>(hn::And(codes, hn::Set(du, 8u)));
  // From 1 on exponent and mantissa are where a float has them, and the exponent is 126 too small.
  const auto large = hn::Add(hn::ShiftLeft<22>(magnitude), hn::Set(du, 126u << 23));
  const auto small =
      hn::Mul(hn::ConvertTo(d, hn::BitCast(di, magnitude)), hn::Set(d, 0.5f));  // 0 or a half
  const auto value = hn::IfThenElse(hn::RebindMask(d, hn::Lt(magnitude, hn::Set(du, 2u))), small,
                                    hn::BitCast(d, large));
  return hn::BitCast(d, hn::Or(hn::BitCast(du, value), sign));
}

// Element kElement of the words of 16 columns; `second`: of the second word of each, not the first.
// Calls store(column of the first lane, numbers).
template <class Store>
HWY_INLINE void WidenWords(const std::byte* cell, int32_t element, bool second,
                           const Store& store) {
  const hn::ScalableTag<float> d;
  const hn::RebindToUnsigned<decltype(d)> du;
  const int shift = element * 4 + (second ? 16 : 0);
  for (int32_t i = 0; i < kCellColumns; i += HWY_LANES(float)) {
    const auto words = hn::LoadU(du, reinterpret_cast<const uint32_t*>(cell) + i);
    store(i, WidenE2M1(d, hn::ShiftRightSame(words, shift)));
  }
}

// To rows [key_dim, kTileKeys]. Asks memory for what lies ahead.
HWY_INLINE void UnpackNvfp4Keys(const CachedPlane& keys, int32_t key_dim,
                                float* HWY_RESTRICT rows) {
  const hn::ScalableTag<float> d;
  const int32_t tokens = keys.block_tokens();
  for (int32_t block = 0; block < keys.blocks(); ++block) {
    const std::byte* cell = keys.block(block);
    const auto* scales =
        reinterpret_cast<const uint8_t*>(cell + BlockScalesOffset(tokens, key_dim));
    for (int32_t pair = 0; pair < key_dim / 2; pair += kWordElements) {
      const uint8_t* of_channels = scales + BlockScaleOffset(tokens, 0, 2 * pair / kNvfp4Block);
      for (int32_t x = 0; x < tokens; x += kCellColumns, cell += kCellBytes) {
        AskFor(cell + keys.Ahead(block));
        for (int32_t i = 0; i < 2 * kWordElements; ++i) {
          float* row = rows + size_t(2 * pair + i) * kTileKeys + block * tokens + x;
          WidenWords(cell, i / 2, i % 2 != 0, [&](int32_t column, auto numbers) HWY_ATTR {
            const auto scale = WidenFloat8<DType::kFp8E4M3>(d, of_channels + x + column);
            hn::StoreU(hn::Mul(numbers, scale), d, row + column);
          });
        }
      }
    }
  }
}

// A plane of values that has not 64 channels, element by element.
inline void UnpackNarrowNvfp4Plane(const std::byte* plane, const uint8_t* scales, int32_t tokens,
                                   int32_t columns, int32_t value_dim, float* HWY_RESTRICT rows) {
  for (int32_t token = 0; token < tokens; ++token) {
    for (int32_t d = 0; d < columns; ++d) {
      const NibblePlace place = Nvfp4ValuePlace(columns, token, d);
      const float scale =
          FloatFromFloat8E4M3(scales[BlockScaleOffset(tokens, token, d / kNvfp4Block)]);
      rows[size_t(token) * value_dim + d] =
          LoadElement(DType::kNvfp4, plane + place.byte, place.half) * scale;
    }
  }
}

// A plane of 64 channels.
HWY_INLINE void UnpackNvfp4Plane(const std::byte* plane, ptrdiff_t ahead, const uint8_t* scales,
                                 int32_t tokens, int32_t value_dim, float* HWY_RESTRICT rows) {
  const hn::ScalableTag<float> d;
  for (int32_t token = 0; token < tokens; ++token) {
    const std::byte* cell = plane + size_t(token / 2) * kCellBytes;
    AskFor(cell + ahead);
    for (int32_t group = 0; group < kWordElements; ++group) {
      const auto scale =
          hn::Set(d, FloatFromFloat8E4M3(scales[BlockScaleOffset(tokens, token, group)]));
      float* row = rows + size_t(token) * value_dim + group * kCellColumns;
      WidenWords(cell, group, token % 2 != 0, [&](int32_t column, auto numbers) HWY_ATTR {
        hn::StoreU(hn::Mul(numbers, scale), d, row + column);
      });
    }
  }
}

// To rows [kTileKeys, value_dim]. Asks memory for what lies ahead.
HWY_INLINE void UnpackNvfp4Values(const CachedPlane& values, int32_t value_dim,
                                  float* HWY_RESTRICT rows) {
  const int32_t tokens = values.block_tokens();
  for (int32_t block = 0; block < values.blocks(); ++block) {
    const std::byte* const first = values.block(block);
    const auto* scales =
        reinterpret_cast<const uint8_t*>(first + BlockScalesOffset(tokens, value_dim));
    for (int32_t d = 0; d < value_dim; d += kValueColumns) {
      const int32_t columns = ValuePlaneColumns(value_dim, d);
      const std::byte* const plane = first + Nvfp4PlaneBytes(tokens, d);
      const uint8_t* const of_plane = scales + BlockScaleOffset(tokens, 0, d / kNvfp4Block);
      float* const to = rows + size_t(block) * tokens * value_dim + d;
      if (columns == kValueColumns) {
        UnpackNvfp4Plane(plane, values.Ahead(block), of_plane, tokens, value_dim, to);
      } else {
        UnpackNarrowNvfp4Plane(plane, of_plane, tokens, columns, value_dim, to);
      }
    }
  }
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace tributary::cpu
HWY_AFTER_NAMESPACE();

#endif  // include guard, toggled once a target
