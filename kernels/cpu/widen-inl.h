// Widening a row of elements to float; compiled once per target.
#if defined(TRIBUTARY_KERNELS_CPU_WIDEN_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef TRIBUTARY_KERNELS_CPU_WIDEN_INL_H_
#undef TRIBUTARY_KERNELS_CPU_WIDEN_INL_H_
#else
#define TRIBUTARY_KERNELS_CPU_WIDEN_INL_H_
#endif

#include <cstring>

#include "hwy/highway.h"
#include "kernels/element.h"

HWY_BEFORE_NAMESPACE();
namespace tributary::cpu {
namespace HWY_NAMESPACE {
namespace {
namespace hn = hwy::HWY_NAMESPACE;

// Lanes of FP8 as floats. The bits are moved into a float whose exponent is too small by a constant
// and multiplied by that power of two, which is exact for normals and subnormals alike.
template <DType kType, class D, class V = hn::Vec<D>>
HWY_INLINE V WidenFloat8(D d, const uint8_t* src) {
  const hn::RebindToUnsigned<D> du;
  const hn::Rebind<uint8_t, D> d8;
  constexpr bool kE4M3 = kType == DType::kFp8E4M3;
  const auto bits = hn::PromoteTo(du, hn::LoadU(d8, src));
  const auto magnitude = hn::And(bits, hn::Set(du, 0x7f));
  const auto sign = hn::ShiftLeft<24>(hn::Xor(bits, magnitude));
  const auto shifted = hn::ShiftLeft < kE4M3 ? 20 : 21 > (magnitude);
  auto value =
      hn::BitCast(du, hn::Mul(hn::BitCast(d, shifted), hn::Set(d, kE4M3 ? 0x1p120f : 0x1p112f)));
  const auto special = hn::Gt(magnitude, hn::Set(du, kE4M3 ? 0x7e : 0x7b));
  auto special_value = hn::Set(du, 0x7fc00000);
  if constexpr (!kE4M3) {  // which has infinities
    special_value = hn::IfThenElse(hn::Gt(magnitude, hn::Set(du, 0x7c)), special_value,
                                   hn::Set(du, 0x7f800000));
  }
  value = hn::IfThenElse(special, special_value, value);
  return hn::BitCast(d, hn::Or(value, sign));
}

template <class D, class V = hn::Vec<D>>
HWY_INLINE V WidenBf16(D d, const uint16_t* src) {
  const hn::RebindToUnsigned<D> du;
  const hn::Rebind<uint16_t, D> d16;
  return hn::BitCast(d, hn::ShiftLeft<16>(hn::PromoteTo(du, hn::LoadU(d16, src))));
}

template <class D, class V = hn::Vec<D>>
HWY_INLINE V WidenF16(D d, const uint16_t* src) {
#if HWY_CAP_GE256
  const hn::Rebind<hwy::float16_t, D> d16;
  return hn::PromoteTo(d, hn::LoadU(d16, reinterpret_cast<const hwy::float16_t*>(src)));
#else  // Highway 1.0 has no NaN and no infinity where it emulates this
  const hn::RebindToUnsigned<D> du;
  const hn::Rebind<uint16_t, D> d16;
  const auto bits = hn::PromoteTo(du, hn::LoadU(d16, src));
  const auto magnitude = hn::And(bits, hn::Set(du, 0x7fff));
  const auto sign = hn::ShiftLeft<16>(hn::Xor(bits, magnitude));
  const auto shifted = hn::ShiftLeft<13>(magnitude);
  auto value = hn::BitCast(du, hn::Mul(hn::BitCast(d, shifted), hn::Set(d, 0x1p112f)));
  value = hn::IfThenElse(hn::Gt(magnitude, hn::Set(du, 0x7bff)),
                         hn::Or(shifted, hn::Set(du, 0x7f800000)), value);
  value = hn::IfThenElse(hn::Gt(magnitude, hn::Set(du, 0x7c00)),
                         hn::Or(value, hn::Set(du, 0x400000)), value);
  return hn::BitCast(d, hn::Or(value, sign));
#endif
}

// Lanes of any type as floats.
template <DType kType, class D, class V = hn::Vec<D>>
HWY_INLINE V Widen(D d, const std::byte* src) {
  if constexpr (kType == DType::kF32) {
    return hn::LoadU(d, reinterpret_cast<const float*>(src));
  } else if constexpr (kType == DType::kBf16) {
    return WidenBf16(d, reinterpret_cast<const uint16_t*>(src));
  } else if constexpr (kType == DType::kF16) {
    return WidenF16(d, reinterpret_cast<const uint16_t*>(src));
  } else {
    return WidenFloat8<kType>(d, reinterpret_cast<const uint8_t*>(src));
  }
}

template <DType kType>
HWY_INLINE void WidenRow(const std::byte* src, float* HWY_RESTRICT dst, size_t n) {
  const hn::ScalableTag<float> d;
  constexpr size_t kLanes = HWY_LANES(float);
  const size_t whole = n / kLanes * kLanes;
  for (size_t i = 0; i < whole; i += kLanes) {
    hn::StoreU(Widen<kType>(d, src + BytesOf(kType, i)), d, dst + i);
  }
  for (size_t i = whole; i < n; ++i) dst[i] = LoadElement(kType, src, i);
}

// dst[i] = float(src[i]) for i in [0, n).
HWY_INLINE void WidenRow(DType type, const std::byte* src, float* HWY_RESTRICT dst, size_t n) {
  switch (type) {
    case DType::kF32:
      std::memcpy(dst, src, n * sizeof(float));
      return;
    case DType::kBf16:
      return WidenRow<DType::kBf16>(src, dst, n);
    case DType::kF16:
      return WidenRow<DType::kF16>(src, dst, n);
    case DType::kFp8E4M3:
      return WidenRow<DType::kFp8E4M3>(src, dst, n);
    case DType::kFp8E5M2:
      return WidenRow<DType::kFp8E5M2>(src, dst, n);
    case DType::kNvfp4:
      for (size_t i = 0; i < n; ++i) dst[i] = LoadElement(type, src, i);
      return;
  }
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace tributary::cpu
HWY_AFTER_NAMESPACE();

#endif  // include guard, toggled once a target
