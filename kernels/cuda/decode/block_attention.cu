#include <cuda_fp16.h>

#include <algorithm>
#include <string>

#include "kernels/cuda/decode/block_attention.h"
#include "kernels/cuda/decode/draft_block.cuh"
#include "kernels/cuda/decode/hidden_values.cuh"
#include "kernels/cuda/decode/packed_rows.cuh"
#include "kernels/cuda/dispatch.h"
#include "kernels/cuda/ptx/cluster.cuh"
#include "kernels/cuda/status.h"
#include "kernels/lse.h"
#include "kernels/soft_cap.h"

namespace tributary::cuda {
namespace {

constexpr int kWarps = 4;
constexpr int kThreads = 32 * kWarps;

__device__ __forceinline__ float Widened(DType type, const void* data, size_t element) {
  if (type == DType::kF32) return __ldg(static_cast<const float*>(data) + element);
  const uint16_t bits = __ldg(static_cast<const uint16_t*>(data) + element);
  return type == DType::kBf16 ? __uint_as_float(uint32_t{bits} << 16)
                              : __half2float(__ushort_as_half(bits));
}

// How elements become those of the products. kSame: they are; then a kernel is a fifth of the size,
// and a launch this short spends its time on fetching instructions.
template <DType kCompute, bool kSame>
struct Elements {
  // Eight of a row; zeros when it is nobody's row.
  static __device__ __forceinline__ uint4 Eight(const void* data, DType type, size_t element,
                                                bool alive) {
    if (!alive) return make_uint4(0, 0, 0, 0);
    if constexpr (kSame) {
      return __ldg(reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(data) + element));
    } else {
      float x[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) x[i] = Widened(type, data, element + i);
      return make_uint4(Pack<kCompute>(x[0], x[1]), Pack<kCompute>(x[2], x[3]),
                        Pack<kCompute>(x[4], x[5]), Pack<kCompute>(x[6], x[7]));
    }
  }
  // Two, likewise.
  static __device__ __forceinline__ uint32_t Two(const void* data, DType type, size_t element,
                                                 bool alive) {
    if (!alive) return 0;
    if constexpr (kSame) {
      return __ldg(reinterpret_cast<const uint32_t*>(static_cast<const uint16_t*>(data) + element));
    } else {
      return Pack<kCompute>(Widened(type, data, element), Widened(type, data, element + 1));
    }
  }
};

// Adds the products of 32 dimensions. The order of the contraction index is free as long as both
// operands agree, so a thread's share is a vector of 8 dimensions of each of two packed rows and
// two tokens, 8 apart.
template <DType kCompute>
__device__ __forceinline__ void AddProducts(const uint4 (&q)[2], const uint4 (&k)[2],
                                            float (&s)[2][4]) {
  const uint32_t low[4] = {q[0].x, q[1].x, q[0].y, q[1].y};
  const uint32_t high[4] = {q[0].z, q[1].z, q[0].w, q[1].w};
#pragma unroll
  for (int tile = 0; tile < 2; ++tile) {
    Mma16x8x16<kCompute>(s[tile], low, k[tile].x, k[tile].y);
    Mma16x8x16<kCompute>(s[tile], high, k[tile].z, k[tile].w);
  }
}

// From logits to weights, and the packed rows' largest logit and sum of weights.
__device__ __forceinline__ void WeighTile(float (&s)[2][4], float (&largest)[2], float (&sum)[2]) {
  largest[0] = largest[1] = kNoReference;
#pragma unroll
  for (int i = 0; i < 8; ++i) largest[i / 2 % 2] = fmaxf(largest[i / 2 % 2], s[i / 4][i % 4]);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    largest[i] = fmaxf(largest[i], __shfl_xor_sync(0xffffffffu, largest[i], 1));
    largest[i] = fmaxf(largest[i], __shfl_xor_sync(0xffffffffu, largest[i], 2));
    sum[i] = 0.0f;
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    float& x = s[i / 4][i % 4];
    x = Exp2(x - largest[i / 2 % 2]);
    sum[i / 2 % 2] += x;
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    sum[i] += __shfl_xor_sync(0xffffffffu, sum[i], 1);
    sum[i] += __shfl_xor_sync(0xffffffffu, sum[i], 2);
  }
}

// Of the launch.
struct KernelArgs {
  BlockArgs block;
  int gqa_ratio = 1;  // query heads of a kv head
};

// One of a thread's two packed rows, which are 8 apart and shared with the three other lanes of its
// quad.
struct PackedRow {
  bool alive = false;
  int pair = 0;  // row * q_heads + head
  int head = 0;
  RowKeys keys = {0, 0};
  float lse2 = EmptyLse<float>();  // of the partial so far, in base 2
};

// What a tile of keys adds to a packed row, and what becomes of what was there.
struct TileWeights {
  float of_before;
  float of_tile;  // of unnormalised products
};

// The largest divisor of `n` that is at most `most`.
constexpr int LargestDivisor(int n, int most) {
  int divisor = n < most ? n : most;
  while (n % divisor != 0) --divisor;
  return divisor;
}

// A warp's 16 packed rows. The order of the contraction index is free as long as both operands
// agree, so a thread's share of a row is whole vectors of 8 dimensions; so is the order of
// dimensions of the output, and a thread's are 4 neighbours of every 16.
//
// Each tile of keys is merged into the result as soon as it is computed: blocks have a tile or two,
// and a launch this short spends its time on fetching instructions, so few of them count more than
// few loads.
template <DType kCompute, int kKeyDim, int kValueDim, bool kSame>
class WarpBlock {
 public:
  __device__ __forceinline__ WarpBlock(const KernelArgs& args, const BlockEntry& entry, int kv_head,
                                       int first_packed_row)
      : args_(args.block), entry_(entry), kv_head_(kv_head) {
    const int first_head = max(kv_head * args.gqa_ratio, args_.head_begin);
    const int heads =
        min((kv_head + 1) * args.gqa_ratio, args_.head_begin + args_.head_count) - first_head;
    const float inverse = __frcp_rn(static_cast<float>(heads));
    bool hides = false;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int packed_row = first_packed_row + Quad() + 8 * i;
      PackedRow& c = packed_rows_[i];
      c.alive = packed_row < entry.row_count * heads;
      if (!c.alive) continue;
      // Exact: the half keeps the quotient as far from an integer as rounding can never bring it.
      const int in_entry = static_cast<int>((static_cast<float>(packed_row) + 0.5f) * inverse);
      const int row = entry.row_begin + in_entry;
      c.head = first_head + packed_row - in_entry * heads;
      c.pair = row * args_.q_heads + c.head;
      c.keys = args_.keys[row];
      hides |=
          c.keys.begin > entry.token_begin || c.keys.end < entry.token_begin + entry.token_count;
    }
    rows_differ_ = __any_sync(0xffffffffu, hides);
  }

  // before_merging() is called once, when all that can be done without the partial is done. Without
  // tokens there is one tile, of which no row sees anything: the partial stays, and gets its sinks.
  template <typename F>
  __device__ __forceinline__ void Run(F before_merging) {
    int key = 0;
#pragma unroll 1
    do {
      float s[2][4] = {};
      MultiplyKeys(key, s);
      MakeDraftLogits(args_.sm_scale, args_.soft_cap, {packed_rows_[0].keys, packed_rows_[1].keys},
                      entry_.token_begin + key, s);
      float largest[2], sum[2];
      WeighTile(s, largest, sum);
      uint32_t p[4];
      PackDraftWeights<kCompute>(s, p);
      Merge(key, p, largest, sum, before_merging);
      key += kDraftTokens;
    } while (key < entry_.token_count);
    __syncwarp();  // the quad has read what one of it is about to write
#pragma unroll
    for (const PackedRow& c : packed_rows_) {
      if (c.alive && Place() == 0) args_.lse[c.pair] = c.lse2 * kLn2;
    }
  }

 private:
  using From = Elements<kCompute, kSame>;
  // Two products of 16 dimensions each; of the last one the second may have nothing to multiply.
  static constexpr int kSteps = (kKeyDim + 31) / 32;
  static constexpr int kStepsAtOnce = LargestDivisor(kSteps, 4);
  static constexpr int kVectors = kValueDim / 16;  // two tiles of 8 dimensions each
  static constexpr int kVectorsAtOnce = LargestDivisor(kVectors, 8);
  static_assert(kKeyDim % 8 == 0 && kValueDim % 16 == 0);

  static __device__ __forceinline__ int Quad() { return threadIdx.x % 32 / 4; }
  static __device__ __forceinline__ int Place() { return threadIdx.x % 4; }

  __device__ __forceinline__ size_t TokenElement(int key, int dims) const {
    return (size_t(entry_.token_begin + key) * args_.kv_heads + kv_head_) * dims;
  }

  __device__ __forceinline__ void MultiplyKeys(int first_key, float (&s)[2][4]) const {
    const int key = first_key + Quad();
    const bool alive[2] = {key < entry_.token_count, key + 8 < entry_.token_count};
#pragma unroll 1
    for (int begin = 0; begin < kSteps; begin += kStepsAtOnce) {
      uint4 q[kStepsAtOnce][2], k[kStepsAtOnce][2];
#pragma unroll
      for (int i = 0; i < kStepsAtOnce; ++i) {
        const int d = (begin + i) * 32 + Place() * 8;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const bool there = kKeyDim % 32 == 0 || d < kKeyDim;
          q[i][half] =
              From::Eight(args_.q, args_.q_dtype, size_t(packed_rows_[half].pair) * kKeyDim + d,
                          there && packed_rows_[half].alive);
          k[i][half] = From::Eight(args_.k, args_.kv_dtype,
                                   TokenElement(key + 8 * half, kKeyDim) + d, there && alive[half]);
        }
      }
#pragma unroll
      for (int i = 0; i < kStepsAtOnce; ++i) AddProducts<kCompute>(q[i], k[i], s);
    }
  }

  // The sink's share is taken from the last tile's merge.
  __device__ __forceinline__ TileWeights MergeLse(float largest, float sum, bool last,
                                                  PackedRow& c) const {
    const float tile = sum == 0.0f ? EmptyLse<float>() : largest + __log2f(sum);
    // (As Merge of kernels/lse.h, in base 2: a NaN on either side comes out as NaN.)
    const float top = c.lse2 > tile || c.lse2 != c.lse2 ? c.lse2 : tile;
    if (top == EmptyLse<float>()) return {0.0f, 0.0f};
    const float before = Exp2(c.lse2 - top);
    const float added = Exp2(tile - top);
    c.lse2 = top + __log2f(before + added);
    float inverse = __fdividef(1.0f, before + added);
    if (last && c.alive && args_.sinks != nullptr) {
      inverse *= SinkScale(c.lse2 * kLn2, args_.sinks[c.head - args_.head_begin]);
    }
    return {before * inverse, sum == 0.0f ? 0.0f : added * __fdividef(inverse, sum)};
  }

  // Products of the weights and a tile of values, into the result. Everything is asked for before
  // anything is waited for: values first, which no launch ahead writes; the partial's LSE together
  // with its output.
  template <typename F>
  __device__ __forceinline__ void Merge(int first_key, const uint32_t (&p)[4],
                                        const float (&largest)[2], const float (&sum)[2],
                                        F before_merging) {
    float* o[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      o[i] = args_.o + size_t(packed_rows_[i].pair) * kValueDim + Place() * 4;
    }
    TileWeights weights[2];
#pragma unroll 1
    for (int begin = 0; begin < kVectors; begin += kVectorsAtOnce) {
      uint32_t v[kVectorsAtOnce][4];
#pragma unroll
      for (int i = 0; i < kVectorsAtOnce; ++i) {
#pragma unroll
        for (int word = 0; word < 4; ++word) {
          const int key = first_key + Place() * 2 + word % 2 + word / 2 * 8;
          v[i][word] = From::Two(args_.v, args_.kv_dtype,
                                 TokenElement(key, kValueDim) + (begin + i) * 16 + Quad() * 2,
                                 key < entry_.token_count);
        }
      }
      const bool confines = rows_differ_ && AnyNonFinite(v);
      if (__builtin_expect(confines, 0)) KeepFinite(v);
      // tiles[i][half]: of a packed row, its four dimensions of the i-th vector.
      float4 tiles[kVectorsAtOnce][2];
#pragma unroll
      for (int i = 0; i < kVectorsAtOnce; ++i) {
        const uint32_t(&x)[4] = v[i];
        float even[4] = {}, odd[4] = {};
        Mma16x8x16<kCompute>(even, p, __byte_perm(x[0], x[1], 0x5410),
                             __byte_perm(x[2], x[3], 0x5410));
        Mma16x8x16<kCompute>(odd, p, __byte_perm(x[0], x[1], 0x7632),
                             __byte_perm(x[2], x[3], 0x7632));
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          tiles[i][half] =
              make_float4(even[2 * half], odd[2 * half], even[2 * half + 1], odd[2 * half + 1]);
        }
      }
      // What follows is fetched from L2, an instruction at a time, and everybody waits for it. So a
      // first round is made while the launch ahead still runs, and nothing is stored. (Past L1,
      // where what that round read would stay.)
      const bool first = begin == 0 && first_key == 0;
#pragma unroll 1
      for (bool merges = !first || !args_.begins_early;; merges = true) {
        if (first) {
          if (merges) before_merging();
#pragma unroll
          for (PackedRow& c : packed_rows_) {
            if (c.alive) c.lse2 = __ldcg(args_.lse + c.pair);
          }
        }
        float4 before[kVectorsAtOnce][2];
#pragma unroll
        for (int i = 0; i < kVectorsAtOnce; ++i) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            if (packed_rows_[half].alive) {
              before[i][half] = __ldcg(reinterpret_cast<const float4*>(o[half] + (begin + i) * 16));
            }
          }
        }
        if (begin == 0) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            if (first_key == 0 && packed_rows_[i].alive) packed_rows_[i].lse2 *= kLog2E;
            weights[i] = MergeLse(largest[i], sum[i],
                                  first_key + kDraftTokens >= entry_.token_count, packed_rows_[i]);
          }
        }
#pragma unroll
        for (int i = 0; i < kVectorsAtOnce; ++i) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const float4 merged = Merged(weights[half], before[i][half], tiles[i][half]);
            if (!merges || !packed_rows_[half].alive) continue;
            *reinterpret_cast<float4*>(o[half] + (begin + i) * 16) = merged;
          }
        }
        if (merges) break;
      }
      if (__builtin_expect(confines, 0)) AddNonFinite(first_key, begin);
    }
  }

  // Values that are infinite or NaN and that only some rows see (hidden_values.cuh): whether a tile
  // has such, and what takes them out of it and adds them to the results of the rows that see them.
  static __device__ __forceinline__ bool AnyNonFinite(const uint32_t (&v)[kVectorsAtOnce][4]) {
    NonFiniteSearch<kCompute> search;
#pragma unroll
    for (int i = 0; i < kVectorsAtOnce; ++i) {
#pragma unroll
      for (int word = 0; word < 4; ++word) search.Look(v[i][word], word);
    }
    return __any_sync(0xffffffffu, search.Found());
  }
  static __device__ __forceinline__ void KeepFinite(uint32_t (&v)[kVectorsAtOnce][4]) {
#pragma unroll
    for (auto& words : v) {
#pragma unroll
      for (uint32_t& word : words) word &= ~NonFiniteMask<kCompute>(word);
    }
  }
  __device__ __forceinline__ void AddNonFinite(int first_key, int first_vector) const {
    const int last_key = min(first_key + kDraftTokens, entry_.token_count);
#pragma unroll 1
    for (int vector = first_vector; vector < first_vector + kVectorsAtOnce; ++vector) {
#pragma unroll 1
      for (int key = first_key; key < last_key; ++key) {
#pragma unroll 1
        for (int pair = 0; pair < 2; ++pair) {
          const int d = vector * 16 + Place() * 4 + pair * 2;
          const uint32_t word =
              From::Two(args_.v, args_.kv_dtype, TokenElement(key, kValueDim) + d, true);
          const float x[2] = {NonFiniteOrZero<kCompute>(word, 0),
                              NonFiniteOrZero<kCompute>(word, 1)};
#pragma unroll
          for (const PackedRow& c : packed_rows_) {
            if (!c.alive || !Sees(c.keys, entry_.token_begin + key)) continue;
            float* const o = args_.o + size_t(c.pair) * kValueDim + d;
            o[0] += x[0];
            o[1] += x[1];
          }
        }
      }
    }
  }

  // A partial without keys is left out altogether: its output may be anything.
  static __device__ __forceinline__ float4 Merged(TileWeights w, float4 before, float4 tile) {
    const bool any = w.of_before != 0.0f;
    const auto merged = [&](float x, float y) {
      return fmaf(w.of_before, any ? x : 0.0f, w.of_tile * y);
    };
    return make_float4(merged(before.x, tile.x), merged(before.y, tile.y), merged(before.z, tile.z),
                       merged(before.w, tile.w));
  }

  const BlockArgs& args_;
  const BlockEntry& entry_;
  const int kv_head_;
  bool rows_differ_;  // not every packed row of the warp sees all tokens
  PackedRow packed_rows_[2];
};

template <DType kCompute, int kKeyDim, int kValueDim, bool kSame>
__global__ void __launch_bounds__(kThreads) BlockKernel(const __grid_constant__ KernelArgs args) {
  LetNextLaunchBegin();
  const bool early = args.block.begins_early;
  if (!early) WaitForLaunchesAhead();
  const BlockEntry entry = args.block.entries[blockIdx.z];
  const int kv_head = args.block.head_begin / args.gqa_ratio + static_cast<int>(blockIdx.y);
  const int first_packed_row =
      (static_cast<int>(blockIdx.x) * kWarps + static_cast<int>(threadIdx.x) / 32) * kDraftRows;
  WarpBlock<kCompute, kKeyDim, kValueDim, kSame>(args, entry, kv_head, first_packed_row)
      .Run([early] {
        if (early) WaitForLaunchesAhead();
      });
}

template <DType kCompute, bool kSame>
Status Launch(BlockArgs args, cudaStream_t stream) {
  args.soft_cap = BoundedSoftCap(args.soft_cap);
  const int gqa_ratio = args.q_heads / args.kv_heads;
  const int first = args.head_begin / gqa_ratio;
  const int last = (args.head_begin + args.head_count - 1) / gqa_ratio;
  constexpr int kTileRows = kWarps * kDraftRows;
  // A slice may hold only a few of the heads that share a KV head; some packed rows are then
  // unused.
  const int packed_rows = args.most_rows * std::min(gqa_ratio, args.head_count);
  cudaLaunchAttribute early;
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim =
      dim3(static_cast<unsigned>((packed_rows + kTileRows - 1) / kTileRows),
           static_cast<unsigned>(last - first + 1), static_cast<unsigned>(args.entry_count));
  config.blockDim = dim3(kThreads);
  config.stream = stream;
  config.attrs = &early;
  config.numAttrs = args.begins_early ? 1 : 0;
  return DispatchHeadDims<&HeadDims::draft_block>(
      args.key_dim, args.value_dim, [&](auto key_dim, auto value_dim) {
        const cudaError_t error =
            cudaLaunchKernelEx(&config, BlockKernel<kCompute, key_dim(), value_dim(), kSame>,
                               KernelArgs{args, gqa_ratio});
        return CudaStatus(error, "block attention kernel");
      });
}

}  // namespace

Status LaunchBlockAttention(const BlockArgs& args, cudaStream_t stream) {
  if (!IsUnscaled(args.q_dtype)) return InvalidArgument("q_dtype: must be f32, bf16 or f16");
  if (!IsUnscaled(args.kv_dtype)) return InvalidArgument("kv_dtype: must be f32, bf16 or f16");
  if (args.kv_heads < 1 || args.q_heads % args.kv_heads != 0) {
    return InvalidArgument("q_heads: must be a multiple of kv_heads");
  }
  if (args.head_begin < 0 || args.head_count < 0 ||
      args.head_begin + args.head_count > args.q_heads) {
    return InvalidArgument("head_count: the heads to compute are not among q_heads");
  }
  if (args.entry_count < 0 || args.entry_count > 65535) {
    return InvalidArgument("entry_count: must be 0..65535");
  }
  if (args.entry_count == 0 || args.most_rows == 0 || args.head_count == 0) return Status::Ok();
  const bool same = args.q_dtype == args.kv_dtype && args.q_dtype != DType::kF32;
  if (args.kv_dtype == DType::kF16) {
    return same ? Launch<DType::kF16, true>(args, stream)
                : Launch<DType::kF16, false>(args, stream);
  }
  return same ? Launch<DType::kBf16, true>(args, stream)
              : Launch<DType::kBf16, false>(args, stream);
}

}  // namespace tributary::cuda
