// Attention of few columns (8 or 16) over a paged cache, at the speed of memory, on sm_80 and later.
//
// Every warp is on its own: it reads 16 tokens of K and V straight from global memory into the
// registers from which it multiplies (page_layout.h stores them in that order), and asks for its next
// 16 tokens as soon as the registers are free. Nothing is shared between warps until a piece of work
// ends, so nothing waits and there is no pipeline to fill: a thousand tokens cost little more than
// the latency of memory.
//
//   S^T = K Q^T      tokens in M, columns in N: with 8 columns nothing is padded
//   O^T += V^T P^T   dimensions in M; P^T is S^T transposed back in registers (movmatrix)
//
// The order of the contraction index is free as long as both operands agree, so each thread's operand
// of K is 16 consecutive bytes of a token, and of V four consecutive tokens.
#pragma once

#include "kernels/cuda/columns.cuh"
#include "kernels/cuda/widen.cuh"

namespace tributary::cuda {

template <DType kKvType, int kHeadDimension, int kColumnTiles>
struct MmaTraits {
  static constexpr DType kKv = kKvType;
  static constexpr DType kCompute = ComputeType(kKv);
  static constexpr int kHeadDim = kHeadDimension;
  static constexpr int kTiles = kColumnTiles;  // of 8 columns
  static constexpr int kColumns = 8 * kTiles;
  static constexpr int kRowBytes = kHeadDim * int(SizeOf(kKv));
  static constexpr int kPanels = kRowBytes / kKeyPanelBytes;  // of K
  static constexpr int kQuadsPerVector = kVectorBytes / (4 * int(SizeOf(kKv)));
  static constexpr int kValueVectors = kRowBytes / 32;  // of V, a thread and group of tokens
  static constexpr int kDimTiles = kHeadDim / 16;
  static constexpr int kTilesPerVector = kDimTiles / kValueVectors;
  static constexpr size_t kGroupBytes = size_t(kGroupTokens) * kRowBytes;
  // Registers: the accumulators and one group of K and V. Up to 96 of them leave room for 16 warps.
  static constexpr int kWarps =
      kDimTiles * kTiles * 4 + kPanels * 8 + kValueVectors * 4 <= 96 ? 16 : 8;
  static constexpr int kThreads = 32 * kWarps;
  // P is scaled by 2^kBias before it is rounded to f16, whose subnormals end at 2^-24.
  static constexpr float kBias = kCompute == DType::kF16 ? 14.0f : 0.0f;

  struct Shared {
    ColumnState<kColumns> columns;
    WorkItem items[2];
    int is_last;
    float max[kWarps][kColumns];
    float sum[kWarps][kColumns];
    uint4 q[kTiles][kHeadDim / 32][32];            // operand B of K Q^T, as the lanes take it
    float o[kWarps][8][kHeadDim + 4];              // one tile of columns at a time
  };
};

// The 16 tokens a warp works on, or has asked for.
template <typename Traits>
struct Tokens {
  uint4 k[Traits::kPanels][2];
  uint4 v[Traits::kValueVectors];
};

// The groups of 16 tokens of an item that a warp takes: every kWarps-th.
template <typename Traits>
class GroupCursor {
 public:
  __device__ GroupCursor(const AttentionArgs& args, int warp) : args_(args), warp_(warp) {}

  // Goes to the warp's first group of the item.
  __device__ void Start(const WorkItem& item) {
    group_ = item.group_begin + warp_;
    end_ = item.group_end;
    pages_ = args_.page_tables + item.page_table;
    head_ = item.kv_head;
    FetchPage();
  }
  __device__ void Advance() {
    group_ += Traits::kWarps;
    FetchPage();
  }
  __device__ bool Done() const { return group_ >= end_; }
  __device__ int group() const { return group_; }

  // The group's K in the warp's page; V lies kv_heads planes further.
  __device__ const std::byte* Keys() const {
    const int shift = args_.page_shift - 4;
    const size_t plane = Traits::kGroupBytes << shift;
    return args_.cache + (size_t(page_) * 2 * args_.kv_heads + head_) * plane +
           size_t(group_ & ((1 << shift) - 1)) * Traits::kGroupBytes;
  }
  __device__ size_t ValuesAfterKeys() const {
    return (size_t(args_.kv_heads) * Traits::kGroupBytes) << (args_.page_shift - 4);
  }

 private:
  __device__ void FetchPage() {
    if (!Done()) page_ = __ldg(pages_ + (group_ >> (args_.page_shift - 4)));
  }

  const AttentionArgs& args_;
  const int warp_;
  const int32_t* pages_ = nullptr;
  int group_ = 0;
  int end_ = 0;
  int head_ = 0;
  int page_ = 0;
};

// Row r of a tile of S is token 4 * (r / 2) + r % 2, row r + 8 the token two further: the order in
// which a thread of the second product holds four consecutive tokens.
__device__ __forceinline__ int TokenOfRow(int row) { return (row >> 1) * 4 + (row & 1); }

template <typename Traits>
__device__ __forceinline__ void LoadKeys(const std::byte* keys, uint4 (&k)[Traits::kPanels][2]) {
  const int lane = threadIdx.x % 32;
  const std::byte* at =
      keys + TokenOfRow(lane / 4) * kKeyPanelBytes + lane % 4 * kVectorBytes;
#pragma unroll
  for (int panel = 0; panel < Traits::kPanels; ++panel) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      k[panel][half] = LoadStreaming(at + (panel * kGroupTokens + half * 2) * kKeyPanelBytes);
    }
  }
}

template <typename Traits>
__device__ __forceinline__ void LoadValues(const std::byte* values,
                                           uint4 (&v)[Traits::kValueVectors]) {
  const std::byte* at = values + threadIdx.x % 32 * kVectorBytes;
#pragma unroll
  for (int i = 0; i < Traits::kValueVectors; ++i) v[i] = LoadStreaming(at + i * 32 * kVectorBytes);
}

// S^T of one group: s[tile] holds rows lane / 4 and lane / 4 + 8 of columns 2 * (lane % 4) + {0, 1}.
template <typename Traits>
__device__ __forceinline__ void Scores(const uint4 (&k)[Traits::kPanels][2],
                                       const typename Traits::Shared& shared,
                                       float (&s)[Traits::kTiles][4]) {
  const int lane = threadIdx.x % 32;
  // Two chains of additions, half as long.
  float odd[Traits::kTiles][4] = {};
#pragma unroll
  for (int tile = 0; tile < Traits::kTiles; ++tile) {
#pragma unroll
    for (int i = 0; i < 4; ++i) s[tile][i] = 0.0f;
  }
#pragma unroll
  for (int step = 0; step < Traits::kHeadDim / 32; ++step) {  // two products of depth 16
    constexpr int kStepsPerPanel = Traits::kQuadsPerVector / 2;
    const int panel = step / kStepsPerPanel;
    const int quad = step % kStepsPerPanel * 2;
    uint32_t a[2][4];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      WidenQuad<Traits::kKv>(k[panel][0], quad + i, a[i][0], a[i][2]);
      WidenQuad<Traits::kKv>(k[panel][1], quad + i, a[i][1], a[i][3]);
    }
#pragma unroll
    for (int tile = 0; tile < Traits::kTiles; ++tile) {
      const uint4 q = shared.q[tile][step][lane];
      Mma16x8x16<Traits::kCompute>(s[tile], a[0], q.x, q.y);
      Mma16x8x16<Traits::kCompute>(odd[tile], a[1], q.z, q.w);
    }
  }
#pragma unroll
  for (int tile = 0; tile < Traits::kTiles; ++tile) {
#pragma unroll
    for (int i = 0; i < 4; ++i) s[tile][i] += odd[tile][i];
  }
}

// A warp's share of the softmax and the output.
template <typename Traits>
struct Accumulator {
  float o[Traits::kDimTiles][Traits::kTiles][4];
  float max[Traits::kTiles][2];
  float sum[Traits::kTiles][2];  // over this thread's rows only

  __device__ void Reset() {
#pragma unroll
    for (int tile = 0; tile < Traits::kTiles; ++tile) {
      max[tile][0] = max[tile][1] = EmptyLse<float>();
      sum[tile][0] = sum[tile][1] = 0.0f;
#pragma unroll
      for (int d = 0; d < Traits::kDimTiles; ++d) {
#pragma unroll
        for (int i = 0; i < 4; ++i) o[d][tile][i] = 0.0f;
      }
    }
  }

  // Turns logits into weights, in place, against the new maximum; what was summed so far follows.
  __device__ void Weigh(float (&s)[Traits::kTiles][4]) {
#pragma unroll
    for (int tile = 0; tile < Traits::kTiles; ++tile) {
      float peak[2] = {fmaxf(s[tile][0], s[tile][2]), fmaxf(s[tile][1], s[tile][3])};
#pragma unroll
      for (int mask = 4; mask < 32; mask *= 2) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          peak[c] = fmaxf(peak[c], __shfl_xor_sync(0xffffffffu, peak[c], mask));
        }
      }
      const bool grows = peak[0] > max[tile][0] || peak[1] > max[tile][1];
      if (__any_sync(0xffffffffu, grows)) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const float raised = fmaxf(max[tile][c], peak[c]);
          const float factor = raised == EmptyLse<float>() ? 1.0f : Exp2(max[tile][c] - raised);
          max[tile][c] = raised;
          sum[tile][c] *= factor;
#pragma unroll
          for (int d = 0; d < Traits::kDimTiles; ++d) {
            o[d][tile][c] *= factor;
            o[d][tile][c + 2] *= factor;
          }
        }
      }
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const float base = max[tile][c] == EmptyLse<float>() ? 0.0f : max[tile][c];
        s[tile][c] = Exp2(s[tile][c] - base + Traits::kBias);
        s[tile][c + 2] = Exp2(s[tile][c + 2] - base + Traits::kBias);
        sum[tile][c] += s[tile][c] + s[tile][c + 2];
      }
    }
  }

  __device__ void AddValues(const uint4 (&v)[Traits::kValueVectors],
                            const float (&p)[Traits::kTiles][4]) {
    uint32_t b[Traits::kTiles][2];
#pragma unroll
    for (int tile = 0; tile < Traits::kTiles; ++tile) {
      b[tile][0] = TransposeTile(Pack<Traits::kCompute>(p[tile][0], p[tile][1]));
      b[tile][1] = TransposeTile(Pack<Traits::kCompute>(p[tile][2], p[tile][3]));
    }
#pragma unroll
    for (int i = 0; i < Traits::kValueVectors; ++i) {
#pragma unroll
      for (int j = 0; j < Traits::kTilesPerVector; ++j) {
        uint32_t a[4];
        WidenQuad<Traits::kKv>(v[i], 2 * j, a[0], a[2]);
        WidenQuad<Traits::kKv>(v[i], 2 * j + 1, a[1], a[3]);
#pragma unroll
        for (int tile = 0; tile < Traits::kTiles; ++tile) {
          Mma16x8x16<Traits::kCompute>(o[i * Traits::kTilesPerVector + j][tile], a, b[tile][0],
                                       b[tile][1]);
        }
      }
    }
  }
};

// From raw products to logits in base 2, with the keys outside a column's range at -inf.
template <typename Traits>
__device__ __forceinline__ void MaskScores(const AttentionArgs& args, const WorkItem& item,
                                           const ColumnState<Traits::kColumns>& columns,
                                           const float (&scale)[Traits::kTiles][2], int group,
                                           float (&s)[Traits::kTiles][4]) {
  const int lane = threadIdx.x % 32;
  const int first = group * kGroupTokens;
  const bool dense = first >= item.dense_begin && first + kGroupTokens <= item.dense_end;
#pragma unroll
  for (int tile = 0; tile < Traits::kTiles; ++tile) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      s[tile][i] = Logit2(s[tile][i] * scale[tile][i % 2], args.soft_cap);
      if (!dense) {
        const RowKeys keys = columns.keys[tile * 8 + lane % 4 * 2 + i % 2];
        const int slot = first + TokenOfRow(lane / 4) + i / 2 * 2;
        if (slot < keys.begin || slot >= keys.end) s[tile][i] = EmptyLse<float>();
      }
    }
  }
}

// Dead slots may hold anything, NaN included, and 0 * NaN is NaN.
template <typename Traits>
__device__ __forceinline__ void ClearDeadValues(const WorkItem& item, int group,
                                                uint4 (&v)[Traits::kValueVectors]) {
  const int first = group * kGroupTokens;
  if (first >= item.key_begin && first + kGroupTokens <= item.key_end) return;
  uint32_t alive = 0;
#pragma unroll
  for (int i = 0; i < kQuadTokens; ++i) {
    const int slot = first + threadIdx.x % 4 * kQuadTokens + i;
    if (slot >= item.key_begin && slot < item.key_end) alive |= 1u << i;
  }
#pragma unroll
  for (int i = 0; i < Traits::kValueVectors; ++i) KeepTokens<Traits::kKv>(v[i], alive);
}

// Merges the warps' accumulators and writes the block's result or its partial.
template <typename Traits>
__device__ __forceinline__ void FinishItem(const AttentionArgs& args, const WorkItem& item,
                                           Accumulator<Traits>& acc,
                                           typename Traits::Shared& shared) {
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
#pragma unroll
  for (int tile = 0; tile < Traits::kTiles; ++tile) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      float& sum = acc.sum[tile][c];
#pragma unroll
      for (int mask = 4; mask < 32; mask *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, mask);
      if (lane / 4 == 0) {
        shared.max[warp][tile * 8 + lane * 2 + c] = acc.max[tile][c];
        shared.sum[warp][tile * 8 + lane * 2 + c] = sum;
      }
    }
  }
  __syncthreads();
  const float v_scale = ValueScale(args, item);
#pragma unroll
  for (int tile = 0; tile < Traits::kTiles; ++tile) {
    if (tile > 0) __syncthreads();
    constexpr int kDims = 2 * Traits::kTilesPerVector;  // a thread's neighbouring dimensions
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const int column = lane % 4 * 2 + c;
      float max = EmptyLse<float>();
#pragma unroll
      for (int w = 0; w < Traits::kWarps; ++w) max = fmaxf(max, shared.max[w][tile * 8 + column]);
      const float factor = max == EmptyLse<float>() ? 0.0f : Exp2(acc.max[tile][c] - max);
#pragma unroll
      for (int i = 0; i < Traits::kValueVectors; ++i) {
        float* to = &shared.o[warp][column][(i * 8 + lane / 4) * kDims];
#pragma unroll
        for (int j = 0; j < Traits::kTilesPerVector; ++j) {
          const float* from = acc.o[i * Traits::kTilesPerVector + j][tile];
          *reinterpret_cast<float2*>(to + 2 * j) =
              make_float2(from[c] * factor, from[c + 2] * factor);
        }
      }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < 8 * Traits::kHeadDim / 2; i += Traits::kThreads) {
      const int in_tile = i / (Traits::kHeadDim / 2);
      const int column = tile * 8 + in_tile;
      const int d = i % (Traits::kHeadDim / 2) * 2;
      if (column >= item.column_count) continue;
      float max = EmptyLse<float>();
#pragma unroll
      for (int w = 0; w < Traits::kWarps; ++w) max = fmaxf(max, shared.max[w][column]);
      const float base = max == EmptyLse<float>() ? 0.0f : max;
      float sum = 0.0f;
      float2 o = make_float2(0.0f, 0.0f);
#pragma unroll
      for (int w = 0; w < Traits::kWarps; ++w) {
        const float2 x = *reinterpret_cast<const float2*>(&shared.o[w][in_tile][d]);
        sum += shared.sum[w][column] * Exp2(shared.max[w][column] - base);
        o.x += x.x;
        o.y += x.y;
      }
      const float inverse = sum == 0.0f ? 0.0f : v_scale / sum;
      const float lse2 = sum == 0.0f ? EmptyLse<float>() : max + log2f(sum) - Traits::kBias;
      StoreColumn<Traits::kHeadDim, Traits::kColumns>(
          args, item, column, d, make_float2(o.x * inverse, o.y * inverse), lse2);
    }
  }
  if (item.partial_count > 1) {
    MergeIfLast<Traits::kHeadDim, Traits::kColumns>(args, item, &shared.is_last);
  }
}

template <typename Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1) MmaAttentionKernel(
    const __grid_constant__ AttentionArgs args) {
  extern __shared__ uint4 shared_bytes[];
  auto& shared = *reinterpret_cast<typename Traits::Shared*>(shared_bytes);
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;

  Tokens<Traits> tokens;
  GroupCursor<Traits> next(args, warp);
  int index = blockIdx.x;
  {
    const WorkItem first = args.items[index];
    if (first.column_count == 0) return;
    next.Start(first);
    if (!next.Done()) {
      const std::byte* keys = next.Keys();
      LoadKeys<Traits>(keys, tokens.k);
      LoadValues<Traits>(keys + next.ValuesAfterKeys(), tokens.v);
    }
  }
  for (int parity = 0; index >= 0; parity ^= 1) {
    WorkItem& item = shared.items[parity];
    __syncthreads();  // the previous item's shared memory is free
    if (threadIdx.x < sizeof(WorkItem) / sizeof(uint4)) {
      reinterpret_cast<uint4*>(&item)[threadIdx.x] =
          __ldg(reinterpret_cast<const uint4*>(args.items + index) + threadIdx.x);
    }
    __syncthreads();
    StageQueries<Traits::kCompute, Traits::kHeadDim>(
        args, item, shared.columns, [&](int column, int vector) {
          // A lane's vector of K starts at dimension kElements * (4 * panel + lane % 4).
          constexpr int kOfVector = Traits::kQuadsPerVector / 2;  // steps with one vector of K
          const int of_lane = vector / kOfVector;
          const int step = of_lane / 4 * kOfVector + vector % kOfVector;
          return &shared.q[column / 8][step][column % 8 * 4 + of_lane % 4];
        });
    __syncthreads();
    float scale[Traits::kTiles][2];
#pragma unroll
    for (int tile = 0; tile < Traits::kTiles; ++tile) {
#pragma unroll
      for (int c = 0; c < 2; ++c) scale[tile][c] = shared.columns.scale[tile * 8 + lane % 4 * 2 + c];
    }
    Accumulator<Traits> acc;
    acc.Reset();
    const int next_index = item.next;
    const int end = item.group_end;
    bool in_item = item.group_begin + warp < end;
    for (int group = item.group_begin + warp; in_item; group += Traits::kWarps) {
      // What to ask for when the registers are free: this item's next group or the next item's first.
      next.Advance();
      in_item = !next.Done();
      if (!in_item && next_index >= 0) next.Start(args.items[next_index]);
      const bool more = !next.Done();
      float s[Traits::kTiles][4];
      Scores<Traits>(tokens.k, shared, s);
      const std::byte* keys = nullptr;
      if (more) {
        keys = next.Keys();
        LoadKeys<Traits>(keys, tokens.k);
      }
      MaskScores<Traits>(args, item, shared.columns, scale, group, s);
      acc.Weigh(s);
      ClearDeadValues<Traits>(item, group, tokens.v);
      acc.AddValues(tokens.v, s);
      if (more) LoadValues<Traits>(keys + next.ValuesAfterKeys(), tokens.v);
    }
    if (item.group_begin + warp >= end && next_index >= 0) {
      // This warp had nothing here, so nobody has asked for its part of the next item yet.
      next.Start(args.items[next_index]);
      if (!next.Done()) {
        const std::byte* keys = next.Keys();
        LoadKeys<Traits>(keys, tokens.k);
        LoadValues<Traits>(keys + next.ValuesAfterKeys(), tokens.v);
      }
    }
    FinishItem<Traits>(args, item, acc, shared);
    index = next_index;
  }
}

}  // namespace tributary::cuda
