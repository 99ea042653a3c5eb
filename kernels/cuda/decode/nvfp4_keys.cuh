// A lane's part of the keys of a strip of an NVFP4 cache: how it comes to registers, and how it
// becomes operand A of products of depth 16 (nvfp4_layout.h).
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/cuda/layout/nvfp4_layout.h"
#include "kernels/cuda/ptx/widen_nvfp4.cuh"
#include "kernels/dtype.h"

namespace tributary::cuda {

// Shapes of kernels over caches of NVFP4, which load, widen and clear strips in their own way.
template <typename Traits>
concept OfNvfp4 = Traits::kKv == DType::kNvfp4;

// In steps of two products, one word of either row; a piece of 16 dimensions is one product.
template <int kKeyDim>
class Nvfp4Keys {
 public:
  static constexpr int kPieces = kKeyDim / kLargestKeyPiece;  // of 128 dimensions
  static constexpr bool kHas64 = (kKeyDim & 64) != 0;
  static constexpr bool kHas32 = (kKeyDim & 32) != 0;
  static constexpr bool kHas16 = (kKeyDim & 16) != 0;
  static constexpr int kFullSteps = kKeyDim / 32;
  static constexpr int kSteps = kFullSteps + (kHas16 ? 1 : 0);
  // Words that a lane holds.
  static constexpr int kRegisters =
      kPieces * 9 + (kHas64 ? 5 : 0) + (kHas32 ? 3 : 0) + (kHas16 ? 2 : 0);

  // load(at, &x) loads an x of 16, 8, 4 or 2 bytes.
  template <typename Load>
  __device__ __forceinline__ void Read(const std::byte* strip, Load load) {
    const unsigned lane = threadIdx.x % 32;
    const std::byte* const scales = strip + Nvfp4ElementBytes(kKeyDim);
#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece) {
      const std::byte* const at = strip + Nvfp4ElementBytes(piece * kLargestKeyPiece) + lane * 16;
      load(at, pieces_[piece][0]);
      load(at + 512, pieces_[piece][1]);
      load(scales + piece * kLargestKeyPiece + lane * 4, scales_[piece]);
    }
    constexpr int kFirst64 = kPieces * kLargestKeyPiece;
    if constexpr (kHas64) {
      load(strip + Nvfp4ElementBytes(kFirst64) + lane * 16, piece64_);
      load(scales + kFirst64 + lane * 2, scales64_);
    }
    constexpr int kFirst32 = kFirst64 + (kHas64 ? 64 : 0);
    if constexpr (kHas32) {
      load(strip + Nvfp4ElementBytes(kFirst32) + lane * 8, piece32_);
      load(scales + kFirst32 + lane / 2 * 2, scales32_);
    }
    constexpr int kFirst16 = kFirst32 + (kHas32 ? 32 : 0);
    if constexpr (kHas16) {
      load(strip + Nvfp4ElementBytes(kFirst16) + lane * 4, piece16_);
      load(scales + kFirst16 + lane / 4 * 2, scales16_);
    }
  }

  // Operand A of the two products of a step; the second is nothing in a step of 16 dimensions.
  __device__ __forceinline__ void Widen(int step, uint32_t (&a)[2][4]) const {
    constexpr int kOfPiece = kLargestKeyPiece / 32;
    if (step < kPieces * kOfPiece) {
      const uint4(&rows)[2] = pieces_[step / kOfPiece];
      const uint32_t scales = scales_[step / kOfPiece];
      const int word = step % kOfPiece;
      const uint32_t of_rows[2] = {WidenE4M3<false>(scales), WidenE4M3<true>(scales)};
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        WidenRow(Word(rows[row], word), row,
                 word < kOfPiece / 2 ? FirstTwice(of_rows[row]) : SecondTwice(of_rows[row]), a);
      }
      return;
    }
    const int rest = step - kPieces * kOfPiece;
    if (kHas64 && rest < 2) {
      const uint32_t scales = WidenE4M3<false>(scales64_);
      WidenRow(Word(piece64_, rest), 0, FirstTwice(scales), a);
      WidenRow(Word(piece64_, 2 + rest), 1, SecondTwice(scales), a);
    } else if (kHas32 && step < kFullSteps) {
      const uint32_t scales = WidenE4M3<false>(scales32_);
      WidenRow(piece32_.x, 0, FirstTwice(scales), a);
      WidenRow(piece32_.y, 1, SecondTwice(scales), a);
    } else {
      // A half of the word has four codes of a row: pairs are of the two rows.
      const uint32_t scales = WidenE4M3<false>(scales16_);
      uint32_t pairs[4];
      WidenCodes(piece16_, pairs);
#pragma unroll
      for (uint32_t& pair : pairs) pair = MultiplyPairs(pair, scales);
      a[0][0] = __byte_perm(pairs[1], pairs[0], 0x5410);
      a[0][1] = __byte_perm(pairs[1], pairs[0], 0x7632);
      a[0][2] = __byte_perm(pairs[3], pairs[2], 0x5410);
      a[0][3] = __byte_perm(pairs[3], pairs[2], 0x7632);
    }
  }

 private:
  static __device__ __forceinline__ uint32_t Word(const uint4& x, int i) {
    const uint32_t words[4] = {x.x, x.y, x.z, x.w};
    return words[i];
  }
  static __device__ __forceinline__ void WidenRow(uint32_t word, int row, uint32_t scale,
                                                  uint32_t (&a)[2][4]) {
    uint32_t pairs[4];
    WidenCodes(word, pairs);
    a[0][row] = MultiplyPairs(pairs[0], scale);
    a[0][row + 2] = MultiplyPairs(pairs[1], scale);
    a[1][row] = MultiplyPairs(pairs[2], scale);
    a[1][row + 2] = MultiplyPairs(pairs[3], scale);
  }

  static constexpr int kRoom = kPieces == 0 ? 1 : kPieces;
  uint4 pieces_[kRoom][2];  // rows lane / 4 and lane / 4 + 8
  uint32_t scales_[kRoom];  // two bytes of either row
  uint4 piece64_;           // eight bytes of either row
  uint2 piece32_;
  uint32_t piece16_;
  // A byte of either row.
  uint16_t scales64_;
  uint16_t scales32_;
  uint16_t scales16_;
};

}  // namespace tributary::cuda
