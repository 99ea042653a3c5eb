// A draft block beside its context, for wgmma_fp8_attention.cuh.
//
// The warpgroup that widens V has nothing to do until an item's first values have come. If the item
// is a job's first split, it uses that time to copy the draft block's tokens to shared memory and
// to compute their logits. It leaves the logits as accumulators, and the values as operand B, of
// one computing warpgroup, which begins its sums with them while the product of its first keys
// runs. So a draft block costs a launch next to nothing, whereas a launch of its own would wait
// for this one to end. Until the first tile of widened V comes, its tokens lie in the places of
// such tiles.
#pragma once

#include <climits>

#include "kernels/cuda/decode/attention_args.h"
#include "kernels/cuda/decode/draft_block.cuh"
#include "kernels/cuda/decode/nvfp4_keys.cuh"
#include "kernels/cuda/decode/packed_rows.cuh"
#include "kernels/cuda/decode/sm90/block_output.cuh"
#include "kernels/cuda/decode/sm90/named_barriers.cuh"
#include "kernels/cuda/decode/sm90/ring.cuh"
#include "kernels/cuda/decode/sm90/tile_source.cuh"
#include "kernels/cuda/decode/sm90/uniform.cuh"
#include "kernels/cuda/decode/sm90/wgmma_fp8_queries.cuh"
#include "kernels/cuda/ptx/bulk_copy.cuh"
#include "kernels/cuda/ptx/cluster.cuh"
#include "kernels/cuda/ptx/wgmma.cuh"
#include "kernels/cuda/ptx/wgmma_fp8.cuh"

namespace tributary::cuda {

// Whether this thread block attends to a draft block together with an item.
__device__ __forceinline__ bool HasDraftBlock(const AttentionArgs& args, const WorkItem& item,
                                              const ClusterPlace& place) {
  const int head = item.kv_head - args.block.kv_head_begin;
  return place.rank == 0 && item.split_index == 0 && head >= 0 && head < args.block.kv_head_count;
}

// Some of a draft block's tokens, as the widening warpgroup leaves them to a computing one.
template <int kHeadDim>
struct DraftTile {
  static constexpr int kTokens = kHeadDim / 4;  // as many as a tile of widened V has room for
  static constexpr int kSteps = kTokens / kDraftTokens;
  static constexpr int kPanelBytes = kTokens * kTileRowBytes;

  // Operand B, in bf16: rows are tokens, panels of 64 dimensions (ColumnMajorDescriptor).
  alignas(1024) std::byte values[kHeadDim / 64][kPanelBytes];
  // Logits in base 2. For each eight tokens a thread finds what its accumulators of a product of 64
  // packed rows with eight tokens would be.
  float4 logits[kTokens / 8][128];
};
// The DraftTile lies in place of a tile of widened V of the warpgroup that takes it. The draft
// block's keys lie in such a place of the other warpgroup.
inline constexpr int kDraftStage = 2;
// Over NVFP4, whose rings are shorter, it takes a place of the other warpgroup, which is free when
// its values have been multiplied, and keys have a place of their own.
inline constexpr int kNvfp4DraftStage = 1;
// Set in the number of a draft block's steps when its rows do not all see the same tokens.
inline constexpr int kDraftRowsDiffer = 1 << 30;
template <typename Traits>
using DraftTileFor = DraftTile<Traits::kHeadDim>;
template <typename Traits>
__device__ __forceinline__ DraftTileFor<Traits>& DraftTileOf(typename Traits::Shared& shared) {
  using Tile = DraftTileFor<Traits>;
  static_assert(sizeof(Tile) <= Traits::kWideBytes);
  if constexpr (OfNvfp4<Traits>) {
    static_assert(kNvfp4DraftStage < Traits::kWideStages);
    return *reinterpret_cast<Tile*>(shared.wide[1][kNvfp4DraftStage]);
  } else {
    static_assert(kDraftStage < Traits::kWideStages);
    return *reinterpret_cast<Tile*>(shared.wide[0][kDraftStage]);
  }
}

// How far the widening warps are with draft blocks: the parities of the next phases of their
// barriers, and whether there is a DraftTile of which they have not yet waited until it was taken.
struct DraftPhases {
  uint32_t queries = 0;
  uint32_t taken = 0;
  bool left = false;

  template <typename Shared>
  __device__ __forceinline__ void WaitUntilTaken(Shared& shared) {
    if (!left) return;
    shared.draft_taken.Wait(taken);
    taken ^= 1;
    left = false;
  }
};

// Computes the logits of a draft block. All warps of the warpgroup take part, with 16 packed rows
// each. There is no branch on the thread; see UniformZero.
template <typename Traits>
class Fp8DraftBlock {
 public:
  using Shared = typename Traits::Shared;
  using Tile = DraftTileFor<Traits>;

  // The constructor reads nothing that a launch ahead writes.
  __device__ __forceinline__ Fp8DraftBlock(const AttentionArgs& args, const WorkItem& item,
                                           Shared& shared)
      : args_(args),
        shared_(shared),
        lane_(OpaqueLane()),
        warp_(static_cast<int>(threadIdx.x) / 32 % 4) {
    const auto keys_of = [&](int packed_row) {
      packed_row = min(packed_row, item.packed_count - 1);  // rows beyond it are not used
      return args.block.keys[item.row_begin + QueryRowOf(args, item, packed_row)];
    };
    int begin = INT_MAX;
    int end = 0;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      keys_[i] = keys_of(warp_ * kDraftRows + lane_ / 4 + 8 * i);
      const RowKeys any = keys_of(lane_ + 32 * i);
      begin = min(begin, any.begin < any.end ? any.begin : INT_MAX);
      end = max(end, any.begin < any.end ? any.end : 0);
    }
    begin_ = __reduce_min_sync(0xffffffffu, begin);
    end_ = __reduce_max_sync(0xffffffffu, end);
    if (end_ == 0) begin_ = 0;
    stride_ = args.kv_heads * Traits::kHeadDim;
    head_ = item.kv_head * Traits::kHeadDim;
    from_ = size_t(begin_ + FirstToken()) * stride_ + head_ + Chunk() * 8;
  }

  // Asks L2 for the first tokens.
  __device__ __forceinline__ void Prefetch() const {
    const int token = max(0, min(begin_ + lane_, end_ - 1));
    const int half = warp_ % 2 * (Traits::kHeadDim / 2);
    const void* const of = warp_ / 2 == 0 ? args_.block.k : args_.block.v;
    PrefetchToL2(static_cast<const uint16_t*>(of) + size_t(token) * stride_ + head_ + half);
  }

  // Called when the launches ahead have ended and this warpgroup's tiles of V have been multiplied.
  __device__ __forceinline__ void Run(DraftPhases& phases) {
    Sync();
    int token = begin_;
#pragma unroll 1
    do {
      phases.WaitUntilTaken(shared_);
      const int steps = min(StepsFrom(token), Tile::kSteps);
      CopyTokens(token, steps);
      if (token == begin_) {
        shared_.queries_here.Wait(phases.queries);
        phases.queries ^= 1;
      }
      WaitForCopies();
      FenceSharedForWgmma();
      const bool differ =
          AnyOfWarpgroup(kDraftBlockBarrier, SeesOtherTokens(0) || SeesOtherTokens(1));
#pragma unroll 1
      for (int step = 0; step < steps; ++step) FindLogits(token, step);
      if (warp_ == 0 && lane_ == 0) {
        shared_.draft_steps = StepsFrom(begin_) | (differ ? kDraftRowsDiffer : 0);
      }
      shared_.draft_found.Arrive();
      phases.left = true;
      Sync();  // keys and queries have been read
      token += Tile::kTokens;
    } while (token < end_);
  }

 private:
  static constexpr int kRowBytes = 2 * Traits::kHeadDim;
  static constexpr int kRowChunks = kRowBytes / 16;
  static constexpr int kTokensOfThreads = 128 / kRowChunks;  // tokens that the threads copy at once
  static_assert(Tile::kTokens * kRowBytes <= Traits::kWideBytes);

  static __device__ __forceinline__ void Sync() { SyncBlock<128, kDraftBlockBarrier>(); }

  // Whether this thread's first or second row does not see all tokens that the rows see together.
  __device__ __forceinline__ bool SeesOtherTokens(int i) const {
    return keys_[i].begin != begin_ || keys_[i].end != end_;
  }
  // How many steps of kDraftTokens tokens there are.
  __device__ __forceinline__ int StepsFrom(int token) const {
    return (end_ - token + kDraftTokens - 1) / kDraftTokens;
  }
  // Where this thread copies from: it takes 16 bytes of one of every kTokensOfThreads tokens.
  __device__ __forceinline__ int FirstToken() const {
    return warp_ * (kTokensOfThreads / 4) + lane_ / kRowChunks;
  }
  __device__ __forceinline__ int Chunk() const { return lane_ % kRowChunks; }
  __device__ __forceinline__ bool AliveAt(int token, int i) const {
    return token + FirstToken() + i * kTokensOfThreads < end_;
  }

  // Where a chunk of a key lies, so that neighbouring tokens' keys are read from different banks.
  __device__ __forceinline__ std::byte* KeyPlace(int token, int chunk) const {
    std::byte* keys;
    if constexpr (OfNvfp4<Traits>) {
      keys = shared_.draft_keys;
    } else {
      keys = shared_.wide[1][kDraftStage];
    }
    return keys + token * kRowBytes + (chunk ^ token % 8) * 16;
  }

  // Begins to copy tokens. Places beyond the last token become zeros.
  __device__ __forceinline__ void CopyTokens(int token, int steps) const {
    const auto* const k = static_cast<const uint16_t*>(args_.block.k);
    const auto* const v = static_cast<const uint16_t*>(args_.block.v);
    Tile& tile = DraftTileOf<Traits>(shared_);
    std::byte* const values = tile.values[Chunk() / 8] + SwizzledChunk(FirstToken(), Chunk() % 8);
    std::byte* const keys = KeyPlace(FirstToken(), Chunk());
    // Chunks are exchanged in eights.
    static_assert(kTokensOfThreads % 8 == 0 && kDraftTokens % kTokensOfThreads == 0);
#pragma unroll 1
    for (int i = 0; i < kDraftTokens / kTokensOfThreads * steps; ++i) {
      const bool alive = AliveAt(token, i);
      const size_t further = alive ? size_t(token - begin_ + i * kTokensOfThreads) * stride_ : 0;
      CopyAsync16OrZero(keys + i * kTokensOfThreads * kRowBytes, k + from_ + further, alive);
      CopyAsync16OrZero(values + i * kTokensOfThreads * kTileRowBytes, v + from_ + further, alive);
    }
  }

  // The logits of this warp's packed rows with sixteen tokens of the tile that begins with `first`.
  __device__ __forceinline__ void FindLogits(int first, int step) const {
    // Lane l gives the addresses for ldmatrix: of packed row l % 16 and chunk l / 16, and of token
    // l % 8 (and the one eight further) and chunk l / 8 % 2.
    const int packed_row = warp_ * kDraftRows + lane_ % 16;
    const int token = step * kDraftTokens + lane_ / 16 * 8 + lane_ % 8;
    float s[2][4] = {}, odd[2][4] = {};  // two sums, because each product waits for the one before
#pragma unroll
    for (int i = 0; i < Traits::kHeadDim / 16; ++i) {
      uint32_t q[4], k[4];
      LoadMatrices(SharedAddress(shared_.raw +
                                 RawQueryPlace<Traits::kHeadDim>(packed_row, 2 * i + lane_ / 16)),
                   q);
      LoadMatrices(SharedAddress(KeyPlace(token, 2 * i + lane_ / 8 % 2)), k);
      auto& sum = i % 2 == 0 ? s : odd;
      Mma16x8x16<DType::kBf16>(sum[0], q, k[0], k[1]);
      Mma16x8x16<DType::kBf16>(sum[1], q, k[2], k[3]);
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) s[i / 4][i % 4] += odd[i / 4][i % 4];
    MakeDraftLogits(args_.sm_scale, /*soft_cap=*/0.0f, keys_, first + step * kDraftTokens, s);
    Tile& tile = DraftTileOf<Traits>(shared_);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      tile.logits[2 * step + i][warp_ * 32 + lane_] =
          make_float4(s[i][0], s[i][1], s[i][2], s[i][3]);
    }
  }

  const AttentionArgs& args_;
  Shared& shared_;
  const int lane_;
  const int warp_;   // of the warpgroup
  int begin_, end_;  // the tokens that some row of the query tile sees
  int stride_;       // elements from a token to the next
  int head_;         // the first element of a token's
  size_t from_;      // the element that this thread copies first
  RowKeys keys_[2];
};

// Computes and hands over the logits of an item's draft block.
template <typename Traits, typename Widener>
__device__ __forceinline__ void FindDraftBlock(const AttentionArgs& args, const WorkItem& item,
                                               typename Traits::Shared& shared,
                                               const Widener& widener, DraftPhases& phases) {
  Fp8DraftBlock<Traits> block(args, item, shared);
  block.Prefetch();
  WaitForLaunchesAhead();
  widener.WaitForEmpty();
  block.Run(phases);
}

}  // namespace tributary::cuda
