// Elements of O on their way: from the type of a partial to the type that travels, from there to
// float, and from float to the type of the output.
#pragma once

#include <cuda_fp16.h>

#include <cstddef>
#include <cstdint>

#include "collective/direct/direct_layout.h"
#include "collective/direct/peer_words.cuh"
#include "kernels/cuda/ptx/encode.cuh"
#include "kernels/cuda/ptx/ptx.cuh"
#include "kernels/dtype.h"

namespace tributary::collective::direct {

template <DType kIn, DType kWire>
struct Element {
  static constexpr int kCount = kDirectPacket / static_cast<int>(SizeOf(kWire));
  static constexpr int kParts = kCount * static_cast<int>(SizeOf(kIn)) / kDirectPacket;

  // kCount elements of a partial as they lie in memory.
  struct Raw {
    uint4 part[kParts];
  };
  static __device__ __forceinline__ const std::byte* Place(const void* o, size_t element) {
    return static_cast<const std::byte*>(o) + element * SizeOf(kIn);
  }
  static __device__ __forceinline__ Raw Load(const void* o, size_t element) {
    Raw raw;
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
      raw.part[i] = reinterpret_cast<const uint4*>(Place(o, element))[i];
    }
    return raw;
  }

  // As they travel.
  static __device__ __forceinline__ uint4 Packet(const Raw& raw) {
    if constexpr (kIn == kWire) {
      return raw.part[0];
    } else {
      static_assert(kIn == DType::kF32 && kCount == 8);
      const auto pack = [](uint32_t low, uint32_t high) {
        return cuda::Pack<kWire>(__uint_as_float(low), __uint_as_float(high));
      };
      const uint4 a = raw.part[0], b = raw.part[1];
      return make_uint4(pack(a.x, a.y), pack(a.z, a.w), pack(b.x, b.y), pack(b.z, b.w));
    }
  }

  static __device__ __forceinline__ void Widen(uint4 packet, float (&x)[kCount]) {
    const uint32_t words[4] = {packet.x, packet.y, packet.z, packet.w};
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      if constexpr (kWire == DType::kF32) {
        x[w] = __uint_as_float(words[w]);
      } else if constexpr (kWire == DType::kBf16) {
        x[2 * w] = __uint_as_float(words[w] << 16);
        x[2 * w + 1] = __uint_as_float(words[w] & 0xffff0000u);
      } else {
        const float2 pair = __half22float2(*reinterpret_cast<const __half2*>(&words[w]));
        x[2 * w] = pair.x;
        x[2 * w + 1] = pair.y;
      }
    }
  }
};

// Merged elements of a thread, as words of the output's type.
template <int kCount>
struct Words {
  uint32_t word[kCount];
  int count;
};

template <int kCount>
__device__ __forceinline__ Words<kCount> EncodeOutput(const float (&x)[kCount], DType type) {
  Words<kCount> w;
  if (type == DType::kF32) {
    w.count = kCount;
#pragma unroll
    for (int i = 0; i < kCount; ++i) w.word[i] = __float_as_uint(x[i]);
    return w;
  }
  w.count = kCount / 2;
#pragma unroll
  for (int i = 0; i < kCount / 2; ++i) {
    w.word[i] = type == DType::kBf16 ? cuda::Pack<DType::kBf16>(x[2 * i], x[2 * i + 1])
                                     : cuda::Pack<DType::kF16>(x[2 * i], x[2 * i + 1]);
  }
  return w;
}

template <int kCount>
__device__ __forceinline__ void StoreLocal(void* to, const Words<kCount>& w) {
  if (w.count == 2) {
    *static_cast<uint2*>(to) = make_uint2(w.word[0], w.word[1]);
    return;
  }
#pragma unroll
  for (int i = 0; i < kCount; i += 4) {
    if (i < w.count) {
      static_cast<uint4*>(to)[i / 4] =
          make_uint4(w.word[i], w.word[i + 1], w.word[i + 2], w.word[i + 3]);
    }
  }
}

template <int kCount>
__device__ __forceinline__ void Send(std::byte* to, const Words<kCount>& w) {
  if (w.count == 2) {
    StoreWord(to, Sendable(w.word[0]));
    StoreWord(to + 4, Sendable(w.word[1]));
    return;
  }
#pragma unroll
  for (int i = 0; i < kCount; i += 4) {
    if (i < w.count) {
      StorePacket(to + 4 * i,
                  Sendable(make_uint4(w.word[i], w.word[i + 1], w.word[i + 2], w.word[i + 3])));
    }
  }
}

}  // namespace tributary::collective::direct
