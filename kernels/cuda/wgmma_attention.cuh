// Attention of many columns (16 to 64: verified drafts, DFlash blocks) over a paged cache, on sm_90a.
//
// The same products as in mma_attention.cuh, S^T = K Q^T and O^T += V^T P^T, by warpgroups of four
// warps and 64 tokens. K and V again go from global memory straight into the registers of operand A,
// each byte to one thread, so FP8 is widened once, in registers, and never passes through shared
// memory. Operand B is the queries, which stay in shared memory, and the weights P, which the four
// warps of a warpgroup exchange through it.
//
// Weights are taken against a reference that follows the maximum only when it is exceeded by 2^8:
// until then nothing needs to be reduced between threads, and the barrier that publishes P also
// publishes whether it holds.
#pragma once

#include "kernels/cuda/columns.cuh"
#include "kernels/cuda/wgmma.cuh"
#include "kernels/cuda/widen.cuh"

namespace tributary::cuda {

template <DType kKvType, int kHeadDimension, int kColumnCount>
struct WgmmaTraits {
  static constexpr DType kKv = kKvType;
  static constexpr DType kCompute = ComputeType(kKv);
  static constexpr int kHeadDim = kHeadDimension;
  static constexpr int kColumns = kColumnCount;
  static constexpr int kTiles = kColumns / 8;  // of 8 columns, in an accumulator
  static constexpr int kRowBytes = kHeadDim * int(SizeOf(kKv));
  static constexpr int kPanels = kRowBytes / kKeyPanelBytes;
  static constexpr int kQuadsPerVector = kVectorBytes / (4 * int(SizeOf(kKv)));
  static constexpr int kDimTiles = kHeadDim / 64;
  static constexpr size_t kGroupBytes = size_t(kGroupTokens) * kRowBytes;
  static constexpr int kTileGroups = 4;  // a warpgroup's 64 tokens
  // Words of V of a thread, a group and a tile of 64 dimensions: two dimensions of four tokens.
  static constexpr int kValueWords = 2 * int(SizeOf(kKv));
  static constexpr int kWarpgroups = 2;
  static constexpr int kThreads = 128 * kWarpgroups;
  static constexpr float kBias = kCompute == DType::kF16 ? kWeightBias : 0.0f;

  struct Shared {
    // Tiles of operand B; see wgmma.cuh.
    alignas(1024) std::byte q[kHeadDim / kTileSlots][kColumns * kTileRowBytes];
    alignas(1024) std::byte p[kWarpgroups][2][kColumns * kTileRowBytes];
    float o[kWarpgroups][kColumns][kHeadDim + 4];
    alignas(16) float reference[kWarpgroups][kColumns];
    float warp_max[kWarpgroups][4][kColumns];
    ColumnState<kColumns> columns;
    WarpResults<4 * kWarpgroups, kColumns> warps;
    WorkItem items[2];
    int is_last;
    int exceeded[kWarpgroups][2];  // whether a logit outgrew the reference
  };
};

// A warpgroup's 64 tokens, as a thread holds them.
template <typename Traits>
struct WarpgroupTokens {
  uint4 k[Traits::kPanels][2];  // of the warp's own 16 tokens
  uint32_t v[Traits::kTileGroups][Traits::kDimTiles][Traits::kValueWords];  // of all 64
};

// The tiles of 64 tokens of an item that a warpgroup takes: every kWarpgroups-th.
template <typename Traits>
class TileCursor {
 public:
  __device__ TileCursor(const AttentionArgs& args, int warpgroup)
      : args_(args), warpgroup_(warpgroup) {}

  // Goes to the warpgroup's first tile of an item, given by its first 16 bytes.
  __device__ void Start(int4 item) {
    pages_ = args_.page_tables + item.x;
    head_ = item.y;
    group_ = item.z + warpgroup_ * Traits::kTileGroups;
    end_ = item.w;
    FetchPages();
  }
  __device__ void Advance() {
    group_ += Traits::kWarpgroups * Traits::kTileGroups;
    FetchPages();
  }
  __device__ bool Done() const { return group_ >= end_; }

  // K of a group of the tile; nullptr past the end of the item.
  __device__ const std::byte* Keys(int i) const {
    if (group_ + i >= end_) return nullptr;
    const int shift = args_.page_shift - 4;
    const size_t plane = Traits::kGroupBytes << shift;
    return args_.cache + (size_t(page_[i]) * 2 * args_.kv_heads + head_) * plane +
           size_t((group_ + i) & ((1 << shift) - 1)) * Traits::kGroupBytes;
  }
  __device__ size_t ValuesAfterKeys() const {
    return (size_t(args_.kv_heads) * Traits::kGroupBytes) << (args_.page_shift - 4);
  }

 private:
  __device__ void FetchPages() {
#pragma unroll
    for (int i = 0; i < Traits::kTileGroups; ++i) {
      if (group_ + i < end_) page_[i] = __ldg(pages_ + ((group_ + i) >> (args_.page_shift - 4)));
    }
  }

  const AttentionArgs& args_;
  const int warpgroup_;
  const int32_t* pages_ = nullptr;
  int group_ = 0;
  int end_ = 0;
  int head_ = 0;
  int page_[Traits::kTileGroups] = {};
};

// The two neighbouring dimensions that a thread's rows lane / 4 and lane / 4 + 8 of a tile of 64
// dimensions stand for: the first of them. Its words of V are where page_layout.h puts these.
template <typename Traits>
__device__ __forceinline__ int DimsOfTile(int tile) {
  const int lane_row = threadIdx.x % 32 / 4;
  const int warp = threadIdx.x / 32 % 4;
  if constexpr (SizeOf(Traits::kKv) == 2) return 16 * (4 * tile + warp) + 2 * lane_row;
  if constexpr (Traits::kDimTiles == 1) return 32 * (warp / 2) + 4 * lane_row + 2 * (warp % 2);
  return 32 * (4 * (tile / 2) + warp) + 4 * lane_row + 2 * (tile % 2);
}

template <typename Traits>
__device__ __forceinline__ void LoadTileKeys(const TileCursor<Traits>& cursor,
                                             WarpgroupTokens<Traits>& tokens) {
  const int warp = threadIdx.x / 32 % 4;
  const int lane = threadIdx.x % 32;
  const std::byte* keys = nullptr;
#pragma unroll
  for (int i = 0; i < Traits::kTileGroups; ++i) {
    if (i == warp) keys = cursor.Keys(i);
  }
  if (keys == nullptr) return;
  keys += TokenOfRow(lane / 4) * kKeyPanelBytes + lane % 4 * kVectorBytes;
#pragma unroll
  for (int panel = 0; panel < Traits::kPanels; ++panel) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      tokens.k[panel][half] =
          LoadStreaming(keys + (panel * kGroupTokens + half * 2) * kKeyPanelBytes);
    }
  }
}

template <typename Traits>
__device__ __forceinline__ void LoadTileValues(const TileCursor<Traits>& cursor,
                                               WarpgroupTokens<Traits>& tokens) {
  const int quad = threadIdx.x % 4;
#pragma unroll
  for (int i = 0; i < Traits::kTileGroups; ++i) {
    const std::byte* keys = cursor.Keys(i);
    const std::byte* values = keys + cursor.ValuesAfterKeys();
#pragma unroll
    for (int tile = 0; tile < Traits::kDimTiles; ++tile) {
      constexpr int kWords = Traits::kValueWords;
      uint32_t(&v)[kWords] = tokens.v[i][tile];
      if (keys == nullptr) {
#pragma unroll
        for (int w = 0; w < kWords; ++w) v[w] = 0;
        continue;
      }
      const std::byte* at = values + ValueOffset(quad * kQuadTokens, DimsOfTile<Traits>(tile),
                                                 Traits::kHeadDim, SizeOf(Traits::kKv));
      if constexpr (kWords == 4) {
        const uint4 x = LoadStreaming(at);
        v[0] = x.x, v[1] = x.y, v[2] = x.z, v[3] = x.w;
      } else if constexpr (Traits::kDimTiles == 1) {
        const uint2 x = LoadStreaming8(at);
        v[0] = x.x, v[1] = x.y;
      } else if (tile % 2 == 0) {  // one vector holds the dimensions of two tiles
        const uint4 x = LoadStreaming(at);
        v[0] = x.x, v[1] = x.y;
        tokens.v[i][tile + 1][0] = x.z, tokens.v[i][tile + 1][1] = x.w;
      }
    }
  }
}

// Two dimensions of four tokens as operand A of one step.
template <typename Traits>
__device__ __forceinline__ void WidenValues(const uint32_t (&words)[Traits::kValueWords],
                                            uint32_t (&a)[4]) {
  if constexpr (SizeOf(Traits::kKv) == 1) {
    const uint4 vector = make_uint4(words[0], words[1], 0, 0);
    WidenQuad<Traits::kKv>(vector, 0, a[0], a[2]);
    WidenQuad<Traits::kKv>(vector, 1, a[1], a[3]);
  } else {
    a[0] = words[0];
    a[2] = words[1];
    a[1] = words[2];
    a[3] = words[3];
  }
}

template <typename Traits>
class Warpgroup {
 public:
  using Shared = typename Traits::Shared;

  __device__ Warpgroup(const AttentionArgs& args, Shared& shared)
      : args_(args),
        shared_(shared),
        lane_(threadIdx.x % 32),
        warp_(threadIdx.x / 32 % 4),
        warpgroup_(threadIdx.x / 128) {}

  __device__ void Reset() {
#pragma unroll
    for (int tile = 0; tile < Traits::kDimTiles; ++tile) {
#pragma unroll
      for (int i = 0; i < Traits::kColumns / 2; ++i) o_[tile][i] = 0.0f;
    }
#pragma unroll
    for (int tile = 0; tile < Traits::kTiles; ++tile) sum_[tile][0] = sum_[tile][1] = 0.0f;
    for (int c = threadIdx.x % 128; c < Traits::kColumns; c += 128) {
      shared_.reference[warpgroup_][c] = kNoReference;
    }
    if (threadIdx.x % 128 < 2) shared_.exceeded[warpgroup_][threadIdx.x % 128] = 0;
  }

  // S^T of the tile, as raw products. K's registers are free for `reload` as soon as they are
  // widened (16-bit types: multiplied).
  template <typename Reload>
  __device__ void Scores(WarpgroupTokens<Traits>& tokens, Reload reload) {
    constexpr int kSteps = Traits::kHeadDim / 16;
    constexpr int kStepsPerPanel = Traits::kQuadsPerVector;
    uint32_t a[kSteps][4];
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const int panel = step / kStepsPerPanel;
      const int quad = step % kStepsPerPanel;
      WidenQuad<Traits::kKv>(tokens.k[panel][0], quad, a[step][0], a[step][2]);
      WidenQuad<Traits::kKv>(tokens.k[panel][1], quad, a[step][1], a[step][3]);
    }
    if constexpr (SizeOf(Traits::kKv) == 1) reload();
    WgmmaFence();
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const uint32_t tile = SharedAddress(shared_.q[step * 16 / kTileSlots]);
      Wgmma<Traits::kCompute, Traits::kColumns>(
          s_, a[step], TileDescriptor(tile, step % (kTileSlots / 16)), step > 0);
    }
    WgmmaCommit();
    WgmmaWait();
    if constexpr (SizeOf(Traits::kKv) == 2) reload();
  }

  // From raw products to logits in base 2, with the keys outside a column's range at -inf.
  __device__ void Mask(const WorkItem& item, int first_group) {
    const int first = first_group * kGroupTokens;
    const bool dense = first >= item.dense_begin &&
                       first + Traits::kTileGroups * kGroupTokens <= item.dense_end;
#pragma unroll
    for (int tile = 0; tile < Traits::kTiles; ++tile) {
      const float2 scale =
          *reinterpret_cast<const float2*>(&shared_.columns.scale[ColumnOf(tile)]);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float& s = s_[tile * 4 + i];
        s = Logit2(s * (i % 2 == 0 ? scale.x : scale.y), args_.soft_cap);
        if (!dense) {
          const RowKeys keys = shared_.columns.keys[ColumnOf(tile) + i % 2];
          const int slot =
              first + warp_ * kGroupTokens + TokenOfRow(lane_ / 4) + i / 2 * 2;
          if (slot < keys.begin || slot >= keys.end) s = EmptyLse<float>();
        }
      }
    }
  }

  // Turns logits into weights and publishes them in shared memory for the whole warpgroup.
  __device__ void Weigh(int parity) {
    const bool holds = StoreWeights(parity, /*check=*/true);
    if (!holds) shared_.exceeded[warpgroup_][parity] = 1;
    FenceSharedForWgmma();
    SyncWarpgroup(warpgroup_);
    if (shared_.exceeded[warpgroup_][parity] != 0) {
      RaiseReference(parity);
      StoreWeights(parity, /*check=*/false);
      FenceSharedForWgmma();
      SyncWarpgroup(warpgroup_);
    }
#pragma unroll
    for (int tile = 0; tile < Traits::kTiles; ++tile) {
      sum_[tile][0] += fresh_[tile][0];
      sum_[tile][1] += fresh_[tile][1];
    }
  }

  // O^T += V^T P^T. V's registers are free for `reload` as in Scores.
  template <typename Reload>
  __device__ void AddValues(WarpgroupTokens<Traits>& tokens, int parity, Reload reload) {
    const uint32_t p = SharedAddress(shared_.p[warpgroup_][parity]);
    uint32_t a[Traits::kTileGroups][Traits::kDimTiles][4];
#pragma unroll
    for (int i = 0; i < Traits::kTileGroups; ++i) {
#pragma unroll
      for (int tile = 0; tile < Traits::kDimTiles; ++tile) {
        WidenValues<Traits>(tokens.v[i][tile], a[i][tile]);
      }
    }
    if constexpr (SizeOf(Traits::kKv) == 1) reload();
    WgmmaFence();
#pragma unroll
    for (int i = 0; i < Traits::kTileGroups; ++i) {
#pragma unroll
      for (int tile = 0; tile < Traits::kDimTiles; ++tile) {
        Wgmma<Traits::kCompute, Traits::kColumns>(o_[tile], a[i][tile], TileDescriptor(p, i), true);
      }
    }
    WgmmaCommit();
    WgmmaWait();
    if constexpr (SizeOf(Traits::kKv) == 2) reload();
  }

  // Puts the unnormalised O and the sums where all threads can merge them.
  __device__ void Publish() {
    const int warp = threadIdx.x / 32;
#pragma unroll
    for (int tile = 0; tile < Traits::kTiles; ++tile) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        float sum = sum_[tile][c];
#pragma unroll
        for (int mask = 4; mask < 32; mask *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, mask);
        if (lane_ / 4 == 0) {
          const int column = ColumnOf(tile) + c;
          shared_.warps.reference[warp][column] = shared_.reference[warpgroup_][column];
          shared_.warps.sum[warp][column] = sum;
        }
#pragma unroll
        for (int dims = 0; dims < Traits::kDimTiles; ++dims) {
          float* to = &shared_.o[warpgroup_][ColumnOf(tile) + c][DimsOfTile<Traits>(dims)];
          *reinterpret_cast<float2*>(to) =
              make_float2(o_[dims][tile * 4 + c], o_[dims][tile * 4 + c + 2]);
        }
      }
    }
  }

 private:
  // The first of the two columns that this thread holds of a tile of eight.
  __device__ int ColumnOf(int tile) const { return tile * 8 + lane_ % 4 * 2; }

  static __device__ uint32_t SharedAddress(const void* p) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(p));
  }

  // Stores P^T against the reference; false when this warp found a logit that outgrew it. Keeps the
  // logits: they are needed again then.
  __device__ bool StoreWeights(int parity, bool check) {
    const uint32_t p = SharedAddress(shared_.p[warpgroup_][parity]);
    float excess = 0.0f;
#pragma unroll
    for (int pair = 0; pair < Traits::kTiles / 2; ++pair) {
      uint32_t packed[4];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int tile = pair * 2 + j;
        const float2 reference =
            *reinterpret_cast<const float2*>(&shared_.reference[warpgroup_][ColumnOf(tile)]);
        float w[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          w[i] = s_[tile * 4 + i] - (i % 2 == 0 ? reference.x : reference.y);
          excess = fmaxf(excess, w[i]);
          w[i] = Exp2(w[i] + Traits::kBias);
        }
        fresh_[tile][0] = w[0] + w[2];
        fresh_[tile][1] = w[1] + w[3];
        packed[2 * j] = Pack<Traits::kCompute>(w[0], w[1]);
        packed[2 * j + 1] = Pack<Traits::kCompute>(w[2], w[3]);
      }
      const int column = (pair * 2 + lane_ / 16) * 8 + lane_ % 8;
      const int chunk = warp_ * 2 + lane_ / 8 % 2;
      StoreTransposed(p + SwizzledChunk(column, chunk), packed);
    }
    return !check || !__any_sync(0xffffffffu, excess > kHeadroom);
  }

  // Moves the reference of every column up to its maximum so far, and O and the sums with it.
  __device__ void RaiseReference(int parity) {
#pragma unroll
    for (int tile = 0; tile < Traits::kTiles; ++tile) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        float peak = fmaxf(s_[tile * 4 + c], s_[tile * 4 + c + 2]);
#pragma unroll
        for (int mask = 4; mask < 32; mask *= 2) {
          peak = fmaxf(peak, __shfl_xor_sync(0xffffffffu, peak, mask));
        }
        if (lane_ / 4 == 0) shared_.warp_max[warpgroup_][warp_][ColumnOf(tile) + c] = peak;
      }
    }
    SyncWarpgroup(warpgroup_);
#pragma unroll
    for (int tile = 0; tile < Traits::kTiles; ++tile) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int column = ColumnOf(tile) + c;
        const float before = shared_.reference[warpgroup_][column];
        const float factor = Exp2(before - Raised(column));
        sum_[tile][c] *= factor;
#pragma unroll
        for (int dims = 0; dims < Traits::kDimTiles; ++dims) {
          o_[dims][tile * 4 + c] *= factor;
          o_[dims][tile * 4 + c + 2] *= factor;
        }
      }
    }
    SyncWarpgroup(warpgroup_);
    for (int c = threadIdx.x % 128; c < Traits::kColumns; c += 128) {
      shared_.reference[warpgroup_][c] = Raised(c);
    }
    if (threadIdx.x % 128 == 0) shared_.exceeded[warpgroup_][parity] = 0;
    SyncWarpgroup(warpgroup_);
  }

  __device__ float Raised(int column) const {
    float raised = shared_.reference[warpgroup_][column];
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      raised = fmaxf(raised, shared_.warp_max[warpgroup_][w][column]);
    }
    return raised;
  }

  const AttentionArgs& args_;
  Shared& shared_;
  const int lane_;
  const int warp_;  // of the warpgroup
  const int warpgroup_;
  float s_[Traits::kColumns / 2];
  float o_[Traits::kDimTiles][Traits::kColumns / 2];
  float sum_[Traits::kTiles][2];    // over this thread's rows only
  float fresh_[Traits::kTiles][2];  // the tile's share, until its weights hold
};

// Dead slots may hold anything, NaN included, and 0 * NaN is NaN.
template <typename Traits>
__device__ __forceinline__ void ClearDeadValues(const WorkItem& item, int first_group,
                                                WarpgroupTokens<Traits>& tokens) {
  const int first = first_group * kGroupTokens;
  if (first >= item.key_begin && first + Traits::kTileGroups * kGroupTokens <= item.key_end) return;
#pragma unroll
  for (int i = 0; i < Traits::kTileGroups; ++i) {
    const uint32_t alive =
        AliveTokens(item, first + i * kGroupTokens + threadIdx.x % 4 * kQuadTokens);
#pragma unroll
    for (int tile = 0; tile < Traits::kDimTiles; ++tile) {
      KeepTokens<Traits::kKv>(tokens.v[i][tile], alive);
    }
  }
}

// Adds up the warpgroups' outputs and writes the block's.
template <typename Traits>
__device__ __forceinline__ void StoreBlock(const AttentionArgs& args, const WorkItem& item,
                                           const typename Traits::Shared& shared) {
  constexpr int kPairs = Traits::kHeadDim / 2;
  for (int i = threadIdx.x; i < item.column_count * kPairs; i += Traits::kThreads) {
    const int column = i / kPairs;
    const int d = i % kPairs * 2;
    float2 o = make_float2(0.0f, 0.0f);
#pragma unroll
    for (int g = 0; g < Traits::kWarpgroups; ++g) {
      const float factor = shared.warps.factor[4 * g][column];
      const float2 x = *reinterpret_cast<const float2*>(&shared.o[g][column][d]);
      o.x += x.x * factor;
      o.y += x.y * factor;
    }
    StoreColumn<Traits::kHeadDim, Traits::kColumns>(args, item, column, d, o,
                                                    shared.warps.lse2[column]);
  }
}

template <typename Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1) WgmmaAttentionKernel(
    const __grid_constant__ AttentionArgs args) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) std::byte shared_bytes[];
  auto& shared = *reinterpret_cast<typename Traits::Shared*>(shared_bytes);
  const int warpgroup = threadIdx.x / 128;
  constexpr int kRound = Traits::kWarpgroups * Traits::kTileGroups;

  WarpgroupTokens<Traits> tokens;
  Warpgroup<Traits> state(args, shared);
  TileCursor<Traits> next(args, warpgroup);
  const auto start = [&](int4 item) {
    next.Start(item);
    if (next.Done()) return;
    LoadTileKeys<Traits>(next, tokens);
    LoadTileValues<Traits>(next, tokens);
  };
  QueryStager<Traits::kCompute, Traits::kHeadDim, Traits::kColumns, Traits::kThreads> queries;
  const auto stage_queries = [&] {
    queries.Finish(args, shared.columns, [&](int column, int vector, uint4 x) {
      // A lane's vector of K starts at dimension kElements * (4 * panel + lane % 4), and each four of
      // its elements are slots 2t, 2t + 1, 2t + 8 and 2t + 9 of one step.
      constexpr int kOfVector = Traits::kQuadsPerVector / 2;
      const int of_lane = vector / kOfVector;
      const int step = of_lane / 4 * Traits::kQuadsPerVector + vector % kOfVector * 2;
      const uint32_t words[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int s = step + i / 2;
        std::byte* to = shared.q[s / 4] + SwizzledChunk(column, s % 4 * 2 + i % 2);
        *reinterpret_cast<uint32_t*>(to + of_lane % 4 * 4) = words[i];
      }
    });
    FenceSharedForWgmma();
  };
  const auto copy_item = [&](int index, WorkItem* to) {
    if (threadIdx.x < sizeof(WorkItem) / 16) {
      CopyAsync16(reinterpret_cast<uint4*>(to) + threadIdx.x,
                  reinterpret_cast<const uint4*>(args.items + index) + threadIdx.x);
    }
  };

  const WorkItem& first = args.items[blockIdx.x];
  if (first.column_count == 0) return;
  copy_item(blockIdx.x, &shared.items[0]);
  start(*reinterpret_cast<const int4*>(&first));
  queries.Load(args, first);
  stage_queries();
  state.Reset();
  WaitForCopies();
  __syncthreads();
  for (int item_parity = 0;; item_parity ^= 1) {
    const WorkItem& item = shared.items[item_parity];
    const bool has_next = item.next >= 0;
    int4 next_item = {};
    if (has_next) {
      next_item = __ldg(reinterpret_cast<const int4*>(args.items + item.next));
      copy_item(item.next, &shared.items[item_parity ^ 1]);
    }
    const int begin = item.group_begin + warpgroup * Traits::kTileGroups;
    int parity = 0;
    bool in_item = begin < item.group_end;
    // A warpgroup that has nothing here has not asked for its part of the next item yet.
    if (!in_item && has_next) start(next_item);
    for (int group = begin; in_item; group += kRound, parity ^= 1) {
      next.Advance();
      in_item = !next.Done();
      if (!in_item && has_next) next.Start(next_item);
      const bool more = !next.Done();
      state.Scores(tokens, [&] {
        if (more) LoadTileKeys<Traits>(next, tokens);
      });
      state.Mask(item, group);
      state.Weigh(parity);
      ClearDeadValues<Traits>(item, group, tokens);
      state.AddValues(tokens, parity, [&] {
        if (more) LoadTileValues<Traits>(next, tokens);
      });
    }

    state.Publish();
    WaitForCopies();
    __syncthreads();  // the queries' place is free, the next item is there
    if (has_next) queries.Load(args, shared.items[item_parity ^ 1]);
    CombineWarps(shared.warps, ValueScale(args, item), Traits::kBias);
    __syncthreads();
    StoreBlock<Traits>(args, item, shared);
    if (item.partial_count > 1) {
      MergeIfLast<Traits::kHeadDim, Traits::kColumns>(args, item, &shared.is_last);
    }
    if (!has_next) return;
    stage_queries();
    state.Reset();
    __syncthreads();
  }
#endif
}

}  // namespace tributary::cuda
