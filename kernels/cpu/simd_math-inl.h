// Vector functions shared by the kernels; compiled once a target.
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

// e^x for x <= 0, to about 1 unit in the last place. -inf gives 0, NaN gives NaN, and what would be
// subnormal gives 0. Polynomial: Cephes expf.
template <class D, class V = hn::Vec<D>>
HWY_INLINE V ExpNonPositive(D d, V x) {
  const hn::RebindToSigned<D> di;
  const V lowest = hn::Set(d, -87.33f);
  const auto underflows = hn::Lt(x, lowest);  // false for NaN, which must survive
  const V clamped = hn::IfThenElse(underflows, lowest, x);
  const V n = hn::Round(hn::Mul(clamped, hn::Set(d, 1.44269504f)));
  V r = hn::NegMulAdd(n, hn::Set(d, 0.693359375f), clamped);
  r = hn::NegMulAdd(n, hn::Set(d, -2.12194440e-4f), r);
  V y = hn::Set(d, 1.9875691500e-4f);
  y = hn::MulAdd(y, r, hn::Set(d, 1.3981999507e-3f));
  y = hn::MulAdd(y, r, hn::Set(d, 8.3334519073e-3f));
  y = hn::MulAdd(y, r, hn::Set(d, 4.1665795894e-2f));
  y = hn::MulAdd(y, r, hn::Set(d, 1.6666665459e-1f));
  y = hn::MulAdd(y, r, hn::Set(d, 5.0000001201e-1f));
  y = hn::Add(hn::MulAdd(y, hn::Mul(r, r), r), hn::Set(d, 1.0f));
  const auto exponent = hn::ShiftLeft<23>(hn::Add(hn::ConvertTo(di, n), hn::Set(di, 127)));
  return hn::IfThenZeroElse(underflows, hn::Mul(y, hn::BitCast(d, exponent)));
}

template <class D, class V = hn::Vec<D>>
HWY_INLINE V Tanh(D d, V x) {
  const V one = hn::Set(d, 1.0f);
  const V e = ExpNonPositive(d, hn::Mul(hn::Set(d, -2.0f), hn::Abs(x)));
  return hn::CopySign(hn::Div(hn::Sub(one, e), hn::Add(one, e)), x);
}

// out[i] = the sum of the lanes of argument i. By the same tree whatever i is, so that where a key
// sits in a block of four does not change its logit.
template <class V>
HWY_INLINE void StoreSumsOfLanes(V v0, V v1, V v2, V v3, float* out) {
#if HWY_TARGET == HWY_SCALAR
  out[0] = hn::GetLane(v0);
  out[1] = hn::GetLane(v1);
  out[2] = hn::GetLane(v2);
  out[3] = hn::GetLane(v3);
#else
  const hn::DFromV<V> d;
  const hn::Repartition<double, decltype(d)> dd;
  const hn::Full128<float> d128;
  const V v01 = hn::Add(hn::InterleaveLower(d, v0, v1), hn::InterleaveUpper(d, v0, v1));
  const V v23 = hn::Add(hn::InterleaveLower(d, v2, v3), hn::InterleaveUpper(d, v2, v3));
  const auto pairs01 = hn::BitCast(dd, v01);
  const auto pairs23 = hn::BitCast(dd, v23);
  // Each 128 bits now come down to four sums, one an argument.
  const V sums = hn::Add(hn::BitCast(d, hn::InterleaveLower(dd, pairs01, pairs23)),
                         hn::BitCast(d, hn::InterleaveUpper(dd, pairs01, pairs23)));
#if HWY_CAP_GE512
  const hn::Half<decltype(d)> d256;
  const auto half = hn::Add(hn::LowerHalf(d256, sums), hn::UpperHalf(d256, sums));
  hn::Store(hn::Add(hn::LowerHalf(d128, half), hn::UpperHalf(d128, half)), d128, out);
#elif HWY_CAP_GE256
  hn::Store(hn::Add(hn::LowerHalf(d128, sums), hn::UpperHalf(d128, sums)), d128, out);
#else
  hn::Store(sums, d128, out);
#endif
#endif  // HWY_SCALAR
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace tributary::cpu
HWY_AFTER_NAMESPACE();

#endif  // include guard, toggled once a target
