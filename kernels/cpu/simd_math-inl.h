// Vector functions that the kernels share. They are compiled once per target.
#if defined(TRIBUTARY_KERNELS_CPU_SIMD_MATH_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef TRIBUTARY_KERNELS_CPU_SIMD_MATH_INL_H_
#undef TRIBUTARY_KERNELS_CPU_SIMD_MATH_INL_H_
#else
#define TRIBUTARY_KERNELS_CPU_SIMD_MATH_INL_H_
#endif

#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace tributary::cpu {
namespace HWY_NAMESPACE {
namespace {
namespace hn = hwy::HWY_NAMESPACE;

// std::fill_n would be code for the oldest processors, which waits for the registers of newer ones.
HWY_INLINE void Fill(float* HWY_RESTRICT to, size_t count, float value) {
  for (size_t i = 0; i < count; ++i) to[i] = value;
}

// 2^x for x < 127, to about 1.5 units in the last place. -inf gives 0, NaN gives NaN, and what
// would be subnormal gives 0. Polynomial: Cephes exp2f.
template <class D, class V = hn::Vec<D>>
HWY_INLINE V Exp2(D d, V x) {
  const hn::RebindToSigned<D> di;
  const auto underflows = hn::Lt(x, hn::Set(d, -126.0f));  // false for NaN, which must survive
  // So large a number has no bits for fractions: adding it rounds x, and leaves the integer in the
  // low bits of the sum.
  const V magic = hn::Set(d, 0x1.8p23f);
  const V shifted = hn::Add(x, magic);
  const V f = hn::Sub(x, hn::Sub(shifted, magic));  // in [-1/2, 1/2]
  V y = hn::Set(d, 1.535336188319500e-4f);
  y = hn::MulAdd(y, f, hn::Set(d, 1.339887440266574e-3f));
  y = hn::MulAdd(y, f, hn::Set(d, 9.618437357674640e-3f));
  y = hn::MulAdd(y, f, hn::Set(d, 5.550332471162809e-2f));
  y = hn::MulAdd(y, f, hn::Set(d, 2.402264791363012e-1f));
  y = hn::MulAdd(y, f, hn::Set(d, 6.931472028550421e-1f));
  y = hn::MulAdd(y, f, hn::Set(d, 1.0f));
  const auto exponent = hn::ShiftLeft<23>(hn::Add(hn::BitCast(di, shifted), hn::Set(di, 127)));
  return hn::IfThenZeroElse(underflows, hn::Mul(y, hn::BitCast(d, exponent)));
}

// Whether tanh(x) is to be had from TanhRatio.
template <class D, class V = hn::Vec<D>>
HWY_INLINE auto IsSmallForTanh(D d, V x) {
  return hn::Lt(hn::Abs(x), hn::Set(d, 0.25f));
}
// tanh(x) / x for small x, by its series: to the last place.
template <class D, class V = hn::Vec<D>>
HWY_INLINE V TanhRatio(D d, V x) {
  const V x2 = hn::Mul(x, x);
  V y = hn::Set(d, 62.0f / 2835.0f);
  y = hn::MulAdd(y, x2, hn::Set(d, -17.0f / 315.0f));
  y = hn::MulAdd(y, x2, hn::Set(d, 2.0f / 15.0f));
  y = hn::MulAdd(y, x2, hn::Set(d, -1.0f / 3.0f));
  return hn::MulAdd(y, x2, hn::Set(d, 1.0f));
}

// tanh(x), with an error of the last place of 1, whatever x is.
template <class D, class V = hn::Vec<D>>
HWY_INLINE V Tanh(D d, V x) {
  const V one = hn::Set(d, 1.0f);
  const V e = Exp2(d, hn::Mul(hn::Set(d, -2 * 1.44269504f), hn::Abs(x)));
  return hn::CopySign(hn::Div(hn::Sub(one, e), hn::Add(one, e)), x);
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace tributary::cpu
HWY_AFTER_NAMESPACE();

#endif  // include guard, toggled once a target
