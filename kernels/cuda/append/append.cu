#include <string>

#include "base/mailbox/gate.cuh"
#include "kernels/cuda/append/append.h"
#include "kernels/cuda/append/nvfp4_blocks.cuh"
#include "kernels/cuda/dispatch.h"
#include "kernels/cuda/launch/grid.h"
#include "kernels/cuda/layout/page_layout.h"
#include "kernels/cuda/layout/plane_address.cuh"
#include "kernels/cuda/ptx/cluster.cuh"
#include "kernels/cuda/ptx/encode.cuh"
#include "kernels/cuda/ptx/ptx.cuh"
#include "kernels/cuda/ptx/quotient.cuh"
#include "kernels/cuda/status.h"
#include "kernels/half.h"
#include "kernels/params.h"

namespace tributary::cuda {
namespace {

constexpr int kDims = 8;  // dimensions per thread; a warp takes 16 tokens of 64 dimensions
constexpr int kWarps = 2;
// Of a multiprocessor: 96 KB in flight.
template <bool kWide>
constexpr int kBlocks = kWide ? 6 : 12;

// Dimensions [d, d + 8) of a quad of tokens.
using Elements = float[kQuadTokens][kDims];

// What a launch does besides writing tokens in their order.
enum class AppendMode {
  kPlain,
  kListed,  // it takes them in the order of a list
  kGated,   // it passes a gate first; a kernel apart, for what that takes slows the others
};

// Four places of a call's tokens or, with kListed, of its list: where each goes, kPadSlot past the
// last one, and which token it is of.
template <bool kListed>
struct Quad {
  int64_t slots[kQuadTokens];
  int32_t tokens[kListed ? kQuadTokens : 1];  // without a list the first; the others follow it

  __device__ __forceinline__ Quad(const AppendArgs& args, int32_t first) {
#pragma unroll
    for (int i = 0; i < kQuadTokens; ++i) {
      const bool any = first + i < args.tokens;
      slots[i] = any ? __ldg(args.slots + first + i) : kPadSlot;
      if constexpr (kListed) tokens[i] = any ? __ldg(args.listed + first + i) : 0;
    }
    if constexpr (!kListed) tokens[0] = first;
  }

  // Where the i-th token is, in tokens from the first one's.
  __device__ __forceinline__ int64_t Behind(int i) const {
    return kListed ? int64_t{tokens[kListed ? i : 0]} - tokens[0] : i;
  }
  __device__ __forceinline__ bool IsPadding() const {
    return slots[0] < 0 && slots[1] < 0 && slots[2] < 0 && slots[3] < 0;
  }
  // Whether the places are a quad of their page, too.
  __device__ __forceinline__ bool IsWhole() const {
    bool whole = slots[0] >= 0 && slots[0] % kQuadTokens == 0;
#pragma unroll
    for (int i = 1; i < kQuadTokens; ++i) whole &= slots[i] == slots[0] + i;
    return whole;
  }
};

// The raw bytes of Elements. A thread issues all of its loads before it uses any of them.
template <bool kWide>
struct RawElements {
  uint4 vectors[kQuadTokens][kWide ? 2 : 1];

  // Of a tensor whose tokens have `token_elements`, from `element` of each on. Leaves out the
  // tokens without a slot.
  template <bool kListed>
  __device__ __forceinline__ void Load(const void* data, size_t element, size_t token_elements,
                                       const Quad<kListed>& quad) {
    constexpr int kBytes = kWide ? 4 : 2;
    const auto* from = static_cast<const std::byte*>(data) +
                       (size_t(quad.tokens[0]) * token_elements + element) * kBytes;
#pragma unroll
    for (int i = 0; i < kQuadTokens; ++i) {
      const auto* at =
          reinterpret_cast<const uint4*>(from + quad.Behind(i) * int64_t(token_elements) * kBytes);
#pragma unroll
      for (int half = 0; half < (kWide ? 2 : 1); ++half) {
        vectors[i][half] = quad.slots[i] >= 0 ? __ldcs(at + half) : make_uint4(0, 0, 0, 0);
      }
    }
  }

  __device__ __forceinline__ void Widen(DType type, Elements& x) const {
#pragma unroll
    for (int i = 0; i < kQuadTokens; ++i) {
#pragma unroll
      for (int half = 0; half < (kWide ? 2 : 1); ++half) {
        const uint4 v = vectors[i][half];
        const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int w = 0; w < 4; ++w) {
          if constexpr (kWide) {
            x[i][half * 4 + w] = __uint_as_float(words[w]);
          } else if (type == DType::kBf16) {
            x[i][2 * w] = __uint_as_float(words[w] << 16);
            x[i][2 * w + 1] = __uint_as_float(words[w] & 0xffff0000u);
          } else {
            const float2 pair = __half22float2(*reinterpret_cast<const __half2*>(&words[w]));
            x[i][2 * w] = pair.x;
            x[i][2 * w + 1] = pair.y;
          }
        }
      }
    }
  }
};

// As QuickQuotient, and a zero keeps its sign.
__device__ __forceinline__ float Quotient(float x, float scale, float inverse) {
  return copysignf(QuickQuotient(x, scale, inverse), x * inverse);
}

// Divides the thread's elements by the head's scale. Returns false for what this fast way cannot
// round: infinities, NaN, and quotients that overflow or, in 16 bits, may be subnormal. (In FP8 all
// of the latter are 0.)
template <DType kKv, bool kWide>
__device__ __forceinline__ bool WidenAndUnscale(const RawElements<kWide>& raw, DType type,
                                                const float* scales, int head, Elements& x) {
  const float scale = scales == nullptr ? 1.0f : __ldg(scales + head);
  const float inverse = __frcp_rn(scale);
  raw.Widen(type, x);
  bool ordinary = scale > 0x1p-40f && scale < 0x1p40f;
  float zero = 0.0f;  // unless something is infinite or NaN
#pragma unroll
  for (int i = 0; i < kQuadTokens; ++i) {
#pragma unroll
    for (int d = 0; d < kDims; ++d) {
      if (scale != 1.0f) {
        if (!IsFp8(kKv)) ordinary &= x[i][d] == 0.0f || fabsf(x[i][d]) > 0x1p-60f;
        x[i][d] = Quotient(x[i][d], scale, inverse);
      }
      zero = fmaf(x[i][d], 0.0f, zero);
    }
  }
  return ordinary && zero == 0.0f;
}

// kCount finite elements packed into words, lowest first, by the hardware's conversions of pairs
// where it has them.
template <DType kKv, int kCount>
__device__ __forceinline__ void EncodeElements(const float (&x)[kCount],
                                               uint32_t (&words)[kCount * SizeOf(kKv) / 4]) {
  if constexpr (SizeOf(kKv) == 2) {
#pragma unroll
    for (int i = 0; i < kCount / 2; ++i) words[i] = Pack<kKv>(x[2 * i], x[2 * i + 1]);
    return;
  }
#if __CUDA_ARCH__ >= 890
  constexpr auto kFormat = kKv == DType::kFp8E4M3 ? __NV_E4M3 : __NV_E5M2;
#pragma unroll
  for (int i = 0; i < kCount / 4; ++i) {
    const uint32_t low =
        __nv_cvt_float2_to_fp8x2(make_float2(x[4 * i], x[4 * i + 1]), __NV_SATFINITE, kFormat);
    const uint32_t high =
        __nv_cvt_float2_to_fp8x2(make_float2(x[4 * i + 2], x[4 * i + 3]), __NV_SATFINITE, kFormat);
    words[i] = low | high << 16;
  }
#else
  EncodeWords<kKv>(x, words);
#endif
}

// Eight dimensions of a key. In 16 bits they are one vector, but in the tail panel, where they are
// the shares of two lanes.
template <DType kKv>
__device__ __forceinline__ void StoreKey(const PlaneAddress<kKv>& address, int64_t slot, int d,
                                         const float (&x)[kDims]) {
  uint32_t words[kDims * SizeOf(kKv) / 4];
  EncodeElements<kKv>(x, words);
  std::byte* to = address.Key(slot, d);
  if constexpr (SizeOf(kKv) == 1) {
    *reinterpret_cast<uint2*>(to) = make_uint2(words[0], words[1]);
  } else if (InKeyTail(d, address.args.geometry.key_dim, 2)) {
    *reinterpret_cast<uint2*>(to) = make_uint2(words[0], words[1]);
    *reinterpret_cast<uint2*>(address.Key(slot, d + kDims / 2)) = make_uint2(words[2], words[3]);
  } else {
    *reinterpret_cast<uint4*>(to) = make_uint4(words[0], words[1], words[2], words[3]);
  }
}

// Eight dimensions of the keys of a whole quad, outside of the tail panel. The keys lie at places
// that depend on the first one's alone.
template <DType kKv>
__device__ __forceinline__ void StoreKeyQuad(std::byte* first, const Elements& x) {
  constexpr auto kSame = [](int token) {
    for (int i = 1; i < kQuadTokens; ++i) {
      for (int chunk = 0; chunk < kKeyPanelBytes / kVectorBytes; ++chunk) {
        if (KeyRow(token + i) - KeyRow(token) != KeyRow(i) - KeyRow(0)) return false;
        if (KeyChunk(KeyRow(token + i), chunk) != KeyChunk(KeyRow(token), chunk)) return false;
      }
    }
    return true;
  };
  static_assert(kSame(0) && kSame(4) && kSame(8) && kSame(12));
#pragma unroll
  for (int i = 0; i < kQuadTokens; ++i) {
    uint32_t words[kDims * SizeOf(kKv) / 4];
    EncodeElements<kKv>(x[i], words);
    std::byte* to = first + (KeyRow(i) - KeyRow(0)) * kKeyPanelBytes;
    if constexpr (SizeOf(kKv) == 1) {
      *reinterpret_cast<uint2*>(to) = make_uint2(words[0], words[1]);
    } else {
      *reinterpret_cast<uint4*>(to) = make_uint4(words[0], words[1], words[2], words[3]);
    }
  }
}

// Zeros into the padding of a key, which products take in.
template <DType kKv>
__device__ __forceinline__ void StoreKeyPadding(const PlaneAddress<kKv>& address, int64_t slot,
                                                int d) {
  // Rows of whole 16-bit elements end where their last vector of dimensions does.
  if constexpr (SizeOf(kKv) == 1) {
    *reinterpret_cast<uint2*>(address.Key(slot, d)) = make_uint2(0, 0);
  }
}

// The values of a whole quad: full vectors, which lie one quad of vectors apart.
template <DType kKv>
__device__ __forceinline__ void StoreValueQuad(std::byte* first, const Elements& x) {
  constexpr int kVector = ValueVectorDims(SizeOf(kKv));
  static_assert(kDims % kVector == 0);
#pragma unroll
  for (int begin = 0; begin < kDims; begin += kVector) {
    float transposed[kVector * kQuadTokens];
#pragma unroll
    for (int i = 0; i < kVector * kQuadTokens; ++i) {
      transposed[i] = x[i % kQuadTokens][begin + i / kQuadTokens];
    }
    uint32_t words[4];
    EncodeElements<kKv>(transposed, words);
    *reinterpret_cast<uint4*>(first + begin / kVector * kQuadTokens * kVectorBytes) =
        make_uint4(words[0], words[1], words[2], words[3]);
  }
}

template <DType kKv>
__device__ __forceinline__ void StoreElement(std::byte* to, float x) {
  const uint32_t bits = Encode<kKv>(x);
  if constexpr (SizeOf(kKv) == 1) {
    *reinterpret_cast<uint8_t*>(to) = static_cast<uint8_t>(bits);
  } else {
    *reinterpret_cast<uint16_t*>(to) = static_cast<uint16_t>(bits);
  }
}

// One token of a quad: single elements between those of its neighbours.
template <DType kKv>
__device__ __forceinline__ void StoreValue(const PlaneAddress<kKv>& address, int64_t slot, int d,
                                           const float (&x)[kDims]) {
#pragma unroll
  for (int i = 0; i < kDims; ++i) StoreElement<kKv>(address.Value(slot, d + i), x[i]);
}

// Any elements, one after the other, as the host does it.
template <DType kKv, bool kWide>
__device__ __noinline__ void AppendWithCare(const AppendArgs& args, bool values, int32_t first,
                                            int head, int d_begin) {
  const float* scales = values ? args.v_scale : args.k_scale;
  const float scale = scales == nullptr ? 1.0f : __ldg(scales + head);
  const PlaneAddress<kKv> address{args, head};
  for (int32_t place = first; place < min(first + kQuadTokens, args.tokens); ++place) {
    const int64_t slot = __ldg(args.slots + place);
    if (slot < 0) continue;
    const int32_t token = args.listed == nullptr ? place : __ldg(args.listed + place);
    const int dims = values ? args.geometry.value_dim : args.geometry.key_dim;
    for (int d = d_begin; d < d_begin + kDims; ++d) {
      const size_t element = (size_t(token) * args.geometry.kv_heads + head) * dims + d;
      const void* data = values ? args.v : args.k;
      float x = 0.0f;
      if constexpr (kWide) {
        x = static_cast<const float*>(data)[element];
      } else {
        const uint16_t bits = static_cast<const uint16_t*>(data)[element];
        x = args.input_dtype == DType::kBf16 ? FloatFromBf16(bits) : FloatFromF16(bits);
      }
      if (x == x && scale != 1.0f) x = __fdiv_rn(x, scale);  // a NaN keeps its bits
      StoreElement<kKv>(values ? address.Value(slot, d) : address.Key(slot, d), x);
    }
  }
}

// The keys of a thread's quad of tokens.
template <DType kKv, bool kWide, bool kListed>
__device__ __forceinline__ void AppendKeys(const AppendArgs& args, const RawElements<kWide>& raw,
                                           const Quad<kListed>& quad, int32_t first, int head,
                                           int d) {
  const PlaneAddress<kKv> address{args, head};
  Elements x;
  if (!WidenAndUnscale<kKv>(raw, args.input_dtype, args.k_scale, head, x)) {
    AppendWithCare<kKv, kWide>(args, /*values=*/false, first, head, d);
    return;
  }
  if (quad.IsWhole() && !InKeyTail(d, args.geometry.key_dim, SizeOf(kKv))) {
    StoreKeyQuad<kKv>(address.Key(quad.slots[0], d), x);
    return;
  }
#pragma unroll
  for (int i = 0; i < kQuadTokens; ++i) {
    if (quad.slots[i] >= 0) StoreKey<kKv>(address, quad.slots[i], d, x[i]);
  }
}

// Its values.
template <DType kKv, bool kWide, bool kListed>
__device__ __forceinline__ void AppendValues(const AppendArgs& args, const RawElements<kWide>& raw,
                                             const Quad<kListed>& quad, int32_t first, int head,
                                             int d) {
  const PlaneAddress<kKv> address{args, head};
  Elements x;
  if (!WidenAndUnscale<kKv>(raw, args.input_dtype, args.v_scale, head, x)) {
    AppendWithCare<kKv, kWide>(args, /*values=*/true, first, head, d);
    return;
  }
  if (quad.IsWhole()) {
    StoreValueQuad<kKv>(address.Value(quad.slots[0], d), x);
    return;
  }
#pragma unroll
  for (int i = 0; i < kQuadTokens; ++i) {
    if (quad.slots[i] >= 0) StoreValue<kKv>(address, quad.slots[i], d, x[i]);
  }
}

// The same of an NVFP4 cache. Lane r * 4 + t has a block's other dimensions in lane (r ^ 1) * 4 +
// t.
template <bool kWide>
__device__ __forceinline__ void QuantizeQuad(const AppendArgs& args, const RawElements<kWide>& raw,
                                             const float* scales, int head,
                                             Nvfp4Codes (&codes)[kQuadTokens]) {
  constexpr int kOther = 4;
  const float scale = scales == nullptr ? 1.0f : __ldg(scales + head);
  Elements x;
  raw.Widen(args.input_dtype, x);
#pragma unroll
  for (int i = 0; i < kQuadTokens; ++i) {
    codes[i] = QuantizeBlock(x[i], scale, PairOfLanes(kOther), kOther);
  }
}
template <bool kWide, bool kListed>
__device__ __forceinline__ void AppendNvfp4Keys(const AppendArgs& args,
                                                const RawElements<kWide>& raw,
                                                const Quad<kListed>& quad, int head, int d) {
  Nvfp4Codes codes[kQuadTokens];
  QuantizeQuad(args, raw, args.k_scale, head, codes);
  const Nvfp4Address address(args, head);
#pragma unroll
  for (int i = 0; i < kQuadTokens; ++i) {
    if (quad.slots[i] >= 0) address.StoreKey(quad.slots[i], d, codes[i]);
  }
}
template <bool kWide, bool kListed>
__device__ __forceinline__ void AppendNvfp4Values(const AppendArgs& args,
                                                  const RawElements<kWide>& raw,
                                                  const Quad<kListed>& quad, int head, int d) {
  Nvfp4Codes codes[kQuadTokens];
  QuantizeQuad(args, raw, args.v_scale, head, codes);
  const Nvfp4Address address(args, head);
  if (quad.IsWhole()) {
    address.StoreValueQuad(quad.slots[0], d, codes);
    return;
  }
#pragma unroll
  for (int i = 0; i < kQuadTokens; ++i) {
    if (quad.slots[i] >= 0) address.StoreValue(quad.slots[i], d, codes[i]);
  }
}

// Dimensions of a key with its padding. `dtype` is the geometry's, which kernels know as a
// constant.
__host__ __device__ constexpr int PaddedKeyDim(const KvGeometry& g, DType dtype) {
  if (dtype == DType::kNvfp4) return g.key_dim;
  const int bytes = static_cast<int>(SizeOf(dtype));
  return KeyStride(g.key_dim, bytes) / bytes;
}

// Slices of 64 dimensions: of keys with their padding, or of values if they have more.
__host__ __device__ constexpr int Slices(const KvGeometry& g, DType dtype) {
  const int keys = PaddedKeyDim(g, dtype);
  return ((keys > g.value_dim ? keys : g.value_dim) + 63) / 64;
}

// Lane (r, t) of a warp takes dimensions [8r, 8r + 8) of tokens [4t, 4t + 4) of its 16: its writes
// and its neighbours' fill whole sectors. kWide: input is f32.
template <DType kKv, bool kWide, AppendMode kMode>
__global__ void __launch_bounds__(32 * kWarps, kBlocks<kWide>)
    AppendKernel(const __grid_constant__ AppendArgs args) {
  constexpr bool kListed = kMode == AppendMode::kListed;
  constexpr bool kGated = kMode == AppendMode::kGated;
  // What the plan says is read while launches ahead are still running.
  const KvGeometry& g = args.geometry;
  const auto lane = static_cast<int32_t>(threadIdx.x % 32);
  const int32_t slices = Slices(g, kKv);
  const auto unit = static_cast<int32_t>(blockIdx.x * kWarps + threadIdx.x / 32);
  const int32_t slice = unit % slices;
  const int32_t head = unit / slices % g.kv_heads;
  const int32_t first = unit / slices / g.kv_heads * kStripSlots + lane % 4 * kQuadTokens;
  const Quad<kListed> quad(args, first);
  mailbox::SessionCounter session;
  if (kGated && args.gate.layer > 0) session = mailbox::CounterOf(args.gate);
  // In this order: who begins behind it counts on all that is ahead (AttentionArgs::late_strips).
  WaitForLaunchesAhead();
  if constexpr (kGated) {
    if (args.gate.layer == 0) session = mailbox::CounterOf(args.gate);
    if (threadIdx.x == 0) mailbox::PassGate(args.gate, session, /*first=*/blockIdx.x == 0);
    __syncthreads();
    // (By a thread of another warp, since it takes its time.)
    if (args.gate.begun != nullptr && blockIdx.x == 0 && threadIdx.x == 32) {
      mailbox::TellPassed(args.gate, session);
    }
  }
  LetNextLaunchBegin();
  if (quad.IsPadding()) return;
  const int d = slice * 64 + lane / 4 * kDims;
  const bool has_keys = d < g.key_dim;
  const bool has_values = d < g.value_dim;
  const auto load = [&](const void* data, int dims, RawElements<kWide>& raw) {
    raw.Load(data, size_t(head) * dims + d, size_t(g.kv_heads) * dims, quad);
  };
  RawElements<kWide> raw_k, raw_v;
  if (has_keys) load(args.k, g.key_dim, raw_k);
  if (has_values) load(args.v, g.value_dim, raw_v);
  if constexpr (kKv == DType::kNvfp4) {
    if (has_keys) AppendNvfp4Keys(args, raw_k, quad, head, d);
    if (has_values) AppendNvfp4Values(args, raw_v, quad, head, d);
  } else {
    if (has_keys) {
      AppendKeys<kKv>(args, raw_k, quad, first, head, d);
    } else if (d < PaddedKeyDim(g, kKv)) {
      for (const int64_t slot : quad.slots) {
        if (slot >= 0) StoreKeyPadding<kKv>({args, head}, slot, d);
      }
    }
    if (has_values) AppendValues<kKv>(args, raw_v, quad, first, head, d);
  }
}

}  // namespace

int32_t AppendBlocks(const KvGeometry& geometry, int32_t tokens) {
  const int64_t units = int64_t{(tokens + kStripSlots - 1) / kStripSlots} * geometry.kv_heads *
                        Slices(geometry, geometry.dtype);
  return static_cast<int32_t>((units + kWarps - 1) / kWarps);
}

Status LaunchAppend(const AppendArgs& args, cudaStream_t stream) {
  if (!IsUnscaled(args.input_dtype)) {
    return Unsupported(std::string("input_dtype: ") + Name(args.input_dtype) +
                       " is not f32, bf16 or f16");
  }
  if (args.tokens < 0) return InvalidArgument("tokens: must not be negative");
  const bool listed = args.listed != nullptr;
  const bool gated = args.gate.arrived != nullptr;
  if (listed && gated) return InvalidArgument("listed: a launch that passes a gate has no list");
  if (args.tokens == 0) return Status::Ok();
  const int32_t blocks = AppendBlocks(args.geometry, args.tokens);
  const KvGeometry& g = args.geometry;
  return DispatchKvType(g.dtype, [&](auto kv) {
    return DispatchHeadDims<&HeadDims::append>(g.key_dim, g.value_dim, [&](auto, auto) {
      constexpr DType kKv = kv();
      const auto kernel_of = [&]<AppendMode kMode>() {
        return args.input_dtype == DType::kF32 ? AppendKernel<kKv, true, kMode>
                                               : AppendKernel<kKv, false, kMode>;
      };
      const auto kernel = gated    ? kernel_of.template operator()<AppendMode::kGated>()
                          : listed ? kernel_of.template operator()<AppendMode::kListed>()
                                   : kernel_of.template operator()<AppendMode::kPlain>();
      const cudaError_t error =
          LaunchGrid(kernel, args, {.clusters = blocks, .begins_early = args.begins_early},
                     32 * kWarps, /*shared_bytes=*/0, stream);
      return CudaStatus(error, "append kernel");
    });
  });
}

}  // namespace tributary::cuda
