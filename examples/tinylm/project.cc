#include "examples/tinylm/project.h"

#include <cstdint>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "examples/tinylm/project.cc"
#include "hwy/foreach_target.h"
// After foreach_target:
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace tributary::tinylm {
namespace HWY_NAMESPACE {
namespace {
namespace hn = hwy::HWY_NAMESPACE;

// What a block of products reads and writes: rows of x and w have `size` elements.
struct Operands {
  const float* x;
  const float* w;
  int64_t size;
  float* out;
  int64_t out_stride;
};

// Products of kRows rows of x with kOutputs rows of w. Each product goes through the same
// operations in the same order, whatever else is in the block; each element read serves the whole
// block.
template <int kRows, int kOutputs>
HWY_INLINE void DotBlock(const Operands& o) {
  const hn::ScalableTag<float> d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  hn::Vec<decltype(d)> sums[kRows][kOutputs];
  for (auto& of_row : sums) {
    for (auto& sum : of_row) sum = hn::Zero(d);
  }
  int64_t i = 0;
  for (; i + lanes <= o.size; i += lanes) {
    hn::Vec<decltype(d)> inputs[kRows];
#pragma GCC unroll 4
    for (int row = 0; row < kRows; ++row) inputs[row] = hn::LoadU(d, o.x + row * o.size + i);
#pragma GCC unroll 8
    for (int output = 0; output < kOutputs; ++output) {
      const auto weights = hn::LoadU(d, o.w + output * o.size + i);
#pragma GCC unroll 4
      for (int row = 0; row < kRows; ++row) {
        sums[row][output] = hn::MulAdd(weights, inputs[row], sums[row][output]);
      }
    }
  }
  for (int row = 0; row < kRows; ++row) {
    for (int output = 0; output < kOutputs; ++output) {
      float sum = hn::GetLane(hn::SumOfLanes(d, sums[row][output]));
      for (int64_t j = i; j < o.size; ++j) sum += o.w[output * o.size + j] * o.x[row * o.size + j];
      o.out[row * o.out_stride + output] = sum;
    }
  }
}

// kRows rows of x with all `outputs` rows of w.
template <int kRows>
HWY_INLINE void ProjectRows(Operands o, int64_t outputs) {
  constexpr int kOutputs = kRows == 1 ? 8 : 2;
  int64_t n = 0;
  for (; n + kOutputs <= outputs; n += kOutputs, o.w += kOutputs * o.size, o.out += kOutputs) {
    DotBlock<kRows, kOutputs>(o);
  }
  for (; n < outputs; ++n, o.w += o.size, ++o.out) DotBlock<kRows, 1>(o);
}

void ProjectAll(const float* x, int64_t rows, const float* w, int64_t outputs, int64_t size,
                float* out) {
  int64_t row = 0;
  for (; row + 4 <= rows; row += 4) {
    ProjectRows<4>({x + row * size, w, size, out + row * outputs, outputs}, outputs);
  }
  for (; row < rows; ++row) {
    ProjectRows<1>({x + row * size, w, size, out + row * outputs, outputs}, outputs);
  }
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace tributary::tinylm
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace tributary::tinylm {

HWY_EXPORT(ProjectAll);

Matrix Project(const Matrix& x, const Matrix& w) {
  Matrix out(x.rows(), w.rows());
  HWY_DYNAMIC_DISPATCH(ProjectAll)(x.data(), x.rows(), w.data(), w.rows(), w.cols(), out.data());
  return out;
}

}  // namespace tributary::tinylm
#endif  // HWY_ONCE
