// Attention of many columns (16 to 64: verified drafts, DFlash blocks) over a paged cache, on
// sm_90a.
//
// The same products as in mma_attention.cuh, S^T = K Q^T and O^T += V^T P^T, by warpgroups of four
// warps and 64 tokens. One more warp keeps a ring of such tiles of K and V filled with bulk copies.
// They are operand A, which is read from shared memory into registers, each byte by one thread: so
// FP8 is widened once, in registers. Operand B is the queries, which stay in shared memory, and the
// weights P, which the four warps of a warpgroup exchange through it. (Loads straight into
// registers, as in mma_attention.cuh, lose here: the fence that publishes P waits for every load in
// flight.)
//
// Weights are taken against a reference that follows the maximum only when it is exceeded by 2^8:
// until then nothing needs to be reduced between threads, and the barrier that publishes P also
// publishes whether it holds.
#pragma once

#include <algorithm>

#include "kernels/cuda/bulk_copy.cuh"
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
  static constexpr int kThreads = 128 * kWarpgroups;  // that compute
  // One more warpgroup, of which one warp copies; it gives its registers to those that compute.
  static constexpr int kBlockThreads = kThreads + 128;
  static constexpr int kTileBytes = kTileGroups * int(kGroupBytes);  // of K, and of V
  static constexpr float kBias = kCompute == DType::kF16 ? kWeightBias : 0.0f;

  struct Fixed {
    union {
      // Tiles of operand B; see wgmma.cuh.
      struct {
        alignas(1024) std::byte q[kHeadDim / kTileSlots][kColumns * kTileRowBytes];
        alignas(1024) std::byte p[kWarpgroups][2][kColumns * kTileRowBytes];
      };
      float o[kWarpgroups][kColumns][kHeadDim + 4];  // once an item's products are done
    };
    alignas(16) float reference[kWarpgroups][kColumns];
    float warp_max[kWarpgroups][4][kColumns];
    ColumnState<kColumns> columns;
    WarpResults<4 * kWarpgroups, kColumns> warps;
    WorkItem items[2];
    int exceeded[kWarpgroups][2];  // whether a logit outgrew the reference
  };
  struct alignas(128) Stage {
    std::byte k[kTileBytes];
    std::byte v[kTileBytes];
  };
  // The ring takes what a block's shared memory has left. Warpgroups take tiles in turn and a stage
  // always falls to the same one, which has therefore seen every phase of the stage's barrier: the
  // parity of a phase alone would not tell it from the last but one.
  static constexpr int kSharedBytes = 227 * 1024;
  static constexpr int kStages =
      std::min<int>(12, (kSharedBytes - int(sizeof(Fixed)) - 1024) / int(sizeof(Stage))) /
      kWarpgroups * kWarpgroups;
  static_assert(kStages >= kWarpgroups);
  struct Shared : Fixed {
    Stage stages[kStages];
    CopyBarrier full[kStages];
    CopyBarrier empty[kStages];  // one arrival a warp
  };
};

// A place in the ring: tiles are numbered in the order in which they are copied and used.
template <typename Traits>
struct RingPlace {
  int stage;
  uint32_t parity;
  __device__ explicit RingPlace(int tile)
      : stage(tile % Traits::kStages), parity(tile / Traits::kStages % 2) {}
};

// The copying warp: brings every tile of every item of the block, in order.
template <typename Traits>
__device__ __forceinline__ void CopyTiles(const AttentionArgs& args,
                                          typename Traits::Shared& shared) {
  const int lane = threadIdx.x % 32;
  const int group_of_tile = lane % Traits::kTileGroups;
  const bool values = lane >= Traits::kTileGroups;
  const int shift = args.page_shift - 4;
  const size_t plane = Traits::kGroupBytes << shift;
  int tile = 0;
  for (int index = blockIdx.x; index >= 0; index = __ldg(&args.items[index].next)) {
    // page_table, kv_head, group_begin, group_end
    const int4 item = __ldg(reinterpret_cast<const int4*>(args.items + index));
    int pages = 0;  // lane i: the page of the i-th group from `base`
    int base = item.z - 32;
    for (int group = item.z; group < item.w; group += Traits::kTileGroups, ++tile) {
      if (group >= base + 32) {
        base = group;
        if (base + lane < item.w)
          pages = __ldg(args.page_tables + item.x + ((base + lane) >> shift));
      }
      const int own = group + group_of_tile;
      const int page = __shfl_sync(0xffffffffu, pages, own - base);
      const RingPlace<Traits> place(tile);
      // The stage's previous use ended with the phase before this one.
      if (tile >= Traits::kStages) shared.empty[place.stage].Wait(place.parity ^ 1);
      if (lane == 0) {
        const int groups = min(Traits::kTileGroups, item.w - group);
        shared.full[place.stage].ArriveAndExpect(groups * 2 * uint32_t(Traits::kGroupBytes));
      }
      __syncwarp();
      if (lane < 2 * Traits::kTileGroups && own < item.w) {
        auto& stage = shared.stages[place.stage];
        const size_t head = item.y + (values ? args.kv_heads : 0);
        BulkCopy((values ? stage.v : stage.k) + group_of_tile * Traits::kGroupBytes,
                 args.cache + (size_t(page) * 2 * args.kv_heads + head) * plane +
                     size_t(own & ((1 << shift) - 1)) * Traits::kGroupBytes,
                 uint32_t(Traits::kGroupBytes), shared.full[place.stage]);
      }
    }
  }
}

// The two neighbouring dimensions that a thread's rows lane / 4 and lane / 4 + 8 of a tile of 64
// dimensions stand for: the first of them. Its words of V are where page_layout.h puts
// these.
template <typename Traits>
__device__ __forceinline__ int DimsOfTile(int tile) {
  const int lane_row = threadIdx.x % 32 / 4;
  const int warp = threadIdx.x / 32 % 4;
  if constexpr (SizeOf(Traits::kKv) == 2) return 16 * (4 * tile + warp) + 2 * lane_row;
  if constexpr (Traits::kDimTiles == 1) return 32 * (warp / 2) + 4 * lane_row + 2 * (warp % 2);
  return 32 * (4 * (tile / 2) + warp) + 4 * lane_row + 2 * (tile % 2);
}

// A thread's words of V of one group of 16 tokens and one tile of 64 dimensions.
template <typename Traits>
__device__ __forceinline__ void ReadValues(const std::byte* group, int tile,
                                           uint32_t (&words)[Traits::kValueWords]) {
  const std::byte* at = group + ValueOffset(threadIdx.x % 4 * kQuadTokens, DimsOfTile<Traits>(tile),
                                            Traits::kHeadDim, SizeOf(Traits::kKv));
  if constexpr (Traits::kValueWords == 4) {
    const uint4 x = *reinterpret_cast<const uint4*>(at);
    words[0] = x.x, words[1] = x.y, words[2] = x.z, words[3] = x.w;
  } else {
    const uint2 x = *reinterpret_cast<const uint2*>(at);
    words[0] = x.x, words[1] = x.y;
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

  // S^T of the tile, as raw products.
  __device__ void Scores(const std::byte* k) {
    constexpr int kSteps = Traits::kHeadDim / 16;
    constexpr int kStepsPerPanel = Traits::kQuadsPerVector;
    const std::byte* at = k + warp_ * Traits::kGroupBytes + TokenOfRow(lane_ / 4) * kKeyPanelBytes +
                          lane_ % 4 * kVectorBytes;
    uint32_t a[kSteps][4];
#pragma unroll
    for (int panel = 0; panel < Traits::kPanels; ++panel) {
      const auto* low = reinterpret_cast<const uint4*>(at + panel * kGroupTokens * kKeyPanelBytes);
      const uint4 rows = *low;
      const uint4 rows_after = low[2 * kKeyPanelBytes / kVectorBytes];
#pragma unroll
      for (int quad = 0; quad < kStepsPerPanel; ++quad) {
        uint32_t(&step)[4] = a[panel * kStepsPerPanel + quad];
        WidenQuad<Traits::kKv>(rows, quad, step[0], step[2]);
        WidenQuad<Traits::kKv>(rows_after, quad, step[1], step[3]);
      }
    }
    WgmmaFence();
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const uint32_t tile = SharedAddress(shared_.q[step * 16 / kTileSlots]);
      Wgmma<Traits::kCompute, Traits::kColumns>(
          s_, a[step], TileDescriptor(tile, step % (kTileSlots / 16)), step > 0);
    }
    WgmmaCommit();
    WgmmaWait();
  }

  // From raw products to logits in base 2, with the keys outside a column's range at -inf.
  __device__ void Mask(const WorkItem& item, int first_group) {
    const int first = first_group * kGroupTokens;
    const bool dense =
        first >= item.dense_begin && first + Traits::kTileGroups * kGroupTokens <= item.dense_end;
#pragma unroll
    for (int tile = 0; tile < Traits::kTiles; ++tile) {
      const float2 scale = *reinterpret_cast<const float2*>(&shared_.columns.scale[ColumnOf(tile)]);
#pragma unroll
      for (int i = 0; i < 4; ++i) s_[tile * 4 + i] *= i % 2 == 0 ? scale.x : scale.y;
    }
    if (args_.soft_cap > 0.0f) CapLogits(args_.soft_cap, s_);
    if (dense) return;
#pragma unroll
    for (int tile = 0; tile < Traits::kTiles; ++tile) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const RowKeys keys = shared_.columns.keys[ColumnOf(tile) + i % 2];
        const int slot = first + warp_ * kGroupTokens + TokenOfRow(lane_ / 4) + i / 2 * 2;
        if (slot < keys.begin || slot >= keys.end) s_[tile * 4 + i] = EmptyLse<float>();
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

  // O^T += V^T P^T. Reports V to `read` as soon as it is in registers.
  __device__ void AddValues(const WorkItem& item, int first_group, const std::byte* v, int parity,
                            CopyBarrier& read) {
    const uint32_t p = SharedAddress(shared_.p[warpgroup_][parity]);
    const int first = first_group * kGroupTokens;
    // Dead slots may hold anything, NaN included, and 0 * NaN is NaN.
    const bool whole =
        first >= item.key_begin && first + Traits::kTileGroups * kGroupTokens <= item.key_end;
    uint32_t words[Traits::kTileGroups][Traits::kDimTiles][Traits::kValueWords];
    uint32_t a[Traits::kTileGroups][Traits::kDimTiles][4];
#pragma unroll
    for (int i = 0; i < Traits::kTileGroups; ++i) {
#pragma unroll
      for (int tile = 0; tile < Traits::kDimTiles; ++tile) {
        ReadValues<Traits>(v + i * Traits::kGroupBytes, tile, words[i][tile]);
      }
    }
    if (!whole) {
#pragma unroll
      for (int i = 0; i < Traits::kTileGroups; ++i) {
        const uint32_t alive =
            AliveTokens(item, first + i * kGroupTokens + lane_ % 4 * kQuadTokens);
#pragma unroll
        for (int tile = 0; tile < Traits::kDimTiles; ++tile) {
          KeepTokens<Traits::kKv>(words[i][tile], alive);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < Traits::kTileGroups; ++i) {
#pragma unroll
      for (int tile = 0; tile < Traits::kDimTiles; ++tile) {
        WidenValues<Traits>(words[i][tile], a[i][tile]);
      }
    }
    __syncwarp();
    if (lane_ == 0) read.Arrive();
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

// Adds up the warpgroups' outputs and writes the block's, or its partial: pieces of this many
// columns are merged by a launch of their own (merge_pieces.cuh), on all multiprocessors at once.
template <typename Traits>
__device__ __forceinline__ void StoreBlock(const AttentionArgs& args, const WorkItem& item,
                                           const typename Traits::Shared& shared) {
  constexpr int kPairs = Traits::kHeadDim / 2;
  for (int i = threadIdx.x; i < item.column_count * kPairs; i += Traits::kThreads) {
    const int column = i / kPairs;
    const int d = i % kPairs * 2;
    // Which warpgroup took which tiles depends on the block's other items; so that the result does
    // not, products are rounded before they are added, and the sum is the same either way round.
    float2 o = make_float2(0.0f, 0.0f);
#pragma unroll
    for (int g = 0; g < Traits::kWarpgroups; ++g) {
      const float factor = shared.warps.factor[4 * g][column];
      const float2 x = *reinterpret_cast<const float2*>(&shared.o[g][column][d]);
      o.x += __fmul_rn(x.x, factor);
      o.y += __fmul_rn(x.y, factor);
    }
    StoreColumn<Traits::kHeadDim, Traits::kColumns>(args, item, column, d, o,
                                                    shared.warps.lse2[column]);
  }
}

template <typename Traits>
__global__ void __launch_bounds__(Traits::kBlockThreads, 1)
    WgmmaAttentionKernel(const __grid_constant__ AttentionArgs args) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) std::byte shared_bytes[];
  auto& shared = *reinterpret_cast<typename Traits::Shared*>(shared_bytes);
  const int warpgroup = threadIdx.x / 128;

  Warpgroup<Traits> state(args, shared);
  QueryStager<Traits::kCompute, Traits::kHeadDim, Traits::kColumns, Traits::kThreads> queries;
  const auto stage_queries = [&] {
    queries.Finish(args, shared.columns, [&](int column, int vector, uint4 x) {
      // A lane's vector of K starts at dimension kElements * (4 * panel + lane % 4), and each four
      // of its elements are slots 2t, 2t + 1, 2t + 8 and 2t + 9 of one step.
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
  if (threadIdx.x == 0) {
    for (int i = 0; i < Traits::kStages; ++i) {
      shared.full[i].Init(1);
      shared.empty[i].Init(4);
    }
    FenceBarrierInit();
  }
  __syncthreads();
  if (threadIdx.x >= Traits::kThreads) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (threadIdx.x < Traits::kThreads + 32) CopyTiles<Traits>(args, shared);
    return;
  }
  asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
  copy_item(blockIdx.x, &shared.items[0]);
  queries.Load(args, first);
  stage_queries();
  state.Reset();
  WaitForCopies();
  SyncThreads<Traits::kThreads>();
  int tiles_before = 0;  // of the block's previous items
  for (int item_parity = 0;; item_parity ^= 1) {
    const WorkItem& item = shared.items[item_parity];
    const bool has_next = item.next >= 0;
    if (has_next) copy_item(item.next, &shared.items[item_parity ^ 1]);
    const int tiles =
        (item.group_end - item.group_begin + Traits::kTileGroups - 1) / Traits::kTileGroups;
    int parity = 0;
    static_assert(Traits::kWarpgroups == 2);
    for (int tile = (warpgroup + tiles_before) % 2; tile < tiles; tile += 2, parity ^= 1) {
      const RingPlace<Traits> place(tiles_before + tile);
      const int group = item.group_begin + tile * Traits::kTileGroups;
      shared.full[place.stage].Wait(place.parity);
      state.Scores(shared.stages[place.stage].k);
      state.Mask(item, group);
      state.Weigh(parity);
      state.AddValues(item, group, shared.stages[place.stage].v, parity, shared.empty[place.stage]);
    }
    tiles_before += tiles;

    SyncThreads<Traits::kThreads>();  // q and p give way to o
    state.Publish();
    WaitForCopies();
    SyncThreads<Traits::kThreads>();  // the queries' place is free, the next item is there
    if (has_next) queries.Load(args, shared.items[item_parity ^ 1]);
    CombineWarps(shared.warps, ValueScale(args, item), Traits::kBias);
    SyncThreads<Traits::kThreads>();
    StoreBlock<Traits>(args, item, shared);
    if (!has_next) return;
    SyncThreads<Traits::kThreads>();  // o gives way to q and p
    stage_queries();
    state.Reset();
    SyncThreads<Traits::kThreads>();
  }
#endif
}

}  // namespace tributary::cuda
