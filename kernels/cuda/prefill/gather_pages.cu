#include <algorithm>

#include "kernels/cuda/dispatch.h"
#include "kernels/cuda/layout/nvfp4_layout.h"
#include "kernels/cuda/layout/page_layout.h"
#include "kernels/cuda/prefill/gather_pages.h"
#include "kernels/cuda/ptx/ptx.cuh"
#include "kernels/cuda/ptx/widen.cuh"
#include "kernels/cuda/ptx/widen_nvfp4.cuh"

namespace tributary::cuda {
namespace {

constexpr int kDims = 8;        // that a thread takes of a token
constexpr int kSliceDims = 64;  // that a warp takes of a token
constexpr int kWarps = kGatherSlots / kStripSlots;
static_assert(kWarps * kStripSlots == kGatherSlots);
static_assert(kDims * (32 / kQuadTokens) == kSliceDims);

// Where the planes of a page are, in bytes, and how many warps share the dimensions of a head.
struct Planes {
  size_t page_bytes;
  size_t key_bytes;    // of one head
  size_t value_begin;  // from the begin of the page
  size_t value_bytes;  // of one head
  int slices;
};

Planes PlanesOf(const KvGeometry& g, int32_t page_size) {
  const int widest = std::max(g.key_dim, g.value_dim);
  return {.page_bytes = PageBytes(g, page_size),
          .key_bytes = KeyPlaneBytes(g, page_size),
          .value_begin = ValuePlaneOffset(g, page_size, 0),
          .value_bytes = ValuePlaneBytes(g, page_size),
          .slices = (widest + kSliceDims - 1) / kSliceDims};
}

// Two elements of the compute type, from two elements of the cache: the low half of `pair` (FP8) or
// all of it (16 bits).
template <DType kKv, DType kCompute>
__device__ __forceinline__ uint32_t WidenPair(uint32_t pair) {
  if constexpr (SizeOf(kKv) == 2) return pair;
  const uint32_t f16 = kKv == DType::kFp8E4M3 ? WidenE4M3<false>(pair) : WidenE5M2<false>(pair);
  if constexpr (kCompute == DType::kF16) return f16;
  const float2 x = __half22float2(*reinterpret_cast<const __half2*>(&f16));
  return Pack<DType::kBf16>(x.x, x.y);  // exact
}

// The same of kCount elements.
template <DType kKv, DType kCompute, int kCount>
__device__ __forceinline__ void WidenAll(const uint32_t (&in)[kCount * SizeOf(kKv) / 4],
                                         uint32_t (&out)[kCount / 2]) {
#pragma unroll
  for (int i = 0; i < kCount / 2; ++i) {
    const uint32_t pair = SizeOf(kKv) == 2 ? in[i] : in[i / 2] >> (i % 2 * 16);
    out[i] = WidenPair<kKv, kCompute>(pair);
  }
}

template <int kWords>
__device__ __forceinline__ void LoadWords(const std::byte* from, uint32_t (&words)[kWords]) {
  if constexpr (kWords == 2) {
    const uint2 x = LoadStreaming8(from);
    words[0] = x.x, words[1] = x.y;
  } else {
    static_assert(kWords == 4);
    const uint4 x = LoadStreaming(from);
    words[0] = x.x, words[1] = x.y, words[2] = x.z, words[3] = x.w;
  }
}

// Loads dimensions [d, d + 8) of the keys of four consecutive tokens, as they are. In the tail
// panel only eight bytes of a key lie side by side.
template <DType kKv>
__device__ __forceinline__ void LoadKeys(const std::byte* plane, int token, int d, int head_dim,
                                         uint32_t (&k)[kQuadTokens][kDims * SizeOf(kKv) / 4]) {
#pragma unroll
  for (int i = 0; i < kQuadTokens; ++i) {
    const std::byte* from = plane + KeyOffset(token + i, d, head_dim, SizeOf(kKv));
    if constexpr (SizeOf(kKv) == 2) {
      if (InKeyTail(d, head_dim, SizeOf(kKv))) {
        const uint2 low = LoadStreaming8(from);
        const uint2 high =
            LoadStreaming8(plane + KeyOffset(token + i, d + kDims / 2, head_dim, SizeOf(kKv)));
        k[i][0] = low.x, k[i][1] = low.y, k[i][2] = high.x, k[i][3] = high.y;
        continue;
      }
    }
    LoadWords(from, k[i]);
  }
}

// Loads the same dimensions of their values, widened. In the page, four tokens of one dimension lie
// side by side; here the dimensions of one token do.
template <DType kKv, DType kCompute>
__device__ __forceinline__ void LoadValues(const std::byte* plane, int token, int d, int head_dim,
                                           uint32_t (&v)[kQuadTokens][kDims / 2]) {
  constexpr int kVectorDims = ValueVectorDims(SizeOf(kKv));
  constexpr int kVectors = kDims / kVectorDims;
  uint32_t raw[kVectors][4];
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    LoadWords(plane + ValueOffset(token, d + i * kVectorDims, head_dim, SizeOf(kKv)), raw[i]);
  }
  uint32_t wide[kDims][2];  // a dimension's tokens (0, 1) and (2, 3)
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    uint32_t pairs[kVectorDims * 2];
    WidenAll<kKv, kCompute, kVectorDims * kQuadTokens>(raw[i], pairs);
#pragma unroll
    for (int j = 0; j < kVectorDims; ++j) {
      wide[i * kVectorDims + j][0] = pairs[2 * j];
      wide[i * kVectorDims + j][1] = pairs[2 * j + 1];
    }
  }
#pragma unroll
  for (int i = 0; i < kQuadTokens; ++i) {
    const uint32_t selector = i % 2 == 0 ? 0x5410 : 0x7632;
#pragma unroll
    for (int j = 0; j < kDims / 2; ++j) {
      v[i][j] = __byte_perm(wide[2 * j][i / 2], wide[2 * j + 1][i / 2], selector);
    }
  }
}

// Loads the values of four consecutive tokens in FP8, dimensions [d, d + 8), as they lie in the
// page: a word for each dimension.
template <DType kKv>
__device__ __forceinline__ void LoadQuads(const std::byte* plane, int token, int d, int head_dim,
                                          uint32_t (&quads)[kDims]) {
  constexpr int kVectorDims = ValueVectorDims(SizeOf(kKv));
#pragma unroll
  for (int i = 0; i < kDims; i += kVectorDims) {
    auto& vector = reinterpret_cast<uint32_t(&)[kVectorDims]>(quads[i]);
    LoadWords(plane + ValueOffset(token, d + i, head_dim, SizeOf(kKv)), vector);
  }
}

// Stores them, one row for each dimension. `alive` has the bits of the tokens that some row sees.
__device__ __forceinline__ void StoreQuads(const uint32_t (&quads)[kDims], uint32_t alive,
                                           std::byte* to, int row_bytes) {
#pragma unroll
  for (int i = 0; i < kDims; ++i) {
    *reinterpret_cast<uint32_t*>(to + i * row_bytes) = quads[i] & alive;
  }
}

// Turns pairs of f16, short of an NVFP4 cache's unit, into the compute type. Exact.
template <DType kCompute, int kCount>
__device__ __forceinline__ void CompletePairs(uint32_t (&pairs)[kCount]) {
#pragma unroll
  for (uint32_t& pair : pairs) {
    if constexpr (kCompute == DType::kF16) {
      pair = MultiplyPairs(pair, 0x74007400u);  // 2^14
    } else {
      const float2 x = __half22float2(*reinterpret_cast<const __half2*>(&pair));
      constexpr float kUnit = ElementUnit(DType::kNvfp4);
      pair = Pack<DType::kBf16>(x.x * kUnit, x.y * kUnit);
    }
  }
}

// The same dimensions of keys and of values of an NVFP4 cache, widened: pairs of dimensions.
template <DType kCompute>
__device__ __forceinline__ void LoadNvfp4Keys(const std::byte* plane, int token, int d, int key_dim,
                                              uint32_t (&k)[kQuadTokens][kDims / 2]) {
#pragma unroll
  for (int i = 0; i < kQuadTokens; ++i) {
    const auto scale = static_cast<uint32_t>(plane[Nvfp4KeyScale(token + i, d, key_dim)]) * 0x0101u;
    const std::byte* const from = plane + Nvfp4KeyWord(token + i, d, key_dim);
    uint32_t(&pairs)[kDims / 2] = k[i];
    if (KeyPieceOf(d, key_dim).dims == kNvfp4Block) {
      // Two bytes of four dimensions each, in two lanes' words; see Nvfp4Keys::Widen.
      const std::byte* const next = plane + Nvfp4KeyWord(token + i, d + 4, key_dim);
      uint32_t halves[4];
      WidenCodes(*reinterpret_cast<const uint16_t*>(from) |
                     uint32_t{*reinterpret_cast<const uint16_t*>(next)} << 16,
                 halves);
      pairs[0] = __byte_perm(halves[1], halves[0], 0x5410);
      pairs[1] = __byte_perm(halves[3], halves[2], 0x5410);
      pairs[2] = __byte_perm(halves[1], halves[0], 0x7632);
      pairs[3] = __byte_perm(halves[3], halves[2], 0x7632);
    } else {
      WidenCodes(*reinterpret_cast<const uint32_t*>(from), pairs);
    }
    const uint32_t twice = WidenE4M3<false>(scale);
#pragma unroll
    for (uint32_t& pair : pairs) pair = MultiplyPairs(pair, twice);
    CompletePairs<kCompute>(pairs);
  }
}
template <DType kCompute>
__device__ __forceinline__ void LoadNvfp4Values(const std::byte* plane, int token, int d,
                                                int value_dim,
                                                uint32_t (&v)[kQuadTokens][kDims / 2]) {
  uint32_t raw[4];
  LoadWords(plane + Nvfp4ValueWord(token, d, value_dim), raw);
  const uint32_t scales =
      *reinterpret_cast<const uint32_t*>(plane + Nvfp4ValueScale(token, d, value_dim));
#pragma unroll
  for (int word = 0; word < kDims / 2; ++word) {
    // Of two dimensions tokens (0, 1) and (2, 3): a[0], a[2], and a[1], a[3].
    uint32_t a[4];
    WidenValueWord(raw[word], scales, a);
    CompletePairs<kCompute>(a);
    v[0][word] = __byte_perm(a[0], a[1], 0x5410);
    v[1][word] = __byte_perm(a[0], a[1], 0x7632);
    v[2][word] = __byte_perm(a[2], a[3], 0x5410);
    v[3][word] = __byte_perm(a[2], a[3], 0x7632);
  }
}

// Stores eight elements of a row, or zeros when the slot is dead.
template <int kWords>
__device__ __forceinline__ void StoreRow(std::byte* to, bool alive, const uint32_t (&x)[kWords]) {
  if constexpr (kWords == 2) {
    *reinterpret_cast<uint2*>(to) = alive ? make_uint2(x[0], x[1]) : make_uint2(0, 0);
  } else {
    *reinterpret_cast<uint4*>(to) =
        alive ? make_uint4(x[0], x[1], x[2], x[3]) : make_uint4(0, 0, 0, 0);
  }
}

// A warp takes 16 slots and 64 dimensions of one head, keys and values. Lane (r, t) takes
// dimensions [8r, 8r + 8) of slots [4t, 4t + 4): so the warp reads whole sectors of the page and
// writes 128 consecutive bytes of a row.
template <DType kKv, DType kCompute, KeptFp8 kKept>
__global__ void __launch_bounds__(32 * kWarps)
    GatherPagesKernel(const __grid_constant__ GatherArgs args,
                      const __grid_constant__ Planes planes) {
  const PrefillGather gather = args.gathers[blockIdx.x];
  const int key_dim = args.geometry.key_dim;
  const int value_dim = args.geometry.value_dim;
  const int kv_heads = args.geometry.kv_heads;
  const int head = blockIdx.y / planes.slices;
  const int lane = threadIdx.x % 32;
  const int d = blockIdx.y % planes.slices * kSliceDims + lane / 4 * kDims;
  const int in_tile = threadIdx.x / 32 * kStripSlots + lane % 4 * kQuadTokens;
  const int slot = gather.first_slot + in_tile;
  constexpr bool kIsNvfp4 = kKv == DType::kNvfp4;
  uint32_t k[kQuadTokens][kIsNvfp4 ? kDims / 2 : kDims * SizeOf(kKv) / 4] = {};
  uint32_t v[kQuadTokens][kDims / 2] = {};
  uint32_t quads[kDims] = {};
  if (slot < gather.slot_end && slot + kQuadTokens > gather.slot_begin) {
    const int shift = __ffs(args.page_size) - 1;
    const int page = __ldg(args.page_tables + gather.page_table + (slot >> shift));
    const std::byte* const keys = args.cache + page * planes.page_bytes;
    const int token = slot & (args.page_size - 1);
    const std::byte* const key_plane = keys + head * planes.key_bytes;
    const std::byte* const value_plane = keys + planes.value_begin + head * planes.value_bytes;
    if constexpr (kIsNvfp4) {
      if (d < key_dim) LoadNvfp4Keys<kCompute>(key_plane, token, d, key_dim, k);
      if (d < value_dim) LoadNvfp4Values<kCompute>(value_plane, token, d, value_dim, v);
    } else {
      if (d < key_dim) LoadKeys<kKv>(key_plane, token, d, key_dim, k);
      if constexpr (kKept == KeptFp8::kKeysAndValues) {
        if (d < value_dim) LoadQuads<kKv>(value_plane, token, d, value_dim, quads);
      } else {
        if (d < value_dim) LoadValues<kKv, kCompute>(value_plane, token, d, value_dim, v);
      }
    }
  }
  const size_t row = size_t(blockIdx.x) * kGatherSlots + in_tile;
  constexpr bool kTransposes = kKept == KeptFp8::kKeysAndValues;
  uint32_t alive_bytes = 0;
#pragma unroll
  for (int i = 0; i < kQuadTokens; ++i) {
    const bool alive = slot + i >= gather.slot_begin && slot + i < gather.slot_end;
    const size_t in_head = (row + i) * kv_heads + head;
    if (alive) alive_bytes |= 0xffu << (8 * i);
    if constexpr (!kTransposes) {
      if (d < value_dim) StoreRow(args.v + (in_head * value_dim + d) * 2, alive, v[i]);
    }
    if (d >= key_dim) continue;
    const int moved =
        kTransposes ? KeyRow((in_tile + i) % kStripSlots) - (in_tile + i) % kStripSlots : 0;
    const size_t at = (in_head + moved * kv_heads) * key_dim + d;
    if constexpr (kKept != KeptFp8::kNothing) {
      StoreRow(args.k + at * SizeOf(kKv), alive, k[i]);
    } else if constexpr (kIsNvfp4) {
      StoreRow(args.k + at * 2, alive, k[i]);
    } else {
      uint32_t wide[kDims / 2];
      WidenAll<kKv, kCompute, kDims>(k[i], wide);
      StoreRow(args.k + at * 2, alive, wide);
    }
  }
  if constexpr (kTransposes) {
    if (d >= value_dim) return;
    const int keys = args.keys_per_tile;
    StoreQuads(quads, alive_bytes,
               args.v + ((row / keys * kv_heads + head) * value_dim + d) * keys + row % keys, keys);
  }
}

}  // namespace

cudaError_t RunGatherPages(const GatherArgs& args, cudaStream_t stream) {
  const Planes planes = PlanesOf(args.geometry, args.page_size);
  const dim3 grid(args.gather_count, args.geometry.kv_heads * planes.slices);
  const auto run = [&](auto kernel) { kernel<<<grid, 32 * kWarps, 0, stream>>>(args, planes); };
  const Status status = DispatchKvType(args.geometry.dtype, [&](auto kv) {
    constexpr DType kKv = kv();
    if constexpr (IsUnscaled(kKv)) {
      run(GatherPagesKernel<kKv, kKv, KeptFp8::kNothing>);
    } else if (IsFp8(kKv) && args.kept != KeptFp8::kNothing) {
      if constexpr (IsFp8(kKv)) {
        args.kept == KeptFp8::kKeys
            ? run(GatherPagesKernel<kKv, DType::kF16, KeptFp8::kKeys>)
            : run(GatherPagesKernel<kKv, DType::kF16, KeptFp8::kKeysAndValues>);
      }
    } else if (args.compute == DType::kBf16) {
      run(GatherPagesKernel<kKv, DType::kBf16, KeptFp8::kNothing>);
    } else {
      run(GatherPagesKernel<kKv, DType::kF16, KeptFp8::kNothing>);
    }
    return Status::Ok();
  });
  return status.ok() ? cudaGetLastError() : cudaErrorNotSupported;
}

}  // namespace tributary::cuda
