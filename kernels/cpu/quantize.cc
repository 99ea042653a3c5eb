#include "kernels/cpu/quantize.h"

#include <algorithm>
#include <cstring>
#include <limits>

#include "kernels/element.h"
#include "kernels/nvfp4.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/quantize.cc"
#include "hwy/foreach_target.h"
// After foreach_target:
#include "hwy/highway.h"
#include "kernels/cpu/widen-inl.h"

HWY_BEFORE_NAMESPACE();
namespace tributary::cpu {
namespace HWY_NAMESPACE {
namespace {
namespace hn = hwy::HWY_NAMESPACE;

// Vector forms of Float8FromFloat (of Float4E2M1Format too), Bf16FromFloat and F16FromFloat, lane
// for lane the same steps.
template <class Format, class D, class V = hn::Vec<D>>
HWY_INLINE hn::Vec<hn::RebindToUnsigned<D>> EncodeFloat8(D d, V x) {
  const hn::RebindToUnsigned<D> du;
  constexpr int kDropped = 23 - Format::kMantissaBits;
  constexpr uint32_t kSmallestNormal = uint32_t(127 + 1 - Format::kBias) << 23;
  constexpr uint32_t kSubnormalMagic = uint32_t(127 + 1 - Format::kBias + kDropped) << 23;
  constexpr uint32_t kRebias = uint32_t(127 - Format::kBias) << Format::kMantissaBits;
  const auto bits = hn::BitCast(du, x);
  const auto magnitude = hn::And(bits, hn::Set(du, 0x7fffffffu));
  const auto sign = hn::And(hn::ShiftRight<24>(bits), hn::Set(du, 0x80u));
  const auto odd = hn::And(hn::ShiftRight<kDropped>(magnitude), hn::Set(du, 1u));
  const auto half = hn::Set(du, (1u << (kDropped - 1)) - 1u);
  const auto normal = hn::Sub(hn::ShiftRight<kDropped>(hn::Add(hn::Add(magnitude, half), odd)),
                              hn::Set(du, kRebias));
  const auto magic = hn::Set(du, kSubnormalMagic);
  const auto subnormal =
      hn::Sub(hn::BitCast(du, hn::Add(hn::BitCast(d, magnitude), hn::BitCast(d, magic))), magic);
  auto code = hn::IfThenElse(hn::Lt(magnitude, hn::Set(du, kSmallestNormal)), subnormal, normal);
  const auto too_large =
      hn::Ge(hn::BitCast(d, magnitude), hn::Set(d, Format::kMax));  // false for NaN
  code =
      hn::IfThenElse(hn::RebindMask(du, too_large), hn::Set(du, uint32_t{Format::kMaxBits}), code);
  code = hn::IfThenElse(hn::Gt(magnitude, hn::Set(du, 0x7f800000u)),
                        hn::Set(du, uint32_t{Format::kNan}), code);
  return hn::Or(code, sign);
}

template <class D, class V = hn::Vec<D>>
HWY_INLINE hn::Vec<hn::RebindToUnsigned<D>> EncodeBf16(D d, V x) {
  const hn::RebindToUnsigned<D> du;
  const auto bits = hn::BitCast(du, x);
  const auto top = hn::ShiftRight<16>(bits);
  const auto odd = hn::And(top, hn::Set(du, 1u));
  const auto rounded = hn::ShiftRight<16>(hn::Add(hn::Add(bits, hn::Set(du, 0x7fffu)), odd));
  const auto is_nan = hn::Gt(hn::And(bits, hn::Set(du, 0x7fffffffu)), hn::Set(du, 0x7f800000u));
  return hn::IfThenElse(is_nan, hn::Or(top, hn::Set(du, 0x40u)), rounded);
}

template <class D, class V = hn::Vec<D>>
HWY_INLINE hn::Vec<hn::RebindToUnsigned<D>> EncodeF16(D d, V x) {
  const hn::RebindToUnsigned<D> du;
  const auto bits = hn::BitCast(du, x);
  const auto sign = hn::And(hn::ShiftRight<16>(bits), hn::Set(du, 0x8000u));
  const auto magnitude = hn::And(bits, hn::Set(du, 0x7fffffffu));
  const auto odd = hn::And(hn::ShiftRight<13>(magnitude), hn::Set(du, 1u));
  const auto rounded = hn::Add(hn::Add(magnitude, hn::Set(du, 0xfffu)), odd);
  auto code = hn::ShiftRight<13>(hn::Sub(rounded, hn::Set(du, 0x38000000u)));
  const auto half = hn::Set(du, 0x3f000000u);
  const auto subnormal =
      hn::Sub(hn::BitCast(du, hn::Add(hn::BitCast(d, magnitude), hn::BitCast(d, half))), half);
  code = hn::IfThenElse(hn::Lt(magnitude, hn::Set(du, 0x38800000u)), subnormal, code);
  code = hn::IfThenElse(hn::Gt(magnitude, hn::Set(du, 0x477fefffu)), hn::Set(du, 0x7c00u), code);
  const auto payload = hn::And(hn::ShiftRight<13>(magnitude), hn::Set(du, 0x3ffu));
  code = hn::IfThenElse(hn::Gt(magnitude, hn::Set(du, 0x7f800000u)),
                        hn::Or(payload, hn::Set(du, 0x7e00u)), code);
  return hn::Or(code, sign);
}

// n is a multiple of the lanes.
HWY_INLINE void EncodeRow(DType to, const float* src, std::byte* dst, size_t n) {
  const hn::ScalableTag<float> d;
  const hn::Rebind<uint8_t, decltype(d)> d8;
  const hn::Rebind<uint16_t, decltype(d)> d16;
  auto* bytes = reinterpret_cast<uint8_t*>(dst);
  auto* halves = reinterpret_cast<uint16_t*>(dst);
  const auto narrow8 = [&](auto code) HWY_ATTR {
    return hn::DemoteTo(d8, hn::BitCast(hn::RebindToSigned<decltype(d)>(), code));
  };
  const auto narrow16 = [&](auto code) HWY_ATTR {
    return hn::DemoteTo(d16, hn::BitCast(hn::RebindToSigned<decltype(d)>(), code));
  };
  for (size_t i = 0; i < n; i += hn::Lanes(d)) {
    const auto x = hn::Load(d, src + i);
    switch (to) {
      case DType::kF32:
        hn::StoreU(x, d, reinterpret_cast<float*>(dst) + i);
        break;
      case DType::kBf16:
        hn::StoreU(narrow16(EncodeBf16(d, x)), d16, halves + i);
        break;
      case DType::kF16:
        hn::StoreU(narrow16(EncodeF16(d, x)), d16, halves + i);
        break;
      case DType::kFp8E4M3:
        hn::StoreU(narrow8(EncodeFloat8<Float8E4M3Format>(d, x)), d8, bytes + i);
        break;
      case DType::kFp8E5M2:
        hn::StoreU(narrow8(EncodeFloat8<Float8E5M2Format>(d, x)), d8, bytes + i);
        break;
      case DType::kNvfp4:
        break;  // QuantizeNvfp4
    }
  }
}

// Blocks of NVFP4 whose scales are made at once.
constexpr size_t kScaledBlocks = 16;

// What is the larger of two numbers' magnitudes, as MagnitudeBits, of a block.
HWY_INLINE uint32_t LargestOfBlock(const float* src) {
  const hn::CappedTag<float, kNvfp4Block> d;
  const hn::RebindToUnsigned<decltype(d)> du;
  auto largest = hn::Zero(du);
  for (size_t i = 0; i < kNvfp4Block; i += hn::Lanes(d)) {
    const auto bits = hn::BitCast(du, hn::LoadU(d, src + i));
    largest = hn::Max(largest, hn::And(bits, hn::Set(du, 0x7fffffffu)));
  }
  return hn::GetLane(hn::MaxOfLanes(du, largest));
}

// As Nvfp4BlockScale and Nvfp4Divisor, of kScaledBlocks blocks.
HWY_INLINE void ScaleBlocks(const uint32_t* largest, float tensor_scale, uint8_t* scales,
                            float* divisors) {
  const hn::CappedTag<float, kScaledBlocks> d;
  const hn::RebindToUnsigned<decltype(d)> du;
  const hn::Rebind<uint8_t, decltype(d)> d8;
  const auto six_scales = hn::Set(d, 6.0f * tensor_scale);
  for (size_t i = 0; i < kScaledBlocks; i += hn::Lanes(d)) {
    const auto largest_of = hn::BitCast(d, hn::Load(du, largest + i));
    const auto wide = hn::And(EncodeFloat8<Float8E4M3Format>(d, hn::Div(largest_of, six_scales)),
                              hn::Set(du, 0x7fu));
    hn::StoreU(hn::DemoteTo(d8, hn::BitCast(hn::RebindToSigned<decltype(d)>(), wide)), d8,
               scales + i);
    const auto divisor =
        hn::Mul(WidenFloat8<DType::kFp8E4M3>(d, scales + i), hn::Set(d, tensor_scale));
    const auto none = hn::Set(d, std::numeric_limits<float>::infinity());
    hn::Store(hn::IfThenElse(hn::RebindMask(d, hn::Eq(wide, hn::Zero(du))), none, divisor), d,
              divisors + i);
  }
}

// The e2m1 codes of a block as Nvfp4Element, two to a byte.
HWY_INLINE void EncodeNvfp4Block(const float* src, float divisor, uint8_t* elements) {
  const hn::CappedTag<float, kNvfp4Block> d;
  const hn::RebindToUnsigned<decltype(d)> du;
  const hn::Rebind<uint8_t, decltype(d)> d8;
  HWY_ALIGN uint8_t codes[kNvfp4Block];
  for (size_t i = 0; i < kNvfp4Block; i += hn::Lanes(d)) {
    const auto x = hn::LoadU(d, src + i);
    const auto magnitude = EncodeFloat8<Float4E2M1Format>(d, hn::Div(x, hn::Set(d, divisor)));
    const auto sign = hn::And(hn::ShiftRight<28>(hn::BitCast(du, x)), hn::Set(du, 0x8u));
    const auto code = hn::Or(hn::And(magnitude, hn::Set(du, 0x7u)), sign);
    hn::StoreU(hn::DemoteTo(d8, hn::BitCast(hn::RebindToSigned<decltype(d)>(), code)), d8,
               codes + i);
  }
  uint64_t low, high;  // the codes, the first in the lowest bits
  std::memcpy(&low, codes, sizeof(low));
  std::memcpy(&high, codes + sizeof(low), sizeof(high));
  // Every second code joins the one before it; then bytes, pairs and fours of them move together.
  const auto join = [](uint64_t x) {
    x = (x | x >> 4) & 0x00ff00ff00ff00ffu;
    x = (x | x >> 8) & 0x0000ffff0000ffffu;
    return static_cast<uint32_t>(x | x >> 16);
  };
  const uint64_t packed = join(low) | uint64_t{join(high)} << 32;
  std::memcpy(elements, &packed, sizeof(packed));
}

}  // namespace

void QuantizeRowImpl(DType from, const std::byte* src, float scale, DType to, std::byte* dst,
                     size_t n) {
  const hn::ScalableTag<float> d;
  constexpr size_t kBlock = 64;  // a multiple of every target's lanes
  HWY_ALIGN float wide[kBlock];
  size_t done = 0;
  for (; done + kBlock <= n; done += kBlock) {
    WidenRow(from, src + BytesOf(from, done), wide, kBlock);
    if (scale != 1.0f) {
      for (size_t i = 0; i < kBlock; i += hn::Lanes(d)) {
        hn::Store(hn::Div(hn::Load(d, wide + i), hn::Set(d, scale)), d, wide + i);
      }
    }
    EncodeRow(to, wide, dst + BytesOf(to, done), kBlock);
  }
  for (; done < n; ++done) StoreElement(to, dst, done, LoadElement(from, src, done) / scale);
}

void QuantizeNvfp4Impl(const float* src, float tensor_scale, uint8_t* elements, uint8_t* scales,
                       size_t n) {
  HWY_ALIGN uint32_t largest[kScaledBlocks] = {};
  HWY_ALIGN float divisors[kScaledBlocks];
  uint8_t scales_of[kScaledBlocks];
  const size_t blocks = n / kNvfp4Block;
  for (size_t first = 0; first < blocks; first += kScaledBlocks) {
    const size_t count = std::min(kScaledBlocks, blocks - first);
    for (size_t i = 0; i < count; ++i) {
      largest[i] = LargestOfBlock(src + (first + i) * kNvfp4Block);
    }
    ScaleBlocks(largest, tensor_scale, scales_of, divisors);
    std::copy_n(scales_of, count, scales + first);
    for (size_t i = 0; i < count; ++i) {
      EncodeNvfp4Block(src + (first + i) * kNvfp4Block, divisors[i],
                       elements + (first + i) * kNvfp4Block / 2);
    }
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace tributary::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace tributary::cpu {

HWY_EXPORT(QuantizeRowImpl);

void QuantizeRow(DType from, const void* src, float scale, DType to, void* dst, size_t n) {
  HWY_DYNAMIC_DISPATCH(QuantizeRowImpl)
  (from, static_cast<const std::byte*>(src), scale, to, static_cast<std::byte*>(dst), n);
}

HWY_EXPORT(QuantizeNvfp4Impl);

void QuantizeNvfp4(const float* src, float tensor_scale, void* elements, void* scales, size_t n) {
  HWY_DYNAMIC_DISPATCH(QuantizeNvfp4Impl)
  (src, tensor_scale, static_cast<uint8_t*>(elements), static_cast<uint8_t*>(scales), n);
}

}  // namespace tributary::cpu
#endif  // HWY_ONCE
