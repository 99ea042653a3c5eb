// Attention of many columns (16 to 64: verified drafts, DFlash blocks) over a paged cache, on
// sm_90a.
//
// The same products as in mma_attention.cuh, S^T = K Q^T and O^T += V^T P^T, by warpgroups of four
// warps and 64 tokens. Four more warps keep rings of such tiles of K and V filled with bulk copies.
// They are operand A, which is read from shared memory into registers, each byte by one thread: so
// FP8 is widened once, in registers. Operand B is the queries, which stay in shared memory, and the
// weights P, which the four warps of a warpgroup exchange through it. (Loads straight into
// registers, as in mma_attention.cuh, lose here: the fence that publishes P waits for every load in
// flight.)
//
// A warpgroup issues the product of the next tile's scores behind that of this tile's values, and
// widens V while scores are being multiplied: the tensor cores wait for the softmax alone, and
// there are two warpgroups to take turns.
//
// Weights are taken against a reference that follows the maximum only when it is exceeded by 2^8:
// until then nothing needs to be reduced between threads, and the barrier that publishes P also
// says whether it holds.
#pragma once

#include <algorithm>

#include "kernels/cuda/bulk_copy.cuh"
#include "kernels/cuda/cluster.cuh"
#include "kernels/cuda/columns.cuh"
#include "kernels/cuda/wgmma.cuh"
#include "kernels/cuda/widen.cuh"

namespace tributary::cuda {

// By these a raw product becomes the exponent of a weight: two neighbouring columns.
struct alignas(16) ColumnPair {
  float scale[2];
  float offset[2];  // the bias less the reference
};

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
  // One more warpgroup, which copies and gives its registers to those that compute.
  static constexpr int kBlockThreads = kThreads + 128;
  static constexpr int kTileBytes = kTileGroups * int(kGroupBytes);  // of K, and of V
  static constexpr float kBias = kCompute == DType::kF16 ? kWeightBias : 0.0f;
  // The next tile's scores are multiplied behind this tile's values, where registers allow it:
  // FP8 needs them for widening.
  static constexpr bool kScoresAhead = SizeOf(kKv) == 2 && kHeadDim <= 128;

  struct Fixed {
    union {
      // Tiles of operand B; see wgmma.cuh.
      struct {
        alignas(1024) std::byte q[kHeadDim / kTileSlots][kColumns * kTileRowBytes];
        alignas(1024) std::byte p[kWarpgroups][2][kColumns * kTileRowBytes];
      };
      float o[kWarpgroups][kColumns][kHeadDim + 4];  // once an item's products are done
    };
    ColumnPair pairs[kWarpgroups][kColumns / 2];
    float reference[kWarpgroups][kColumns];
    float warp_max[kWarpgroups][4][kColumns];
    ColumnState<kColumns> columns;
    WarpResults<4 * kWarpgroups, kColumns> warps;
    WorkItem items[2];
    CopyBarrier weights_published[kWarpgroups];  // one arrival a warp
    int exceeded[kWarpgroups][2];                // whether a logit outgrew the reference
    ClusterBarrier published;                    // o, in all blocks of the cluster
    ClusterBarrier read;                         // o, by all blocks of the cluster
    int is_last;
  };
  // A ring a warpgroup, of tiles of K and V in turn, of what a block's shared memory has left.
  using Stage = std::byte[kTileBytes];
  static constexpr int kSharedBytes = 227 * 1024;
  static constexpr int kStages =
      std::min<int>(10, (kSharedBytes - int(sizeof(Fixed)) - 1024) / kTileBytes / kWarpgroups);
  static_assert(kStages >= 2);
  struct Shared : Fixed {
    alignas(128) Stage stages[kWarpgroups][kStages];
    CopyBarrier full[kWarpgroups][kStages];
    CopyBarrier empty[kWarpgroups][kStages];  // one arrival a warp
  };
};

// A place in a warpgroup's ring.
template <typename Traits>
struct RingPlace {
  int stage = 0;
  uint32_t parity = 0;

  __device__ void Advance() {
    if (++stage == Traits::kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

// A copying warp: brings K or V of one warpgroup's tiles of every item, in order, a lane to a group
// of 16 tokens. Each such ring and half has a warp of its own: the hardware takes the copies of a
// warp's lanes one by one, and a single warp is too slow for all.
template <typename Traits>
class TileCopier {
 public:
  using Shared = typename Traits::Shared;

  __device__ TileCopier(const AttentionArgs& args, const ClusterPlace& place, Shared& shared,
                        int warp)
      : args_(args),
        shared_(shared),
        warpgroup_(warp / 2),
        values_(warp % 2 != 0),
        first_((static_cast<int>(place.rank) + warpgroup_ * static_cast<int>(place.size)) *
               Traits::kTileGroups),
        apart_(Traits::kWarpgroups * static_cast<int>(place.size) * Traits::kTileGroups),
        shift_(args.page_shift - 4) {
    if (values_) place_.Advance();
  }

  // Asks for the first tiles of an item, given by its first 16 bytes.
  __device__ void Prefetch(int4 item) const {
    const int lane = threadIdx.x % 32;
    const int tile = lane / Traits::kTileGroups;
    const int group = item.z + first_ + tile * apart_ + lane % Traits::kTileGroups;
    if (2 * tile >= Traits::kStages || group >= item.w) return;
    BulkPrefetch(Source(item, group, Page(item, group)), Traits::kGroupBytes);
  }

  __device__ void CopyItem(int4 item) {
    const int lane = threadIdx.x % 32;
    int group = item.z + first_;
    const bool copies = lane < Traits::kTileGroups;
    int page = copies && group + lane < item.w ? Page(item, group + lane) : 0;
    for (; group < item.w; group += apart_) {
      const int next = group + apart_ + lane;
      const int next_page = copies && next < item.w ? Page(item, next) : 0;
      // The stage's previous use ended with the phase before this one.
      if (2 * copied_ + (values_ ? 1 : 0) >= Traits::kStages) {
        shared_.empty[warpgroup_][place_.stage].Wait(place_.parity ^ 1);
      }
      CopyBarrier& full = shared_.full[warpgroup_][place_.stage];
      if (lane == 0) {
        full.ArriveAndExpect(min(Traits::kTileGroups, item.w - group) *
                             uint32_t(Traits::kGroupBytes));
      }
      __syncwarp();
      if (copies && group + lane < item.w) {
        BulkCopy(shared_.stages[warpgroup_][place_.stage] + lane * Traits::kGroupBytes,
                 Source(item, group + lane, page), uint32_t(Traits::kGroupBytes), full, ReadOnce());
      }
      place_.Advance();
      place_.Advance();
      ++copied_;
      page = next_page;
    }
  }

 private:
  __device__ int Page(int4 item, int group) const {
    return __ldg(args_.page_tables + item.x + (group >> shift_));
  }
  __device__ const std::byte* Source(int4 item, int group, int page) const {
    const size_t plane = Traits::kGroupBytes << shift_;
    const size_t head = item.y + (values_ ? args_.kv_heads : 0);
    return args_.cache + (size_t(page) * 2 * args_.kv_heads + head) * plane +
           size_t(group & ((1 << shift_) - 1)) * Traits::kGroupBytes;
  }

  const AttentionArgs& args_;
  Shared& shared_;
  const int warpgroup_;
  const bool values_;
  const int first_;  // of its tiles, in groups from the item's first
  const int apart_;  // groups from one of its tiles to the next
  const int shift_;
  RingPlace<Traits> place_;
  int copied_ = 0;  // tiles
};

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

// A thread's words of V of one group of 16 tokens.
template <typename Traits>
__device__ __forceinline__ void ReadValues(
    const std::byte* group, uint32_t (&words)[Traits::kDimTiles][Traits::kValueWords]) {
  // FP8: two tiles of dimensions share a vector.
  constexpr int kTilesOfVector =
      Traits::kDimTiles == 1 ? 1 : kVectorBytes / (4 * Traits::kValueWords);
#pragma unroll
  for (int tile = 0; tile < Traits::kDimTiles; tile += kTilesOfVector) {
    const std::byte* at =
        group + ValueOffset(threadIdx.x % 4 * kQuadTokens, DimsOfTile<Traits>(tile),
                            Traits::kHeadDim, SizeOf(Traits::kKv));
    if constexpr (kTilesOfVector * Traits::kValueWords == 4) {
      const uint4 x = *reinterpret_cast<const uint4*>(at);
      const uint32_t of_vector[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        words[tile + i / Traits::kValueWords][i % Traits::kValueWords] = of_vector[i];
      }
    } else {
      const uint2 x = *reinterpret_cast<const uint2*>(at);
      words[tile][0] = x.x, words[tile][1] = x.y;
    }
  }
}

// Two dimensions of four tokens as operand A of one step.
template <typename Traits>
__device__ __forceinline__ void WidenValueWords(const uint32_t (&words)[Traits::kValueWords],
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

// What of an item its tiles need, kept in registers.
struct TileRanges {
  int key_begin, key_end;
  int dense_begin, dense_end;
  int group_end;

  __device__ explicit TileRanges(const WorkItem& item)
      : key_begin(item.key_begin),
        key_end(item.key_end),
        dense_begin(item.dense_begin),
        dense_end(item.dense_end),
        group_end(item.group_end) {}
};

template <typename Traits>
class Warpgroup {
 public:
  using Shared = typename Traits::Shared;
  static constexpr int kSteps = Traits::kHeadDim / 16;  // of K Q^T

  __device__ Warpgroup(const AttentionArgs& args, Shared& shared, int warpgroup)
      : args_(args),
        shared_(shared),
        lane_(threadIdx.x % 32),
        warp_(threadIdx.x / 32 % 4),
        warpgroup_(warpgroup) {}

  // Before an item, its queries being staged: by threads that no longer need `reference`.
  __device__ void Reset() {
#pragma unroll
    for (int tile = 0; tile < Traits::kDimTiles; ++tile) {
#pragma unroll
      for (int i = 0; i < Traits::kColumns / 2; ++i) o_[tile][i] = 0.0f;
    }
#pragma unroll
    for (int tile = 0; tile < Traits::kTiles; ++tile) sum_[tile][0] = sum_[tile][1] = 0.0f;
  }

  // Adds the tiles of an item that fall to this warpgroup: from `group`, `apart` groups apart.
  __device__ void AddTiles(const WorkItem& item, int group, int apart) {
    SetReferences();
    const TileRanges ranges(item);
    if (group >= ranges.group_end) return;
    uint32_t keys[kSteps][4];
    uint32_t values[Traits::kTileGroups][Traits::kDimTiles][4];
    LoadKeys();
    WidenKeys(keys);
    FenceKeys(keys);
    WgmmaFence();
    MultiplyKeys(keys);
    EndProducts();
    for (;;) {
      const bool more = group + apart < ranges.group_end;
      // What enters the next products is widened between the softmax's slow instructions, and all
      // of it before the first product begins: otherwise the compiler runs them one by one.
      LoadValues(ranges, group);
      if (Traits::kScoresAhead && more) LoadKeys();
      BeginWeights(ranges, group, keys);
      WidenValues(values);
      EndWeights(ranges, group);
      if (!more) break;
      group += apart;
      WgmmaFence();
      MultiplyValues(values);
      if constexpr (!Traits::kScoresAhead) {
        EndProducts();
        LoadKeys();
        WidenKeys(keys);
        FenceKeys(keys);
        WgmmaFence();
      }
      MultiplyKeys(keys);
      EndProducts();
    }
    WgmmaFence();
    MultiplyValues(values);
    EndProducts();
  }

  // Puts the unnormalised O and the sums where all threads can merge them.
  __device__ void Publish() {
    const int warp = warpgroup_ * 4 + warp_;
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
  __device__ ColumnPair& PairOf(int tile) const {
    return shared_.pairs[warpgroup_][tile * 4 + lane_ % 4];
  }

  // No key has been seen yet.
  __device__ void SetReferences() {
    const int thread = threadIdx.x % 128;
    for (int c = thread; c < Traits::kColumns; c += 128) {
      shared_.reference[warpgroup_][c] = kNoReference;
      ColumnPair& pair = shared_.pairs[warpgroup_][c / 2];
      pair.scale[c % 2] = args_.soft_cap > 0.0f ? 1.0f : shared_.columns.scale[c];
      pair.offset[c % 2] = Traits::kBias - kNoReference;
    }
    SyncWarpgroup(warpgroup_);
  }

  // Brings K of the next tile into registers, when it is there.
  __device__ void LoadKeys() {
    shared_.full[warpgroup_][place_.stage].Wait(place_.parity);
    const std::byte* at = shared_.stages[warpgroup_][place_.stage] + warp_ * Traits::kGroupBytes +
                          TokenOfRow(lane_ / 4) * kKeyPanelBytes + lane_ % 4 * kVectorBytes;
#pragma unroll
    for (int panel = 0; panel < Traits::kPanels; ++panel) {
      const auto* low = reinterpret_cast<const uint4*>(at + panel * kGroupTokens * kKeyPanelBytes);
      k_[panel][0] = *low;
      k_[panel][1] = low[2 * kKeyPanelBytes / kVectorBytes];
    }
    LeaveStage();
  }

  // K as operand A.
  __device__ void WidenKeys(uint32_t (&a)[kSteps][4]) const {
    constexpr int kStepsPerPanel = Traits::kQuadsPerVector;
#pragma unroll
    for (int panel = 0; panel < Traits::kPanels; ++panel) {
#pragma unroll
      for (int quad = 0; quad < kStepsPerPanel; ++quad) {
        uint32_t(&step)[4] = a[panel * kStepsPerPanel + quad];
        WidenQuad<Traits::kKv>(k_[panel][0], quad, step[0], step[2]);
        WidenQuad<Traits::kKv>(k_[panel][1], quad, step[1], step[3]);
      }
    }
  }
  __device__ void FenceKeys(uint32_t (&a)[kSteps][4]) const {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) FenceRegisters(a[step]);
  }

  // Starts S^T of a tile, as raw products.
  __device__ void MultiplyKeys(const uint32_t (&a)[kSteps][4]) {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const uint64_t tile = TileDescriptor(SharedAddress(shared_.q[step * 16 / kTileSlots]));
      Wgmma<Traits::kCompute, Traits::kColumns>(
          s_, a[step], DescriptorOfStep(tile, step % (kTileSlots / 16)), step > 0);
    }
  }

  // Starts O^T += V^T P^T.
  __device__ void MultiplyValues(const uint32_t (&a)[Traits::kTileGroups][Traits::kDimTiles][4]) {
    const uint64_t p = TileDescriptor(SharedAddress(shared_.p[warpgroup_][0]) +
                                      parity_ * (Traits::kColumns * kTileRowBytes));
#pragma unroll
    for (int i = 0; i < Traits::kTileGroups; ++i) {
#pragma unroll
      for (int tile = 0; tile < Traits::kDimTiles; ++tile) {
        Wgmma<Traits::kCompute, Traits::kColumns>(o_[tile], a[i][tile], DescriptorOfStep(p, i),
                                                  true);
      }
    }
  }

  // Waits for the products begun.
  __device__ void EndProducts() {
    WgmmaCommit();
    WgmmaWait();
    FenceRegisters(s_);
#pragma unroll
    for (int tile = 0; tile < Traits::kDimTiles; ++tile) FenceRegisters(o_[tile]);
  }

  // Brings V of the tile into registers.
  __device__ void LoadValues(const TileRanges& item, int first_group) {
    const int first = first_group * kGroupTokens;
    // Dead slots may hold anything, NaN included, and 0 * NaN is NaN.
    const bool whole =
        first >= item.key_begin && first + Traits::kTileGroups * kGroupTokens <= item.key_end;
    shared_.full[warpgroup_][place_.stage].Wait(place_.parity);
    const std::byte* v = shared_.stages[warpgroup_][place_.stage];
#pragma unroll
    for (int i = 0; i < Traits::kTileGroups; ++i) {
      ReadValues<Traits>(v + i * Traits::kGroupBytes, v_[i]);
    }
    if (!whole) {
#pragma unroll
      for (int i = 0; i < Traits::kTileGroups; ++i) {
        const uint32_t alive =
            AliveTokens(item, first + i * kGroupTokens + lane_ % 4 * kQuadTokens);
#pragma unroll
        for (int tile = 0; tile < Traits::kDimTiles; ++tile) {
          KeepTokens<Traits::kKv>(v_[i][tile], alive);
        }
      }
    }
    LeaveStage();
  }

  // V as operand A.
  __device__ void WidenValues(uint32_t (&a)[Traits::kTileGroups][Traits::kDimTiles][4]) const {
#pragma unroll
    for (int i = 0; i < Traits::kTileGroups; ++i) {
#pragma unroll
      for (int tile = 0; tile < Traits::kDimTiles; ++tile) {
        WidenValueWords<Traits>(v_[i][tile], a[i][tile]);
        FenceRegisters(a[i][tile]);
      }
    }
  }

  __device__ void LeaveStage() {
    __syncwarp();
    if (lane_ == 0) shared_.empty[warpgroup_][place_.stage].Arrive();
    place_.Advance();
  }

  // Turns raw products into weights and publishes them in shared memory for the whole warpgroup.
  // What can be done while the other warps come to the same point goes between these two.
  __device__ void BeginWeights(const TileRanges& item, int first_group,
                               uint32_t (&keys)[kSteps][4]) {
    if (args_.soft_cap > 0.0f) Cap();
    parity_ ^= 1;
    const int first = first_group * kGroupTokens;
    bool exceeded;
    if (Dense(item, first_group)) {
      exceeded = StoreWeights<true>(first);
      if (Traits::kScoresAhead) WidenKeys(keys);
    } else {
      exceeded = StoreWeights<false>(first);
      if (Traits::kScoresAhead) WidenKeys(keys);
    }
    PublishWeights(exceeded);
    if (Traits::kScoresAhead) FenceKeys(keys);
  }
  __device__ void EndWeights(const TileRanges& item, int first_group) {
    CopyBarrier& published = shared_.weights_published[warpgroup_];
    published.Wait(weights_parity_);
    weights_parity_ ^= 1;
    if (shared_.exceeded[warpgroup_][parity_] != 0) {
      RaiseReference(item, first_group);
      PublishWeights(StoreWeights<false>(first_group * kGroupTokens));
      published.Wait(weights_parity_);
      weights_parity_ ^= 1;
    }
#pragma unroll
    for (int tile = 0; tile < Traits::kTiles; ++tile) {
      sum_[tile][0] += fresh_[tile][0];
      sum_[tile][1] += fresh_[tile][1];
    }
  }

  __device__ bool Dense(const TileRanges& item, int first_group) const {
    const int first = first_group * kGroupTokens;
    return first >= item.dense_begin &&
           first + Traits::kTileGroups * kGroupTokens <= item.dense_end;
  }

  __device__ void PublishWeights(bool exceeded) {
    if (exceeded) shared_.exceeded[warpgroup_][parity_] = 1;
    FenceSharedForWgmma();
    __syncwarp();
    if (lane_ == 0) shared_.weights_published[warpgroup_].Arrive();
  }

  // From raw products to capped logits in base 2.
  __device__ void Cap() {
#pragma unroll
    for (int tile = 0; tile < Traits::kTiles; ++tile) {
      const float2 scale = *reinterpret_cast<const float2*>(&shared_.columns.scale[ColumnOf(tile)]);
#pragma unroll
      for (int i = 0; i < 4; ++i) s_[tile * 4 + i] *= i % 2 == 0 ? scale.x : scale.y;
    }
    CapLogits(args_.soft_cap, s_);
  }

  // Whether the column of a tile's element i may see its slot, the tile of tokens beginning at
  // `first`.
  __device__ bool Visible(int tile, int i, int first) const {
    const RowKeys keys = shared_.columns.keys[ColumnOf(tile) + i % 2];
    const int slot = first + warp_ * kGroupTokens + TokenOfRow(lane_ / 4) + i / 2 * 2;
    return slot >= keys.begin && slot < keys.end;
  }

  // Stores P^T against the reference; true when this thread found a logit that outgrew it. Keeps
  // the products: they are needed again then.
  template <bool kDense>
  __device__ bool StoreWeights(int first) {
    const uint32_t p = SharedAddress(shared_.p[warpgroup_][0]) +
                       parity_ * (Traits::kColumns * kTileRowBytes) +
                       SwizzledChunk(lane_ / 16 * 8 + lane_ % 8, warp_ * 2 + lane_ / 8 % 2);
    // All loads come before the first store: the hardware would keep their order.
    ColumnPair pairs[Traits::kTiles];
#pragma unroll
    for (int tile = 0; tile < Traits::kTiles; ++tile) pairs[tile] = PairOf(tile);
    uint32_t packed[Traits::kTiles][2];
    uint32_t largest = 0;
#pragma unroll
    for (int tile = 0; tile < Traits::kTiles; ++tile) {
      float w[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        w[i] = Exp2(fmaf(s_[tile * 4 + i], pairs[tile].scale[i % 2], pairs[tile].offset[i % 2]));
        if (!kDense && !Visible(tile, i, first)) w[i] = 0.0f;
      }
      fresh_[tile][0] = w[0] + w[2];
      fresh_[tile][1] = w[1] + w[3];
      packed[tile][0] = Pack<Traits::kCompute>(w[0], w[1]);
      packed[tile][1] = Pack<Traits::kCompute>(w[2], w[3]);
      largest = MaxOfPairs<Traits::kCompute>(
          largest, MaxOfPairs<Traits::kCompute>(packed[tile][0], packed[tile][1]));
    }
#pragma unroll
    for (int tile = 0; tile < Traits::kTiles; tile += 2) {
      StoreTransposed(p + tile * 8 * kTileRowBytes, packed[tile][0], packed[tile][1],
                      packed[tile + 1][0], packed[tile + 1][1]);
    }
    // 2^(bias + headroom)
    constexpr uint32_t kLimit = Traits::kCompute == DType::kF16 ? 0x78007800u : 0x43804380u;
    static_assert(kWeightBias + kHeadroom == 15.0f && kHeadroom == 8.0f);
    return AnyGreater(largest, kLimit);
  }

  // Moves the reference of every column up to its maximum so far, and O and the sums with it.
  __device__ void RaiseReference(const TileRanges& item, int first_group) {
    const bool dense = Dense(item, first_group);
    const int first = first_group * kGroupTokens;
#pragma unroll
    for (int tile = 0; tile < Traits::kTiles; ++tile) {
      const ColumnPair pair = PairOf(tile);
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        float peak = EmptyLse<float>();
#pragma unroll
        for (int i = c; i < 4; i += 2) {
          if (dense || Visible(tile, i, first)) {
            peak = fmaxf(peak, s_[tile * 4 + i] * pair.scale[c]);
          }
        }
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
        const float factor = Exp2(shared_.reference[warpgroup_][column] - Raised(column));
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
      const float raised = Raised(c);
      shared_.reference[warpgroup_][c] = raised;
      shared_.pairs[warpgroup_][c / 2].offset[c % 2] = Traits::kBias - raised;
    }
    if (threadIdx.x % 128 == 0) shared_.exceeded[warpgroup_][parity_] = 0;
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
  RingPlace<Traits> place_;      // of the next tile
  uint32_t parity_ = 0;          // of the weights' two places
  uint32_t weights_parity_ = 0;  // of the phase of weights_published
  float s_[Traits::kColumns / 2];
  float o_[Traits::kDimTiles][Traits::kColumns / 2];
  uint4 k_[Traits::kPanels][2] = {};
  uint32_t v_[Traits::kTileGroups][Traits::kDimTiles][Traits::kValueWords];
  float sum_[Traits::kTiles][2];    // over this thread's rows only
  float fresh_[Traits::kTiles][2];  // the tile's share, until its weights hold
};

// Adds up the warpgroups' outputs and writes the block's, or keeps it for its cluster.
template <typename Traits>
__device__ __forceinline__ void StoreBlock(const AttentionArgs& args, const WorkItem& item,
                                           bool of_cluster, typename Traits::Shared& shared) {
  constexpr int kUnits = Traits::kHeadDim / 4;  // of a column
#pragma unroll 2
  for (int i = threadIdx.x; i < item.column_count * kUnits; i += Traits::kThreads) {
    const int column = i / kUnits;
    const int d = i % kUnits * 4;
    float4 o = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
    for (int g = 0; g < Traits::kWarpgroups; ++g) {
      AddScaled(o, shared.warps.factor[4 * g][column],
                *reinterpret_cast<const float4*>(&shared.o[g][column][d]));
    }
    if (of_cluster) {
      *reinterpret_cast<float4*>(&shared.o[0][column][d]) = o;
    } else {
      StoreColumn<Traits::kHeadDim, Traits::kColumns>(args, item, column, d, o,
                                                      shared.warps.lse2[column]);
    }
  }
}

template <typename Traits>
__global__ void __launch_bounds__(Traits::kBlockThreads, 1)
    WgmmaAttentionKernel(const __grid_constant__ AttentionArgs args) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) std::byte shared_bytes[];
  auto& shared = *reinterpret_cast<typename Traits::Shared*>(shared_bytes);
  // (The shuffle tells the compiler that all lanes agree.)
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
  const ClusterPlace place = ThisCluster();
  const bool of_cluster = place.size > 1;

  // Until the launches ahead have ended, what this one will read is asked for.
  LetNextLaunchBegin();
  const int index = static_cast<int>(place.cluster);
  const WorkItem& first = args.items[index];
  if (threadIdx.x == 0) {
#pragma unroll 1
    for (int i = 0; i < Traits::kWarpgroups * Traits::kStages; ++i) {
      shared.full[0][i].Init(1);
      shared.empty[0][i].Init(4);
    }
    for (int i = 0; i < Traits::kWarpgroups; ++i) {
      shared.weights_published[i].Init(4);
      shared.exceeded[i][0] = shared.exceeded[i][1] = 0;
    }
    shared.published.Init(place.size);
    shared.read.Init(place.size);
    FenceBarrierInit();
  }
  if (threadIdx.x >= Traits::kThreads) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    static_assert(2 * Traits::kWarpgroups == 4);  // a half of a ring to each of the four warps
    TileCopier<Traits> copier(args, place, shared, threadIdx.x / 32 % 4);
    copier.Prefetch(*reinterpret_cast<const int4*>(&first));
    __syncthreads();
    ArriveAtCluster(place);
    if (first.column_count == 0) return;
    WaitForLaunchesAhead();
    for (int i = index; i >= 0; i = __ldg(&args.items[i].next)) {
      // page_table, kv_head, group_begin, group_end
      copier.CopyItem(__ldg(reinterpret_cast<const int4*>(args.items + i)));
    }
    return;
  }
  asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");

  Warpgroup<Traits> state(args, shared, warpgroup);
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
  const auto copy_item = [&](int from, WorkItem* to) {
    if (threadIdx.x < sizeof(WorkItem) / 16) {
      CopyAsync16(reinterpret_cast<uint4*>(to) + threadIdx.x,
                  reinterpret_cast<const uint4*>(args.items + from) + threadIdx.x);
    }
  };

  copy_item(index, &shared.items[0]);
  queries.Prefetch(args, first);
  __syncthreads();
  ArriveAtCluster(place);
  WaitForLaunchesAhead();
  if (first.column_count == 0) return;
  queries.Load(args, first);
  WaitForCopies();
  WaitForCluster(place);
  for (int item_parity = 0;; item_parity ^= 1) {
    stage_queries();
    SyncThreads<Traits::kThreads>();
    state.Reset();
    const WorkItem& item = shared.items[item_parity];
    const bool has_next = item.next >= 0;
    if (has_next) copy_item(item.next, &shared.items[item_parity ^ 1]);
    // The cluster's blocks take tiles in turn, and so do a block's warpgroups.
    static_assert(Traits::kWarpgroups == 2);
    const int apart = static_cast<int>(place.size) * Traits::kTileGroups;
    const int group = item.group_begin + static_cast<int>(place.rank) * Traits::kTileGroups;
    state.AddTiles(item, group + warpgroup * apart, 2 * apart);

    SyncThreads<Traits::kThreads>();  // q and p give way to o
    state.Publish();
    WaitForCopies();
    SyncThreads<Traits::kThreads>();  // the queries' place is free, the next item is there
    if (has_next) queries.Load(args, shared.items[item_parity ^ 1]);
    CombineWarps(shared.warps, ValueScale(args, item), Traits::kBias);
    SyncThreads<Traits::kThreads>();
    StoreBlock<Traits>(args, item, of_cluster, shared);
    if (of_cluster) {
      SyncThreads<Traits::kThreads>();
      shared.published.Arrive(place);
      shared.published.Wait(item_parity);
      MergeCluster<Traits::kHeadDim, Traits::kColumns, Traits::kThreads>(
          args, item, place, shared.o[0], shared.warps.lse2);
      SyncThreads<Traits::kThreads>();
      shared.read.Arrive(place);
    }
    if (item.partial_count > 1) {
      MergeIfLast<Traits::kHeadDim, Traits::kColumns, Traits::kThreads>(args, item, place,
                                                                        &shared.is_last);
    }
    if (!has_next) break;
    if (of_cluster) shared.read.Wait(item_parity);
    SyncThreads<Traits::kThreads>();  // o gives way to q and p
  }
  // No block ends while others may read its shared memory.
  ArriveAtCluster(place);
  WaitForCluster(place);
#endif
}

}  // namespace tributary::cuda
