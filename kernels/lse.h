// The algebra of partial attention: a commutative monoid under Merge.
//
// A partial is what attention over some of the keys gives: the normalised output O and the natural
// log LSE of the sum of exponentials. Merging partials of disjoint key sets gives, exactly, the
// partial of their union. The identity, which a rank with no keys returns, is O = 0, LSE = -inf.
// Source: the online softmax (Milakov and Gimelshein, arXiv:1805.02867) and its use to split
// attention over keys (FlashDecoding, tree attention arXiv:2408.04093).
#pragma once

#include <cmath>
#include <limits>

#include "kernels/key_range.h"  // TRIBUTARY_HOST_DEVICE

namespace tributary {

template <typename T>
TRIBUTARY_HOST_DEVICE constexpr T EmptyLse() {
  return -std::numeric_limits<T>::infinity();
}

// The factors by which two outputs are scaled when they are merged, and the LSE of the union.
template <typename T>
struct MergeWeights {
  T a;
  T b;
  T lse;
};

// Merges LSEs. Two empty partials give weights (0, 0) and an empty LSE, never NaN; a NaN in either
// operand comes out as NaN.
template <typename T>
TRIBUTARY_HOST_DEVICE inline MergeWeights<T> Merge(T lse_a, T lse_b) {
  const T m = lse_a > lse_b || lse_a != lse_a ? lse_a : lse_b;
  if (m == EmptyLse<T>()) return {T(0), T(0), m};
  const T wa = std::exp(lse_a - m);
  const T wb = std::exp(lse_b - m);
  const T sum = wa + wb;
  return {wa / sum, wb / sum, m + std::log(sum)};
}

// The n-ary form of Merge, for one row and head of any number of partials. It goes over their LSEs
// twice, always in the same order, so that results are equal to the bit wherever it is used:
//
//   UnionLse<float> of_all;
//   for (each partial p) of_all.See(p.lse);
//   for (each partial p) {
//     const float weight = of_all.WeightOf(p.lse);
//     if (weight == 0) continue;  // without keys: nothing is asked of its output
//     of_all.Add(weight);
//     o += weight * p.o;
//   }
//   o *= of_all.Scale();          // and of_all.Lse() is the LSE of the union
//
// Only empty partials give O = 0 and an empty LSE; a NaN among the LSEs comes out as NaN.
template <typename T>
class UnionLse {
 public:
  TRIBUTARY_HOST_DEVICE void See(T lse) {
    nan_ |= lse != lse;
    most_ = std::fmax(most_, lse);
  }
  // Once all were seen. Not yet divided by the sum of all weights.
  TRIBUTARY_HOST_DEVICE T WeightOf(T lse) const {
    return std::exp(lse - (most_ == EmptyLse<T>() ? T(0) : most_));
  }
  TRIBUTARY_HOST_DEVICE void Add(T weight) { sum_ += weight; }

  // Once all were added.
  TRIBUTARY_HOST_DEVICE bool empty() const { return sum_ == T(0); }
  TRIBUTARY_HOST_DEVICE T Lse() const {
    return empty() ? EmptyLse<T>() : (nan_ ? sum_ : most_ + std::log(sum_));
  }
  TRIBUTARY_HOST_DEVICE T Scale() const { return empty() ? T(0) : T(1) / sum_; }
  // The weight as a share of the sum of all weights.
  TRIBUTARY_HOST_DEVICE T ShareOf(T weight) const { return empty() ? T(0) : weight / sum_; }

 private:
  T most_ = EmptyLse<T>();
  T sum_ = T(0);
  bool nan_ = false;
};

// The factor by which a whole output (all keys merged) is scaled for an attention sink: a logit
// that takes part in the softmax's denominator and has no value. Applied once, after the last
// merge.
template <typename T>
TRIBUTARY_HOST_DEVICE inline T SinkScale(T lse, T sink) {
  return T(1) / (T(1) + std::exp(sink - lse));
}

}  // namespace tributary
