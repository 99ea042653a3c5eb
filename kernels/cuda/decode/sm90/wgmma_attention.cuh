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
// A warp that multiplies does little else: an operand in registers keeps it until the tensor cores
// have taken it. So it is other warpgroups, at other tiles or other columns, that make use of the
// time.
//
// Weights are taken against a reference that follows the maximum only when it is exceeded by 2^8:
// until then nothing needs to be reduced between threads, and the barrier that publishes P also
// says whether it holds.
#pragma once

#include <algorithm>
#include <type_traits>

#include "kernels/cuda/decode/columns.cuh"
#include "kernels/cuda/decode/cut_job.cuh"
#include "kernels/cuda/decode/queries.cuh"
#include "kernels/cuda/decode/sm90/wgmma_block.cuh"
#include "kernels/cuda/ptx/bulk_copy.cuh"
#include "kernels/cuda/ptx/cluster.cuh"
#include "kernels/cuda/ptx/wgmma.cuh"
#include "kernels/cuda/ptx/widen.cuh"

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
  // Words of V of a thread, a group and a tile of 64 dimensions: two dimensions of four tokens.
  static constexpr int kValueWords = 2 * int(SizeOf(kKv));
  static constexpr int kWarpgroups = kComputeWarpgroups;  // a ring each
  static constexpr int kThreads = 128 * kWarpgroups;      // that compute
  static constexpr int kWarps = kThreads / 32;
  // One more warpgroup, which copies and gives its registers to those that compute.
  static constexpr int kBlockThreads = kThreads + 128;
  static constexpr int kTileBytes = kTileGroups * int(kGroupBytes);  // of K, and of V
  static constexpr float kBias = kCompute == DType::kF16 ? kWeightBias : 0.0f;
  // The warpgroups' outputs are added up half by half: the dimensions' halves, or, where 64 are
  // all, the columns'.
  static constexpr bool kDimsSplit = kDimTiles > 1;
  static constexpr int kOwnDimTiles = kDimsSplit ? kDimTiles / 2 : 1;
  static constexpr int kOwnColumns = kDimsSplit ? kColumns : kColumns / 2;
  static constexpr int kOwnTiles = kOwnColumns / 8;
  static constexpr int kOwnVectors = kOwnDimTiles * kOwnColumns / 8;  // of four floats
  // The next tile's scores are multiplied right behind this tile's values, where registers allow
  // it: FP8 needs them for widening.
  static constexpr bool kTogether = SizeOf(kKv) == 2 && kHeadDim <= 128;
  // Registers of a computing and of a copying thread. There are no more than the block began with,
  // the same for all its threads: a warp that asks for more waits for ever.
  static constexpr int kRegisters = 240;
  static constexpr int kCopyingRegisters = 24;
  static constexpr int kRegistersAtBegin = 65536 / kBlockThreads / 8 * 8;
  static_assert(kRegisters * kThreads + kCopyingRegisters * (kBlockThreads - kThreads) <=
                kRegistersAtBegin * kBlockThreads);

  // A warpgroup's weights, and, when its last product is done, what it gives away.
  union Scratch {
    alignas(1024) std::byte p[2][kColumns * kTileRowBytes];
    float4 half[kOwnVectors][128];  // of O
  };

  struct Fixed {
    union {
      // Tiles of operand B; see wgmma.cuh.
      struct {
        alignas(1024) std::byte q[kHeadDim / kTileSlots][kColumns * kTileRowBytes];
        union {
          Scratch scratch[kWarpgroups];
          std::byte raw[kColumns * kHeadDim * 4];  // queries as they come
        };
      };
      float o[kColumns][kHeadDim + 4];  // the block's, for its cluster
    };
    ColumnPair pairs[kWarpgroups][kColumns / 2];
    float reference[kWarpgroups][kColumns];
    alignas(16) float factor[kWarpgroups][kColumns];
    alignas(16) float2 factors[kWarps][kColumns];  // by which the outputs enter the sum; a warp's
    float of_warps[kWarps][kColumns];              // the warps' maxima, later their sums
    float lse2[kColumns];                          // of the block, in base 2
    int target[kColumns];                          // the row of O or of the workspace, -1 for none
    ColumnState<kColumns> columns;
    WorkItem items[2];
    float v_scale;
    CopyBarrier weights_published[kWarpgroups];  // one arrival a thread
    CopyBarrier queries_staged;                  // likewise, of all that compute; a phase an item
    BlockBarrier met;                            // by all that compute
    int exceeded[kWarpgroups][2];                // whether a logit outgrew the reference
    ClusterBarrier published;                    // o, in all blocks of the cluster
    ClusterBarrier read;                         // o, by all blocks of the cluster
    int is_last;
  };
  // A ring for each half of the tiles, of K and V in turn, of what a block's shared memory has
  // left.
  using Stage = std::byte[kTileBytes];
  static constexpr int kSharedBytes = 227 * 1024;
  // Tiles of a ring that are on their way at once.
  static constexpr int kUnderWay = kBytesUnderWay / (kWarpgroups * kTileBytes);
  static constexpr int kStages = RingLength(
      std::min<int>(10, (kSharedBytes - int(sizeof(Fixed)) - 1024) / kTileBytes / kWarpgroups),
      kUnderWay);
  static_assert(kUnderWay >= 1 && kStages >= 2);
  struct Shared : Fixed {
    alignas(128) Stage stages[kWarpgroups][kStages];
    CopyBarrier full[kWarpgroups][kStages];
    CopyBarrier empty[kWarpgroups][kStages];  // one arrival a thread that reads it
  };
};

// A copying warp: brings K or V of one half of the tiles of every item, in order, a lane to a group
// of 16 tokens. Each such ring and half has a warp of its own: the hardware takes the copies of a
// warp's lanes one by one, and a single warp is too slow for all.
template <typename Traits>
class TileCopier {
 public:
  using Shared = typename Traits::Shared;

  __device__ TileCopier(const AttentionArgs& args, const ClusterPlace& place, Shared& shared,
                        int warp)
      : shared_(shared),
        half_(warp / 2),
        values_(warp % 2 != 0),
        turns_(place, half_),
        source_(args, values_) {
    if (values_) place_.Advance();
  }

  // By all lanes: readies half of the barriers of this warp's ring.
  __device__ void InitBarriers() {
    const int lane = threadIdx.x % 32;
    if (lane >= Traits::kStages) return;
    if (values_) {
      shared_.full[half_][lane].Init(1);
    } else {
      shared_.empty[half_][lane].Init(128);
    }
  }

  // Asks L2 for the first tiles of an item, given by its first 16 bytes.
  __device__ void Prefetch(int4 item) const {
    const int pages = source_.Pages(item, item.z + turns_.first, turns_);
    source_.Prefetch(item, turns_, pages, (Traits::kStages + 1) / 2);
  }

  __device__ void CopyItem(int4 item) {
    const int lane = threadIdx.x % 32;
    int group = item.z + turns_.first;
    const bool copies = lane < kTileGroups;
    int page = copies && group + lane < item.w ? source_.Page(item, group + lane) : 0;
    for (; group < item.w; group += turns_.apart) {
      const int next = group + turns_.apart + lane;
      const int next_page = copies && next < item.w ? source_.Page(item, next) : 0;
      // The stage's previous use ended with the phase before this one.
      const int use = 2 * copied_ + (values_ ? 1 : 0);
      if (use >= Traits::kStages) {
        if (use < Traits::kStages + 2) WaitForCluster(ThisCluster());  // this warp's first
        shared_.empty[half_][place_.stage].Wait(place_.parity ^ 1);
      }
      if (use >= Traits::kUnderWay && Traits::kUnderWay < Traits::kStages) WaitForEarlierTile();
      CopyBarrier& full = shared_.full[half_][place_.stage];
      if (lane == 0) {
        full.ArriveAndExpect(min(kTileGroups, item.w - group) * uint32_t(Traits::kGroupBytes));
      }
      __syncwarp();
      if (copies && group + lane < item.w) {
        BulkCopy(shared_.stages[half_][place_.stage] + lane * Traits::kGroupBytes,
                 source_.At(item, group + lane, page), uint32_t(Traits::kGroupBytes), full,
                 ReadOnce());
      }
      place_.Advance();
      place_.Advance();
      ++copied_;
      page = next_page;
    }
  }

 private:
  // Until the tile has come that is kUnderWay places before this one.
  __device__ __forceinline__ void WaitForEarlierTile() const {
    const auto earlier = place_.Before(Traits::kUnderWay);
    shared_.full[half_][earlier.stage].Wait(earlier.parity);
  }

  Shared& shared_;
  const int half_;
  const bool values_;
  const TileTurns turns_;
  const GroupSource<int(Traits::kGroupBytes)> source_;
  RingPlace<Traits::kStages> place_;
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

// Reduces, over the eight lanes that hold a tile's rows, the values of a thread's kCount columns
// (two of each tile of eight). Each of these lanes is left with kCount / 8 of the columns, from the
// one returned on; they are neighbours.
template <int kCount, typename Op>
__device__ __forceinline__ int ReduceRows(float (&x)[kCount], Op op) {
  const int lane = threadIdx.x % 32;
  int first = 0;
  const auto halve = [&]<int kHalf>(std::integral_constant<int, kHalf>, int lane_bit) {
    const bool upper = lane & lane_bit;
#pragma unroll
    for (int i = 0; i < kHalf; ++i) {
      const float give = upper ? x[i] : x[i + kHalf];
      const float keep = upper ? x[i + kHalf] : x[i];
      x[i] = op(keep, __shfl_xor_sync(0xffffffffu, give, lane_bit));
    }
    if (upper) first += kHalf;
  };
  halve(std::integral_constant<int, kCount / 2>{}, 4);
  halve(std::integral_constant<int, kCount / 4>{}, 8);
  halve(std::integral_constant<int, kCount / 8>{}, 16);
  return first / 2 * 8 + lane % 4 * 2 + first % 2;
}

// What a tile's scores are: raw products, all of them visible or not, or logits, -inf where a
// column may not see a slot.
enum class Scores { kDenseProducts, kProducts, kLogits };

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
        warpgroup_(warpgroup),
        weights_at_(Kept(SharedAddress(shared.scratch[warpgroup].p) +
                         SwizzledChunk(lane_ / 16 * 8 + lane_ % 8, warp_ * 2 + lane_ / 8 % 2))) {}

  // Adds the tiles of an item that fall to this warpgroup: from `group`, `apart` groups apart.
  __device__ __forceinline__ void AddTiles(const WorkItem& item, int group, int apart) {
#pragma unroll
    for (int tile = 0; tile < Traits::kDimTiles; ++tile) {
#pragma unroll
      for (int i = 0; i < Traits::kColumns / 2; ++i) o_[tile][i] = 0.0f;
    }
#pragma unroll
    for (int i = 0; i < kCells; ++i) sum_[i] = 0.0f;
    ResetReferences();
    const TileRanges ranges(item);
    if (group < ranges.group_end) AddSomeTiles(ranges, group, apart);
  }

  // Adds up what the warpgroups found, so that each holds one half of the block's normalised
  // output; brings to shared memory where it goes; writes the LSE unless the cluster merges it
  // first. meet(): the computing threads' barrier.
  template <typename Meet>
  __device__ __forceinline__ void Combine(const WorkItem& item, bool of_cluster, Meet meet) {
    const int column = ReduceRows(sum_, [](float a, float b) { return a + b; });
#pragma unroll
    for (int i = 0; i < kCells / 8; ++i) {
      shared_.of_warps[warpgroup_ * 4 + warp_][column + i] = sum_[i];
    }
    const int c = threadIdx.x;
    if (c < Traits::kColumns) {
      shared_.target[c] = RowOfOutput<Traits::kColumns>(args_, item, c).index;
    }
    SyncWarpgroup(warpgroup_);  // its last product is done, and the weights give way
    if (warpgroup_ == 0) {
      Give<1>();
    } else {
      Give<0>();
    }
    meet();
    FindFactors(item, of_cluster);
    if (warpgroup_ == 0) {
      Take<0>();
    } else {
      Take<1>();
    }
  }

  // store(column, d, x) takes dimensions d and d + 1 of a column of the block's normalised output.
  template <typename Store>
  __device__ __forceinline__ void Output(Store store) const {
    const int first_column = Traits::kDimsSplit ? 0 : warpgroup_ * Traits::kOwnColumns;
    const int first_tile = Traits::kDimsSplit ? warpgroup_ * Traits::kOwnDimTiles : 0;
#pragma unroll
    for (int dims = 0; dims < Traits::kOwnDimTiles; ++dims) {
      const int d = DimsOfTile<Traits>(first_tile + dims);
#pragma unroll
      for (int tile = 0; tile < Traits::kOwnTiles; ++tile) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          store(first_column + ColumnOf(tile) + c, d,
                make_float2(own_[dims][tile * 4 + c], own_[dims][tile * 4 + c + 2]));
        }
      }
    }
  }

 private:
  // Which half of the tiles and which part of the columns this warpgroup has.
  static constexpr int kCells = Traits::kColumns / 4;  // columns of a thread

  // The first of the two columns that this thread holds of a tile of eight.
  __device__ __forceinline__ int ColumnOf(int tile) const { return tile * 8 + lane_ % 4 * 2; }
  __device__ __forceinline__ ColumnPair& PairOf(int tile) const {
    return shared_.pairs[warpgroup_][tile * 4 + lane_ % 4];
  }

  // By what the warpgroups' outputs are multiplied, each warp for itself: that takes no longer than
  // a barrier would.
  __device__ __forceinline__ void FindFactors(const WorkItem& item, bool of_cluster) {
    float2* const factors = shared_.factors[warpgroup_ * 4 + warp_];
#pragma unroll
    for (int i = 0; i < Traits::kColumns; i += 32) {
      const int c = (threadIdx.x + i) % Traits::kColumns;
      PerWarpgroup sums = {};
#pragma unroll
      for (int g = 0; g < Traits::kWarpgroups; ++g) {
#pragma unroll
        for (int w = 0; w < 4; ++w) sums.of[g] += shared_.of_warps[4 * g + w][c];
      }
      const ColumnSum sum = SumOfWarpgroups(
          sums, {shared_.reference[0][c], shared_.reference[1][c]}, shared_.v_scale, Traits::kBias);
      factors[c] = make_float2(sum.factors[0], sum.factors[1]);
      if (i == 0 && threadIdx.x < Traits::kColumns) {
        shared_.lse2[c] = sum.lse2;
        if (!of_cluster) StoreLse(args_, {shared_.target[c], item.partial_count == 1}, sum.lse2);
      }
    }
    __syncwarp();
  }

  // Element i of dimensions `dims` of one half of what this warpgroup found.
  template <int kHalf>
  __device__ __forceinline__ float& Element(int dims, int i) {
    return o_[Traits::kDimsSplit ? kHalf * Traits::kOwnDimTiles + dims : 0]
             [(Traits::kDimsSplit ? 0 : kHalf * Traits::kOwnTiles * 4) + i];
  }
  // Lays out one half of the output for the other warpgroup, which adds its own half of it: no
  // factors yet, so that both need only one barrier.
  template <int kHalf>
  __device__ __forceinline__ void Give() {
#pragma unroll
    for (int dims = 0; dims < Traits::kOwnDimTiles; ++dims) {
#pragma unroll
      for (int tile = 0; tile < Traits::kOwnTiles; ++tile) {
        const int i = tile * 4;
        shared_.scratch[warpgroup_].half[dims * Traits::kOwnTiles + tile][threadIdx.x % 128] =
            make_float4(Element<kHalf>(dims, i), Element<kHalf>(dims, i + 1),
                        Element<kHalf>(dims, i + 2), Element<kHalf>(dims, i + 3));
      }
    }
  }
  template <int kHalf>
  __device__ __forceinline__ void Take() {
    // A warpgroup keeps the half of its own number.
    constexpr int kOther = 1 - kHalf;
#pragma unroll
    for (int tile = 0; tile < Traits::kOwnTiles; ++tile) {
      const int column = ColumnOf(tile + (Traits::kDimsSplit ? 0 : kHalf * Traits::kOwnTiles));
      const float4 x =
          *reinterpret_cast<const float4*>(&shared_.factors[warpgroup_ * 4 + warp_][column]);
      const float factors[2][2] = {{x.x, x.y}, {x.z, x.w}};  // of a column, of a warpgroup
#pragma unroll
      for (int dims = 0; dims < Traits::kOwnDimTiles; ++dims) {
        const float4 given =
            shared_.scratch[kOther].half[dims * Traits::kOwnTiles + tile][threadIdx.x % 128];
        const float of_other[4] = {given.x, given.y, given.z, given.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          own_[dims][tile * 4 + i] = Element<kHalf>(dims, tile * 4 + i) * factors[i % 2][kHalf] +
                                     of_other[i] * factors[i % 2][kOther];
        }
      }
    }
  }

  __device__ __forceinline__ void AddSomeTiles(const TileRanges& ranges, int group, int apart) {
    uint32_t keys[kSteps][4];
    uint32_t values[kTileGroups][Traits::kDimTiles][4];
    ReadKeys();
    WidenKeys(keys);
    FenceKeys(keys);
    WgmmaFence();
    MultiplyKeys(keys);
    WgmmaCommit();
    SyncWarpgroup(warpgroup_);  // the references
    WgmmaWait();
    FenceRegisters(s_);
    bool more = group + apart < ranges.group_end;
    ReadValues(ranges, group);
    WidenValues(values);
    if (Traits::kTogether) {
      if (more) ReadKeys();
      WidenKeys(keys);
    }
    // The first tile is weighed where the references are raised, the others behind their products.
    for (bool weighed = false;; weighed = true) {
      if (weighed) WaitForWeights();
      if (!weighed || shared_.exceeded[warpgroup_][parity_] != 0) {
        RaiseReferences(ranges, group, weighed);
      }
      if (Traits::kTogether) FenceKeys(keys);
      FenceValues(values);
      if (!more) break;
      group += apart;
      more = group + apart < ranges.group_end;
      WgmmaFence();
      MultiplyValues(values);
      if (!Traits::kTogether) {
        WgmmaCommit();
        WgmmaWait();
        FenceOutput();
        ReadKeys();
        WidenKeys(keys);
        FenceKeys(keys);
        WgmmaFence();
      }
      MultiplyKeys(keys);
      WgmmaCommit();
      WgmmaWait();
      FenceRegisters(s_);
      FenceOutput();
      ReadValues(ranges, group);
      if (Traits::kTogether && more) ReadKeys();
      parity_ ^= 1;
      PublishWeights(StoreWeights(ranges, group, keys));
      WidenValues(values);
      FenceValues(values);
    }
    WgmmaFence();
    MultiplyValues(values);
    WgmmaCommit();
    WgmmaWait();
    FenceOutput();
    parity_ ^= 1;
  }

  // Bring K and V of the next tile into registers, when they are there.
  __device__ __forceinline__ void ReadKeys() {
    shared_.full[warpgroup_][place_.stage].Wait(place_.parity);
    const std::byte* at = shared_.stages[warpgroup_][place_.stage] + warp_ * Traits::kGroupBytes +
                          lane_ / 4 * kKeyPanelBytes +
                          KeyChunk(lane_ / 4, lane_ % 4) * kVectorBytes;
#pragma unroll
    for (int panel = 0; panel < Traits::kPanels; ++panel) {
      const auto* low = reinterpret_cast<const uint4*>(at + panel * kGroupTokens * kKeyPanelBytes);
      k_[panel][0] = *low;
      k_[panel][1] = low[8 * kKeyPanelBytes / kVectorBytes];
    }
    LeaveStage();
  }
  __device__ __forceinline__ void ReadValues(const TileRanges& item, int first_group) {
    const int first = first_group * kGroupTokens;
    const bool whole = SeesTile(item, first);
    shared_.full[warpgroup_][place_.stage].Wait(place_.parity);
    const std::byte* v = shared_.stages[warpgroup_][place_.stage];
#pragma unroll
    for (int i = 0; i < kTileGroups; ++i) {
      cuda::ReadValues<Traits>(v + i * Traits::kGroupBytes, v_[i]);
    }
    if (!whole) {
#pragma unroll
      for (int i = 0; i < kTileGroups; ++i) {
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
  __device__ __forceinline__ void LeaveStage() {
    shared_.empty[warpgroup_][place_.stage].Arrive();
    place_.Advance();
  }

  // K as operand A.
  __device__ __forceinline__ void WidenKeys(uint32_t (&a)[kSteps][4]) const {
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
  __device__ __forceinline__ void FenceKeys(uint32_t (&a)[kSteps][4]) const {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) FenceRegisters(a[step]);
  }
  // V as operand A.
  __device__ __forceinline__ void WidenValues(
      uint32_t (&a)[kTileGroups][Traits::kDimTiles][4]) const {
#pragma unroll
    for (int i = 0; i < kTileGroups; ++i) {
#pragma unroll
      for (int tile = 0; tile < Traits::kDimTiles; ++tile) {
        WidenValueWords<Traits>(v_[i][tile], a[i][tile]);
      }
    }
  }
  __device__ __forceinline__ void FenceValues(
      uint32_t (&a)[kTileGroups][Traits::kDimTiles][4]) const {
#pragma unroll
    for (int i = 0; i < kTileGroups; ++i) {
#pragma unroll
      for (int tile = 0; tile < Traits::kDimTiles; ++tile) FenceRegisters(a[i][tile]);
    }
  }

  // Starts S^T of a tile, as raw products.
  __device__ __forceinline__ void MultiplyKeys(const uint32_t (&a)[kSteps][4]) {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const uint64_t tile = TileDescriptor(SharedAddress(shared_.q[step * 16 / kTileSlots]));
      Wgmma<Traits::kCompute, Traits::kColumns>(
          s_, a[step], DescriptorOfStep(tile, step % (kTileSlots / 16)), step > 0);
    }
  }
  // Starts O^T += V^T P^T.
  __device__ __forceinline__ void MultiplyValues(
      const uint32_t (&a)[kTileGroups][Traits::kDimTiles][4]) {
    const uint64_t p = TileDescriptor(SharedAddress(shared_.scratch[warpgroup_].p) +
                                      parity_ * (Traits::kColumns * kTileRowBytes));
#pragma unroll
    for (int i = 0; i < kTileGroups; ++i) {
#pragma unroll
      for (int tile = 0; tile < Traits::kDimTiles; ++tile) {
        Wgmma<Traits::kCompute, Traits::kColumns>(o_[tile], a[i][tile], DescriptorOfStep(p, i),
                                                  true);
      }
    }
  }
  __device__ __forceinline__ void FenceOutput() {
#pragma unroll
    for (int tile = 0; tile < Traits::kDimTiles; ++tile) FenceRegisters(o_[tile]);
  }

  // Says that this warp's weights are in shared memory, and whether they hold.
  __device__ __forceinline__ void PublishWeights(bool exceeded) {
    if (exceeded) shared_.exceeded[warpgroup_][parity_] = 1;
    FenceSharedForWgmma();
    shared_.weights_published[warpgroup_].Arrive();
  }
  __device__ __forceinline__ void WaitForWeights() {
    shared_.weights_published[warpgroup_].Wait(weights_parity_);
    weights_parity_ ^= 1;
  }

  // The slot of this thread's row lane / 4 of a tile that begins at `group`.
  __device__ __forceinline__ int FirstSlot(int group) const {
    return (group + warp_) * kGroupTokens + TokenOfRow(lane_ / 4);
  }
  // Whether the column of a tile's element i may see its slot.
  __device__ __forceinline__ bool Visible(int tile, int i, int first_slot) const {
    const RowKeys keys = shared_.columns.keys[ColumnOf(tile) + i % 2];
    const int slot = first_slot + i / 2 * 2;
    return slot >= keys.begin && slot < keys.end;
  }

  // Stores P^T against the references; true when this thread found a logit that outgrew them.
  // Keeps the products: they are needed again then.
  __device__ __forceinline__ bool StoreWeights(const TileRanges& item, int group,
                                               uint32_t (&keys)[kSteps][4]) {
    // What enters the next products is widened between the slow instructions.
    bool exceeded;
    if (args_.soft_cap == 0.0f && item.Dense(group)) {
      exceeded = StoreWeights<Scores::kDenseProducts>(group);
      if (Traits::kTogether) WidenKeys(keys);
    } else {
      exceeded = StoreWeights<Scores::kProducts>(group);
      if (Traits::kTogether) WidenKeys(keys);
    }
    return exceeded;
  }
  template <Scores kScores>
  __device__ __forceinline__ bool StoreWeights(int group) {
    const int slot = FirstSlot(group);
    const uint32_t p = weights_at_ + parity_ * (Traits::kColumns * kTileRowBytes);
    uint32_t largest = 0;
    // All loads come before the first store: the hardware would keep their order.
    ColumnPair pairs[Traits::kTiles];
#pragma unroll
    for (int tile = 0; tile < Traits::kTiles; ++tile) pairs[tile] = PairOf(tile);
    uint32_t packed[Traits::kTiles][2];
#pragma unroll
    for (int tile = 0; tile < Traits::kTiles; ++tile) {
      float w[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        w[i] = s_[tile * 4 + i];
        if (kScores != Scores::kLogits) w[i] *= pairs[tile].scale[i % 2];
      }
      if (kScores == Scores::kProducts && args_.soft_cap > 0.0f) CapLogits(args_.soft_cap, w);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        w[i] = Exp2(w[i] + pairs[tile].offset[i % 2]);
        if (kScores == Scores::kProducts && !Visible(tile, i, slot)) w[i] = 0.0f;
      }
      sum_[2 * tile] += w[0] + w[2];
      sum_[2 * tile + 1] += w[1] + w[3];
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

  // Turns products into logits in base 2, -inf where a column may not see a slot.
  __device__ __forceinline__ void MakeLogits(const TileRanges& item, int group) {
#pragma unroll
    for (int tile = 0; tile < Traits::kTiles; ++tile) {
      const float2 scale = *reinterpret_cast<const float2*>(&shared_.columns.scale[ColumnOf(tile)]);
#pragma unroll
      for (int i = 0; i < 4; ++i) s_[tile * 4 + i] *= i % 2 == 0 ? scale.x : scale.y;
    }
    if (args_.soft_cap > 0.0f) CapLogits(args_.soft_cap, s_);
    if (item.Dense(group)) return;
    const int slot = FirstSlot(group);
#pragma unroll
    for (int tile = 0; tile < Traits::kTiles; ++tile) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (!Visible(tile, i, slot)) s_[tile * 4 + i] = EmptyLse<float>();
      }
    }
  }

  // The largest of a tile's logits in every column, in shared memory.
  __device__ __forceinline__ void FindPeaks() {
    float peaks[kCells];
#pragma unroll
    for (int i = 0; i < kCells; ++i) {
      peaks[i] = fmaxf(s_[i / 2 * 4 + i % 2], s_[i / 2 * 4 + i % 2 + 2]);
    }
    const int column = ReduceRows(peaks, [](float a, float b) { return fmaxf(a, b); });
#pragma unroll
    for (int i = 0; i < kCells / 8; ++i) {
      shared_.of_warps[warpgroup_ * 4 + warp_][column + i] = peaks[i];
    }
    SyncWarpgroup(warpgroup_);
  }

  // No key has been seen yet.
  __device__ __forceinline__ void ResetReferences() {
    const int c = threadIdx.x % 128;
    if (c < Traits::kColumns) {
      shared_.reference[warpgroup_][c] = kNoReference;
      shared_.pairs[warpgroup_][c / 2].scale[c % 2] = shared_.columns.scale[c];
    }
  }

  // Takes a tile's weights, of which there are logits by now, out of the sums again.
  __device__ __forceinline__ void WithdrawWeights() {
#pragma unroll
    for (int tile = 0; tile < Traits::kTiles; ++tile) {
      const ColumnPair pair = PairOf(tile);
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const float withdrawn =
            Exp2(s_[tile * 4 + c] + pair.offset[c]) + Exp2(s_[tile * 4 + c + 2] + pair.offset[c]);
        float& sum = sum_[2 * tile + c];
        // What has overflowed exceeds all that came before it beyond measure.
        sum = sum == INFINITY ? 0.0f : sum - withdrawn;
      }
    }
  }

  // Moves the references up to the largest logits so far, O and the sums with them, and weighs the
  // tile, again when it was weighed.
  __device__ __forceinline__ void RaiseReferences(const TileRanges& item, int group, bool weighed) {
    MakeLogits(item, group);
    if (weighed) WithdrawWeights();
    FindPeaks();
    const int c = threadIdx.x % 128;
    if (c < Traits::kColumns) {
      float& reference = shared_.reference[warpgroup_][c];
      float raised = reference;
#pragma unroll
      for (int w = 0; w < 4; ++w) raised = fmaxf(raised, shared_.of_warps[warpgroup_ * 4 + w][c]);
      shared_.factor[warpgroup_][c] = Exp2(reference - raised);
      reference = raised;
      shared_.pairs[warpgroup_][c / 2].offset[c % 2] = Traits::kBias - raised;
    }
    if (c == 0) shared_.exceeded[warpgroup_][parity_] = 0;
    SyncWarpgroup(warpgroup_);
#pragma unroll
    for (int tile = 0; tile < Traits::kTiles; ++tile) {
      const float2 factors =
          *reinterpret_cast<const float2*>(&shared_.factor[warpgroup_][ColumnOf(tile)]);
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const float factor = c == 0 ? factors.x : factors.y;
        sum_[2 * tile + c] *= factor;
#pragma unroll
        for (int dims = 0; dims < Traits::kDimTiles; ++dims) {
          o_[dims][tile * 4 + c] *= factor;
          o_[dims][tile * 4 + c + 2] *= factor;
        }
      }
    }
    PublishWeights(StoreWeights<Scores::kLogits>(group));
    WaitForWeights();
  }

  const AttentionArgs& args_;
  Shared& shared_;
  const int lane_;
  const int warp_;  // of the warpgroup
  const int warpgroup_;
  const uint32_t weights_at_;         // this lane's, in the first of the two places
  RingPlace<Traits::kStages> place_;  // of the next tile
  uint32_t parity_ = 0;               // of the weights' two places
  uint32_t weights_parity_ = 0;       // of the phase of weights_published
  float s_[Traits::kColumns / 2];
  float o_[Traits::kDimTiles][Traits::kColumns / 2];
  float own_[Traits::kOwnDimTiles][Traits::kOwnColumns / 2];  // of the block's output
  uint4 k_[Traits::kPanels][2] = {};
  uint32_t v_[kTileGroups][Traits::kDimTiles][Traits::kValueWords];
  float sum_[kCells];  // over this thread's rows only
};

template <typename Traits>
__global__ void __launch_bounds__(Traits::kBlockThreads, 1)
    WgmmaAttentionKernel(const __grid_constant__ AttentionArgs args) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) std::byte shared_bytes[];
  auto& shared = *reinterpret_cast<typename Traits::Shared*>(shared_bytes + UniformZero());
  // (The shuffle tells the compiler that all lanes agree.)
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
  const ClusterPlace place = ThisCluster();
  const bool of_cluster = place.size > 1;

  // Until the launches ahead have ended, what this one will read is asked for.
  LetNextLaunchBegin();
  const int index = static_cast<int>(place.cluster);
  const bool copies = warpgroup == Traits::kThreads / 128;  // or else computes
  static_assert(2 * Traits::kWarpgroups ==
                4);  // K or V of a ring to each of the four warps that copy
  TileCopier<Traits> copier(args, place, shared, __shfl_sync(0xffffffffu, threadIdx.x / 32 % 4, 0));
  int4 copied_item = {};  // page_table, kv_head, group_begin, group_end
  int next_copied = -1;
  if (copies) {
    copied_item = __ldg(reinterpret_cast<const int4*>(args.items + index));
    next_copied = __ldg(&args.items[index].next);
    copier.InitBarriers();
    FenceBarrierInit();
    copier.Prefetch(copied_item);
  } else {
    CopyItem(args, index, &shared.items[0]);
    if (threadIdx.x == 128) {
      for (int i = 0; i < Traits::kWarpgroups; ++i) {
        shared.weights_published[i].Init(128);
        shared.exceeded[i][0] = shared.exceeded[i][1] = 0;
      }
      shared.queries_staged.Init(Traits::kThreads);
      shared.met.Init(Traits::kThreads);
      shared.published.Init(place.size, Traits::kThreads);
      shared.read.Init(place.size, Traits::kThreads);
      FenceBarrierInit();
    }
    WaitForCopies();
  }
  __syncthreads();
  ArriveAtClusterRelaxed(place);  // (that the barriers are ready has been published)
  if (shared.items[0].column_count == 0) return;

  if (copies) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Traits::kCopyingRegisters));
    WaitForLaunchesAhead();
    for (;;) {
      copier.CopyItem(copied_item);
      if (next_copied < 0) return;
      copied_item = __ldg(reinterpret_cast<const int4*>(args.items + next_copied));
      next_copied = __ldg(&args.items[next_copied].next);
    }
  }
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Traits::kRegisters));

  uint32_t met_parity = 0;
  const auto meet = [&] { shared.met.Meet(met_parity); };
  const TileTurns turns(place, warpgroup);
  Warpgroup<Traits> state(args, shared, warpgroup);
  QueryCopier<Traits::kKv, Traits::kHeadDim, Traits::kColumns, Traits::kThreads> queries;
  const auto stage_queries = [&](const WorkItem& item, uint32_t parity) {
    WaitForCopies();
    queries.Finish(args, shared.raw, shared.columns, [&](int column, int vector, uint4 x) {
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
    if (threadIdx.x == 0) shared.v_scale = ValueScale(args, item);
    FenceSharedForWgmma();
    shared.queries_staged.Arrive();
    shared.queries_staged.Wait(parity);
  };

  queries.Prefetch(args, shared.items[0]);
  WaitForLaunchesAhead();
  queries.Ask(args, shared.items[0], shared.raw, shared.columns);
  WaitForCluster(place);
  for (int item_parity = 0;; item_parity ^= 1) {
    const WorkItem& item = shared.items[item_parity];
    const WorkItem& next = shared.items[item_parity ^ 1];
    stage_queries(item, static_cast<uint32_t>(item_parity));
    const bool has_next = item.next >= 0;
    if (has_next) CopyItem(args, item.next, &shared.items[item_parity ^ 1]);
    state.AddTiles(item, item.group_begin + turns.first, turns.apart);
    WaitForCopies();
    state.Combine(item, of_cluster, meet);
    if (of_cluster) {
      meet();  // the halves give way to o
      state.Output([&](int column, int d, float2 x) {
        *reinterpret_cast<float2*>(&shared.o[column][d]) = x;
      });
      shared.published.Arrive(place, item_parity);
      shared.published.Wait(item_parity);
      MergeCluster<Traits::kHeadDim, Traits::kColumns, Traits::kThreads>(
          place, shared.o, shared.lse2, [&](int column, int d, const ColumnPart& part) {
            const int row = shared.target[column];
            if (row < 0) return;
            const bool whole = item.partial_count == 1;
            float* const to = whole ? args.o : args.partial_o;
            StoreRelaxed(to + size_t(row) * Traits::kHeadDim + d, part.o);
            if (d == 0) StoreLse(args, {row, whole}, part.lse2);
          });
      if (has_next) shared.read.Arrive(place, item_parity);
    } else {
      float* const to = item.partial_count == 1 ? args.o : args.partial_o;
      state.Output([&](int column, int d, float2 x) {
        const int row = shared.target[column];
        if (row < 0) return;
        StoreRelaxed(to + size_t(row) * Traits::kHeadDim + d, x);
      });
    }
    if (item.partial_count > 1) {
      MergeIfLast<Traits::kHeadDim, Traits::kColumns, Traits::kThreads>(args, item, place,
                                                                        &shared.is_last, meet);
    }
    if (!has_next) break;
    // The output gives way to queries.
    if (of_cluster) {
      shared.read.Wait(item_parity);
    } else {
      meet();
    }
    // For the compiler: behind a named barrier it takes a warp's lanes to be together, and the
    // loop's addresses stay in uniform registers.
    SyncThreads<Traits::kThreads>();
    queries.Ask(args, next, shared.raw, shared.columns);
  }
  // No block ends while others may read its shared memory.
  ArriveAtClusterRelaxed(place);
  WaitForCluster(place);
#endif
}

}  // namespace tributary::cuda
