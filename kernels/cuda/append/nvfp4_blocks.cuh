// New numbers to codes of NVFP4 (ptx/encode_nvfp4.cuh), and where they go.
//
// Two threads have a block's 16 dimensions, eight each of every token, and the block's scale is the
// larger one's.
#pragma once

#include <cstdint>

#include "kernels/cuda/append/append.h"
#include "kernels/cuda/layout/nvfp4_layout.h"
#include "kernels/cuda/ptx/encode_nvfp4.cuh"
#include "kernels/nvfp4.h"

namespace tributary::cuda {

inline constexpr int kNvfp4Dims = 8;  // of a thread

// Code d joins the others, from its place in a page.
__device__ __forceinline__ void AddCode(int d, const std::byte* plane, CodePlace place,
                                        Nvfp4Codes* x) {
  x->codes |= CodeOfByte(static_cast<uint32_t>(plane[place.byte]), place.high) << 4 * d;
}

// Quantises eight of the 16 numbers of a block. The thread with the others is `other_lane` away
// (a lane's number with one bit flipped) and calls this as well; `pair` has both lanes' bits.
__device__ __forceinline__ Nvfp4Codes QuantizeBlock(const float (&x)[kNvfp4Dims],
                                                    float tensor_scale, uint32_t pair,
                                                    int other_lane) {
  const uint32_t largest = LargestMagnitude(x);
  return EncodeNvfp4(x, max(largest, __shfl_xor_sync(pair, largest, other_lane)), tensor_scale);
}

// The lanes whose numbers have this bit flipped, and this lane.
__device__ __forceinline__ uint32_t PairOfLanes(int bit) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  return 1u << lane | 1u << (lane ^ bit);
}

// Where the elements of one head lie in the cache.
class Nvfp4Address {
 public:
  __device__ Nvfp4Address(const AppendArgs& args, int head) : args_(args), head_(head) {}

  // The eight codes of a key from dimension d on, and their block's scale if d begins it.
  __device__ __forceinline__ void StoreKey(int64_t slot, int d, const Nvfp4Codes& x) const {
    std::byte* const plane = Keys(slot);
    const int token = InPage(slot);
    ForEachKeyWord(plane, token, d, x, [](auto* to, auto word) { *to = word; });
    if (d % kNvfp4Block != 0) return;
    plane[Nvfp4KeyScale(token, d, args_.geometry.key_dim)] = std::byte{x.scale};
  }
  __device__ __forceinline__ bool HoldsKey(int64_t slot, int d, const Nvfp4Codes& x) const {
    std::byte* const plane = Keys(slot);
    const int token = InPage(slot);
    bool same = true;
    ForEachKeyWord(plane, token, d, x, [&](const auto* at, auto word) { same &= *at == word; });
    return same && plane[Nvfp4KeyScale(token, d, args_.geometry.key_dim)] == std::byte{x.scale};
  }

  // The same, as they lie there.
  __device__ __forceinline__ Nvfp4Codes LoadKey(int64_t slot, int d) const {
    const std::byte* const plane = Keys(slot);
    const int token = InPage(slot);
    Nvfp4Codes x;
#pragma unroll
    for (int i = 0; i < kNvfp4Dims; ++i) {
      AddCode(i, plane, Nvfp4KeyPlace(token, d + i, args_.geometry.key_dim), &x);
    }
    x.scale = static_cast<uint8_t>(plane[Nvfp4KeyScale(token, d, args_.geometry.key_dim)]);
    return x;
  }

  // The same of a value.
  __device__ __forceinline__ Nvfp4Codes LoadValue(int64_t slot, int d) const {
    const std::byte* const plane = Values(slot);
    const int token = InPage(slot);
    Nvfp4Codes x;
#pragma unroll
    for (int i = 0; i < kNvfp4Dims; ++i) {
      AddCode(i, plane, Nvfp4ValuePlace(token, d + i, args_.geometry.value_dim), &x);
    }
    x.scale = static_cast<uint8_t>(plane[Nvfp4ValueScale(token, d, args_.geometry.value_dim)]);
    return x;
  }
  __device__ __forceinline__ void StoreValue(int64_t slot, int d, const Nvfp4Codes& x) const {
    std::byte* const plane = Values(slot);
    const int token = InPage(slot);
#pragma unroll
    for (int i = 0; i < kNvfp4Dims; i += 2) {
      plane[Nvfp4ValuePlace(token, d + i, args_.geometry.value_dim).byte] = ValueByte(x, i);
    }
    if (d % kNvfp4Block != 0) return;
    plane[Nvfp4ValueScale(token, d, args_.geometry.value_dim)] = std::byte{x.scale};
  }
  __device__ __forceinline__ bool HoldsValue(int64_t slot, int d, const Nvfp4Codes& x) const {
    const std::byte* const plane = Values(slot);
    const int token = InPage(slot);
    bool same = true;
#pragma unroll
    for (int i = 0; i < kNvfp4Dims; i += 2) {
      same &=
          plane[Nvfp4ValuePlace(token, d + i, args_.geometry.value_dim).byte] == ValueByte(x, i);
    }
    return same && plane[Nvfp4ValueScale(token, d, args_.geometry.value_dim)] == std::byte{x.scale};
  }

  // Values of a whole quad of tokens, the first of which has `slot`: one vector.
  __device__ __forceinline__ void StoreValueQuad(int64_t slot, int d,
                                                 const Nvfp4Codes (&x)[kQuadTokens]) const {
    std::byte* const plane = Values(slot);
    const int token = InPage(slot);
    uint32_t words[4] = {};
    uint32_t scales = 0;
#pragma unroll
    for (int i = 0; i < kQuadTokens; ++i) {
#pragma unroll
      for (int word = 0; word < 4; ++word) {
        words[word] |= static_cast<uint32_t>(ValueByte(x[i], 2 * word)) << 8 * ByteOfWord(i);
      }
      scales |= uint32_t{x[i].scale} << 8 * i;
    }
    *reinterpret_cast<uint4*>(plane + Nvfp4ValueWord(token, d, args_.geometry.value_dim)) =
        make_uint4(words[0], words[1], words[2], words[3]);
    if (d % kNvfp4Block != 0) return;
    *reinterpret_cast<uint32_t*>(plane + Nvfp4ValueScale(token, d, args_.geometry.value_dim)) =
        scales;
  }

 private:
  // Codes of dimensions d and d + 1.
  static __device__ __forceinline__ std::byte ValueByte(const Nvfp4Codes& x, int d) {
    return static_cast<std::byte>(PlacedCode(x.Code(d), false) | PlacedCode(x.Code(d + 1), true));
  }
  // What eight codes of a key are where they lie: one word, or, in a piece of 16 dimensions, two of
  // two bytes.
  template <typename Use>
  __device__ __forceinline__ void ForEachKeyWord(std::byte* plane, int token, int d,
                                                 const Nvfp4Codes& x, Use use) const {
    const int key_dim = args_.geometry.key_dim;
    if (KeyPieceOf(d, key_dim).dims == kNvfp4Block) {
#pragma unroll
      for (int i = 0; i < kNvfp4Dims; i += 4) {
        const uint32_t bytes = PlacedCode(x.Code(i), false) | PlacedCode(x.Code(i + 2), true) |
                               (PlacedCode(x.Code(i + 1), false) | PlacedCode(x.Code(i + 3), true))
                                   << 8;
        use(reinterpret_cast<uint16_t*>(plane + Nvfp4KeyWord(token, d + i, key_dim)),
            static_cast<uint16_t>(bytes));
      }
      return;
    }
    uint32_t word = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      word |= (PlacedCode(x.Code(i), false) | PlacedCode(x.Code(i + 4), true)) << 8 * ByteOfWord(i);
    }
    use(reinterpret_cast<uint32_t*>(plane + Nvfp4KeyWord(token, d, key_dim)), word);
  }

  __device__ std::byte* Keys(int64_t slot) const {
    return Page(slot) +
           size_t(head_) * args_.page_size / kStripSlots * Nvfp4StripBytes(args_.geometry.key_dim);
  }
  __device__ std::byte* Values(int64_t slot) const {
    const KvGeometry& g = args_.geometry;
    return Page(slot) + size_t(args_.page_size / kStripSlots) *
                            (size_t(g.kv_heads) * Nvfp4StripBytes(g.key_dim) +
                             size_t(head_) * Nvfp4StripBytes(g.value_dim));
  }
  __device__ std::byte* Page(int64_t slot) const {
    const KvGeometry& g = args_.geometry;
    const int64_t page = slot >> (__ffs(args_.page_size) - 1);
    return args_.cache + size_t(page) * (args_.page_size / kStripSlots) * g.kv_heads *
                             (Nvfp4StripBytes(g.key_dim) + Nvfp4StripBytes(g.value_dim));
  }
  __device__ int InPage(int64_t slot) const {
    return static_cast<int>(slot) & (args_.page_size - 1);
  }

  const AppendArgs& args_;
  const int head_;
};

}  // namespace tributary::cuda
