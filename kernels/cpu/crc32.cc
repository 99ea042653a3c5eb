#include "kernels/cpu/crc32.h"

#include <array>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/crc32.cc"
#include "hwy/foreach_target.h"
// After foreach_target:
#include "hwy/highway.h"

// A CRC is the remainder of a polynomial over GF(2) by another one, the lowest bit of a byte being
// the highest power. Sixteen bytes that lie n bits ahead of others may be added to these once they
// are multiplied by x^n, modulo the divisor: so a long message is folded into its last sixteen
// bytes, whose remainder is that of the whole.

#ifndef TRIBUTARY_KERNELS_CPU_CRC32_TABLES
#define TRIBUTARY_KERNELS_CPU_CRC32_TABLES
namespace tributary::cpu {

inline constexpr uint32_t kCrcDivisor = 0xedb88320u;

constexpr uint32_t CrcTimesX(uint32_t power) { return power >> 1 ^ (power & 1 ? kCrcDivisor : 0); }

// x^n modulo the divisor. A product of two reflected numbers comes out one bit too low.
constexpr uint64_t CrcFactor(int n) {
  uint32_t power = 0x80000000u;
  for (int i = 0; i < n; ++i) power = CrcTimesX(power);
  return uint64_t{power} << 1;
}

inline constexpr std::array<uint32_t, 256> kCrcOfByte = [] {
  std::array<uint32_t, 256> table{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    table[byte] = byte;
    for (int bit = 0; bit < 8; ++bit) table[byte] = CrcTimesX(table[byte]);
  }
  return table;
}();

// The remainder of bytes behind those whose remainder is `state`.
inline uint32_t CrcByBytes(uint32_t state, const uint8_t* data, size_t bytes) {
  for (size_t i = 0; i < bytes; ++i) state = state >> 8 ^ kCrcOfByte[(state ^ data[i]) & 0xff];
  return state;
}

}  // namespace tributary::cpu
#endif

HWY_BEFORE_NAMESPACE();
namespace tributary::cpu {
namespace HWY_NAMESPACE {
namespace {
namespace hn = hwy::HWY_NAMESPACE;

#if HWY_TARGET != HWY_SCALAR
using Tag = hn::FixedTag<uint64_t, 2>;
using Block = hn::Vec<Tag>;
constexpr size_t kBlockBytes = 16;
constexpr size_t kLanes = 4;  // that many blocks are folded side by side

// The factors of a block's two halves for a distance.
HWY_ALIGN constexpr uint64_t kFar[2] = {CrcFactor(8 * kBlockBytes * kLanes + 32),
                                        CrcFactor(8 * kBlockBytes * kLanes - 32)};
HWY_ALIGN constexpr uint64_t kNear[2] = {CrcFactor(8 * kBlockBytes + 32),
                                         CrcFactor(8 * kBlockBytes - 32)};

HWY_INLINE Block LoadBlock(const uint8_t* data) {
  const hn::Repartition<uint8_t, Tag> bytes;
  return hn::BitCast(Tag(), hn::LoadU(bytes, data));
}

HWY_INLINE Block Fold(Block ahead, Block factors, Block onto) {
  return hn::Xor(hn::Xor(hn::CLMulLower(ahead, factors), hn::CLMulUpper(ahead, factors)), onto);
}

uint32_t Crc32Impl(uint32_t state, const uint8_t* data, size_t bytes) {
  if (bytes < kBlockBytes * kLanes) return CrcByBytes(state, data, bytes);
  const Tag d;
  const Block far = hn::Load(d, kFar);
  const Block near = hn::Load(d, kNear);
  HWY_ALIGN const uint64_t begin[2] = {state, 0};
  Block x0 = hn::Xor(LoadBlock(data), hn::Load(d, begin));
  Block x1 = LoadBlock(data + kBlockBytes);
  Block x2 = LoadBlock(data + 2 * kBlockBytes);
  Block x3 = LoadBlock(data + 3 * kBlockBytes);
  size_t at = kBlockBytes * kLanes;
  for (; at + kBlockBytes * kLanes <= bytes; at += kBlockBytes * kLanes) {
    x0 = Fold(x0, far, LoadBlock(data + at));
    x1 = Fold(x1, far, LoadBlock(data + at + kBlockBytes));
    x2 = Fold(x2, far, LoadBlock(data + at + 2 * kBlockBytes));
    x3 = Fold(x3, far, LoadBlock(data + at + 3 * kBlockBytes));
  }
  x1 = Fold(x0, near, x1);
  x2 = Fold(x1, near, x2);
  x3 = Fold(x2, near, x3);
  for (; at + kBlockBytes <= bytes; at += kBlockBytes) x3 = Fold(x3, near, LoadBlock(data + at));
  HWY_ALIGN uint8_t last[kBlockBytes];
  hn::Store(hn::BitCast(hn::Repartition<uint8_t, Tag>(), x3), hn::Repartition<uint8_t, Tag>(),
            last);
  return CrcByBytes(CrcByBytes(0, last, kBlockBytes), data + at, bytes - at);
}
#else
uint32_t Crc32Impl(uint32_t state, const uint8_t* data, size_t bytes) {
  return CrcByBytes(state, data, bytes);
}
#endif

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace tributary::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace tributary::cpu {

HWY_EXPORT(Crc32Impl);

uint32_t Crc32(uint32_t crc, const std::byte* data, size_t bytes) {
  return ~HWY_DYNAMIC_DISPATCH(Crc32Impl)(~crc, reinterpret_cast<const uint8_t*>(data), bytes);
}

}  // namespace tributary::cpu
#endif  // HWY_ONCE
