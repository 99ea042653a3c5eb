#include "bench/kernels/streaming_read.h"

#include <cstdint>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "bench/kernels/streaming_read.cc"
#include "hwy/foreach_target.h"
// After foreach_target:
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace tributary::bench {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Eight independent chains, so that the loop waits for memory and for nothing else.
uint64_t StreamingReadImpl(const std::byte* data, size_t bytes) {
  const hn::ScalableTag<uint64_t> d;
  const auto* words = reinterpret_cast<const uint64_t*>(data);
  const size_t lanes = hn::Lanes(d);
  auto s0 = hn::Zero(d), s1 = s0, s2 = s0, s3 = s0, s4 = s0, s5 = s0, s6 = s0, s7 = s0;
  for (size_t i = 0; i < bytes / sizeof(uint64_t); i += 8 * lanes) {
    s0 = hn::Xor(s0, hn::Load(d, words + i));
    s1 = hn::Xor(s1, hn::Load(d, words + i + lanes));
    s2 = hn::Xor(s2, hn::Load(d, words + i + 2 * lanes));
    s3 = hn::Xor(s3, hn::Load(d, words + i + 3 * lanes));
    s4 = hn::Xor(s4, hn::Load(d, words + i + 4 * lanes));
    s5 = hn::Xor(s5, hn::Load(d, words + i + 5 * lanes));
    s6 = hn::Xor(s6, hn::Load(d, words + i + 6 * lanes));
    s7 = hn::Xor(s7, hn::Load(d, words + i + 7 * lanes));
  }
  const auto all =
      hn::Xor(hn::Xor(hn::Xor(s0, s1), hn::Xor(s2, s3)), hn::Xor(hn::Xor(s4, s5), hn::Xor(s6, s7)));
  return hn::GetLane(hn::SumOfLanes(d, all));
}

}  // namespace HWY_NAMESPACE
}  // namespace tributary::bench
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace tributary::bench {

HWY_EXPORT(StreamingReadImpl);

void StreamingRead(const std::byte* data, size_t bytes) {
  volatile uint64_t kept = HWY_DYNAMIC_DISPATCH(StreamingReadImpl)(data, bytes);
  (void)kept;
}

}  // namespace tributary::bench
#endif  // HWY_ONCE
