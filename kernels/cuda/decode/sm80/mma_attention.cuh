// Attention of few columns (8 or 16) over a paged cache, at the speed of memory, on sm_80 and
// later.
//
// Every warp is on its own: it reads 16 tokens of K and V (32 where their rows are short) straight
// from global memory into the registers from which it multiplies (page_layout.h stores them in that
// order), and asks for its next tokens as soon as the registers are free. Nothing is shared between
// warps until a piece of work ends, so nothing waits and there is no pipeline to fill: a thousand
// tokens cost little more than the latency of memory.
//
//   S^T = K Q^T      tokens in M, columns in N: with 8 columns nothing is padded
//   O^T += V^T P^T   dimensions in M; P^T is S^T transposed back in registers (movmatrix)
//
// The order of the contraction index is free as long as both operands agree, so each thread's
// operand of K is 16 consecutive bytes of a token, and of V four consecutive tokens.
#pragma once

#include "kernels/cuda/decode/cut_job.cuh"
#include "kernels/cuda/decode/packed_rows.cuh"
#include "kernels/cuda/decode/queries.cuh"
#include "kernels/cuda/ptx/widen.cuh"

namespace tributary::cuda {

// A warp that has more groups than this in its first item asks L2 for two steps of them before the
// launches ahead have ended, not for one: it gains more than the copies that come before it lose.
inline constexpr int kLongItem = 7;

template <DType kKvType, int kKeyDimension, int kValueDimension, int kRowTiles, int kBlocks>
struct MmaTraits {
  static constexpr DType kKv = kKvType;
  static constexpr DType kCompute = ComputeType(kKv);
  static constexpr int kKeyDim = kKeyDimension;
  static constexpr int kValueDim = kValueDimension;
  static constexpr int kTiles = kRowTiles;  // of 8 columns
  static constexpr int kTileRows = 8 * kTiles;
  static constexpr int kElementBytes = int(SizeOf(kKv));
  static constexpr int kQuadsPerVector = kVectorBytes / (4 * kElementBytes);

  // K of a strip: full panels, then perhaps a tail panel (page_layout.h).
  static constexpr int kKeyBytes = KeyStride(kKeyDim, kElementBytes);
  static constexpr int kPanels = kKeyBytes / kKeyPanelBytes;
  static constexpr bool kHasTail = kKeyBytes % kKeyPanelBytes != 0;
  static_assert(kKeyDim * kElementBytes <= kKeyBytes &&
                kKeyBytes % kKeyPanelBytes == (kHasTail ? kKeyTailBytes : 0));
  // Steps of two products of depth 16. The tail panel is one, or, in 16 bits, the first half of
  // one.
  static constexpr int kStepsPerPanel = kQuadsPerVector / 2;
  static constexpr int kFullSteps = kPanels * kStepsPerPanel;
  static constexpr int kSteps = kFullSteps + (kHasTail ? 1 : 0);
  static constexpr int kStagedDims = kKeyBytes / kElementBytes;  // of a query

  // V of a strip: a lane's vectors of 16 bytes. Where the last ones are fewer than a warp has
  // lanes, the lanes without one hold zeros, as dimensions that nobody asks for.
  static constexpr int kVectorDims = 8 * ValueVectorDims(kElementBytes);  // of a warp's 512 bytes
  static constexpr int kValueVectors = (kValueDim + kVectorDims - 1) / kVectorDims;
  static constexpr int kPaddedValueDim = kValueVectors * kVectorDims;
  static constexpr int kDimTiles = kPaddedValueDim / 16;
  static constexpr int kTilesPerVector = kDimTiles / kValueVectors;
  static_assert(kTilesPerVector * kValueVectors == kDimTiles && kValueDim % 16 == 0);

  static constexpr size_t kKeyStripBytes = size_t(kStripSlots) * kKeyBytes;
  static constexpr size_t kValueStripBytes = size_t(kStripSlots) * kValueDim * kElementBytes;
  // Strips that a warp takes in a step: two where one is too little to keep memory busy.
  static constexpr int kGroups = kKeyStripBytes <= 1024 ? 2 : 1;
  static constexpr int kBlocksPerMultiprocessor = kBlocks;
  // As many warps as the accumulators and one strip of K and V leave registers for.
  static constexpr int kRegisters =
      kDimTiles * kTiles * 4 + kPanels * 8 + (kHasTail ? 4 : 0) + kValueVectors * 4;
  static constexpr int kWarps = (kRegisters <= 80    ? 16
                                 : kRegisters <= 112 ? 12
                                                     : 8) /
                                kBlocksPerMultiprocessor;
  static constexpr int kThreads = 32 * kWarps;
  // A reference is set so far below the logit that it follows, which saves adding the bias of
  // packed_rows.cuh to every weight; and so much may a logit exceed its reference.
  static constexpr float kBelow = kCompute == DType::kF16 ? kWeightBias : 0.0f;
  static constexpr float kLargest = kBelow + kHeadroom;

  struct Shared {
    uint4 q[kTiles][kSteps][32];  // operand B of K Q^T, as the lanes take it
    alignas(16) float o[kWarps][8][kPaddedValueDim + 4];  // one tile of columns at a time
    alignas(
        16) float block_o[kTileRows][kValueDim + 4];  // the block's, when its cluster has others
    PackedRowState<kTileRows> columns;
    WarpResults<kWarps, kTileRows> warps;
    WorkItem items[2];
    int is_last;
  };
};

// A lane's part of the keys of a strip.
template <typename Traits, bool kHasTail = Traits::kHasTail>
struct KeyStrip {
  uint4 panels[Traits::kPanels][2];  // of rows lane / 4 and lane / 4 + 8
};
template <typename Traits>
struct KeyStrip<Traits, true> {
  uint4 panels[Traits::kPanels][2];
  uint4 tail;  // eight bytes of each of the two rows
};

// The tokens a warp works on, or has asked for.
template <typename Traits>
struct Tokens {
  KeyStrip<Traits> k[Traits::kGroups];
  uint4 v[Traits::kGroups][Traits::kValueVectors];
};

// The groups of 16 tokens of an item that a warp takes, kGroups at a time: as many apart as the
// cluster has warps.
template <typename Traits>
class GroupCursor {
 public:
  __device__ GroupCursor(const AttentionArgs& args, int warp, int warps)
      : args_(args), warp_(warp), warps_(warps) {}

  // Goes to the warp's first groups of an item, given by its first 16 bytes.
  __device__ void Start(int4 item) {
    pages_ = args_.page_tables + item.x;
    head_ = item.y;
    group_ = item.z + warp_;
    end_ = item.w;
    FetchPages(0);
  }
  // Asks for the pages of the next step, once the Keys of this one have been taken: a step ahead,
  // because the compiler has one counter for all loads that are under way at the end of a step, so
  // that whoever waits for a page waits for the tokens, too.
  __device__ void FetchNextPages() { FetchPages(Traits::kGroups); }
  __device__ void Advance() { group_ += Traits::kGroups * warps_; }
  __device__ bool Done() const { return !Has(0); }
  // Whether the item has the i-th of the groups; those behind the first kGroups come later.
  __device__ bool Has(int i) const { return group_ + i * warps_ < end_; }
  // Whether the launch ahead may still be writing one of the groups.
  __device__ bool IsLate() const {
    return group_ + (Traits::kGroups - 1) * warps_ + args_.late_strips >= end_;
  }

  // The i-th group's K in the warp's page; V lies ValuesAfterKeys(i) bytes further.
  __device__ const std::byte* Keys(int i) const { return KeysIn(i, page_[i]); }
  // The same for the groups that come later.
  __device__ const std::byte* LaterKeys(int i) const { return KeysIn(i, FetchPage(i)); }
  __device__ size_t ValuesAfterKeys(int i) const {
    const int shift = args_.page_shift - 4;
    const size_t keys = (size_t(args_.kv_heads) * Traits::kKeyStripBytes) << shift;
    if constexpr (Traits::kKeyStripBytes == Traits::kValueStripBytes) return keys;
    // As many strips lie ahead of it in the planes of V as in those of K.
    const auto ahead = static_cast<ptrdiff_t>((head_ << shift) + InPage(i));
    return keys + ahead * (static_cast<ptrdiff_t>(Traits::kValueStripBytes) -
                           static_cast<ptrdiff_t>(Traits::kKeyStripBytes));
  }

 private:
  __device__ int FetchPage(int i) const {
    return __ldg(pages_ + ((group_ + i * warps_) >> (args_.page_shift - 4)));
  }
  __device__ void FetchPages(int first) {
#pragma unroll
    for (int i = 0; i < Traits::kGroups; ++i) {
      if (Has(first + i)) page_[i] = FetchPage(first + i);
    }
  }
  // Which strip of its page the i-th is.
  __device__ int InPage(int i) const {
    return (group_ + i * warps_) & ((1 << (args_.page_shift - 4)) - 1);
  }
  __device__ const std::byte* KeysIn(int i, int page) const {
    const int shift = args_.page_shift - 4;
    const size_t plane = Traits::kKeyStripBytes << shift;
    if constexpr (Traits::kKeyStripBytes == Traits::kValueStripBytes) {
      return args_.cache + (size_t(page) * 2 * args_.kv_heads + head_) * plane +
             size_t(InPage(i)) * Traits::kKeyStripBytes;
    }
    constexpr size_t kBoth = Traits::kKeyStripBytes + Traits::kValueStripBytes;
    return args_.cache + ((size_t(page) * args_.kv_heads * kBoth) << shift) + head_ * plane +
           size_t(InPage(i)) * Traits::kKeyStripBytes;
  }

  const AttentionArgs& args_;
  const int warp_;   // of the cluster
  const int warps_;  // of the cluster
  const int32_t* pages_ = nullptr;
  int group_ = 0;
  int end_ = 0;
  int head_ = 0;
  int page_[Traits::kGroups] = {};
};

// Asks for so many consecutive bytes, a line of 128 to a lane.
template <size_t kBytes>
__device__ __forceinline__ void PrefetchBytes(const std::byte* from) {
#pragma unroll
  for (size_t at = 0; at < kBytes; at += 32 * 128) {
    const size_t line = at + threadIdx.x % 32 * 128;
    if (line < kBytes) PrefetchToL2(from + line);
  }
}

// Asks for the 16 tokens that LoadKeys and LoadValues will read.
template <typename Traits>
__device__ __forceinline__ void PrefetchGroup(const std::byte* keys, size_t values_after_keys) {
  if constexpr (Traits::kKeyStripBytes == Traits::kValueStripBytes) {
#pragma unroll
    for (size_t at = 0; at < Traits::kKeyStripBytes; at += 32 * 128) {
      const size_t line = at + threadIdx.x % 32 * 128;
      if (line >= Traits::kKeyStripBytes) continue;
      PrefetchToL2(keys + line);
      PrefetchToL2(keys + values_after_keys + line);
    }
  } else {
    PrefetchBytes<Traits::kKeyStripBytes>(keys);
    PrefetchBytes<Traits::kValueStripBytes>(keys + values_after_keys);
  }
}

template <typename Traits>
__device__ __forceinline__ void LoadKeys(const std::byte* keys, KeyStrip<Traits>& k) {
  const int lane = threadIdx.x % 32;
  const std::byte* at =
      keys + lane / 4 * kKeyPanelBytes + KeyChunk(lane / 4, lane % 4) * kVectorBytes;
#pragma unroll
  for (int panel = 0; panel < Traits::kPanels; ++panel) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      k.panels[panel][half] = LoadStreaming(at + (panel * kStripSlots + half * 8) * kKeyPanelBytes);
    }
  }
  if constexpr (Traits::kHasTail) {
    k.tail =
        LoadStreaming(keys + Traits::kPanels * kStripSlots * kKeyPanelBytes + lane * kVectorBytes);
  }
}

template <typename Traits>
__device__ __forceinline__ void LoadValues(const std::byte* values,
                                           uint4 (&v)[Traits::kValueVectors]) {
  const unsigned lane = threadIdx.x % 32;  // of no sign, which an address would be extended by
  const std::byte* at = values + lane * kVectorBytes;
  constexpr int kStripVectors = Traits::kValueStripBytes / kVectorBytes;  // of all lanes
#pragma unroll
  for (int i = 0; i < Traits::kValueVectors; ++i) {
    if ((i + 1) * 32 <= kStripVectors || i * 32 + lane < kStripVectors) {
      v[i] = LoadStreaming(at + i * 32 * kVectorBytes);
    } else {
      v[i] = make_uint4(0, 0, 0, 0);
    }
  }
}

// The operands of the products of a step with a strip's keys: a[i] is the i-th of two of depth 16.
template <typename Traits>
__device__ __forceinline__ void WidenKeys(const KeyStrip<Traits>& k, int step,
                                          uint32_t (&a)[2][4]) {
  constexpr DType kKv = Traits::kKv;
  if constexpr (Traits::kHasTail) {
    if (step == Traits::kFullSteps) {
      // A lane has eight bytes of either row: two quads of elements, or, in 16 bits, one.
      constexpr int kQuads = Traits::kQuadsPerVector / 2;
#pragma unroll
      for (int i = 0; i < kQuads; ++i) {
        WidenQuad<kKv>(k.tail, i, a[i][0], a[i][2]);
        WidenQuad<kKv>(k.tail, kQuads + i, a[i][1], a[i][3]);
      }
      return;
    }
  }
  const uint4(&panel)[2] = k.panels[step / Traits::kStepsPerPanel];
  const int quad = step % Traits::kStepsPerPanel * 2;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    WidenQuad<kKv>(panel[0], quad + i, a[i][0], a[i][2]);
    WidenQuad<kKv>(panel[1], quad + i, a[i][1], a[i][3]);
  }
}

// S^T of the groups: s[group][tile] holds rows lane / 4 and lane / 4 + 8 of columns 2 * (lane % 4)
// + {0, 1}.
template <typename Traits>
__device__ __forceinline__ void Scores(const KeyStrip<Traits> (&k)[Traits::kGroups],
                                       const typename Traits::Shared& shared,
                                       float (&s)[Traits::kGroups][Traits::kTiles][4]) {
  const int lane = threadIdx.x % 32;
  // What would be one chain of additions is two, half as long.
  constexpr bool kTwoChains = Traits::kGroups * Traits::kTiles == 1;
  float odd[4] = {};
#pragma unroll
  for (int g = 0; g < Traits::kGroups; ++g) {
#pragma unroll
    for (int tile = 0; tile < Traits::kTiles; ++tile) {
#pragma unroll
      for (int i = 0; i < 4; ++i) s[g][tile][i] = 0.0f;
    }
  }
#pragma unroll
  for (int step = 0; step < Traits::kSteps; ++step) {
    const bool whole = step < Traits::kFullSteps || Traits::kElementBytes == 1;  // two products
#pragma unroll
    for (int g = 0; g < Traits::kGroups; ++g) {
      uint32_t a[2][4];
      WidenKeys<Traits>(k[g], step, a);
#pragma unroll
      for (int tile = 0; tile < Traits::kTiles; ++tile) {
        const uint4 q = shared.q[tile][step][lane];
        Mma16x8x16<Traits::kCompute>(s[g][tile], a[0], q.x, q.y);
        if (whole) {
          Mma16x8x16<Traits::kCompute>(kTwoChains ? odd : s[g][tile], a[1], q.z, q.w);
        }
      }
    }
  }
  if constexpr (kTwoChains) {
#pragma unroll
    for (int i = 0; i < 4; ++i) s[0][0][i] += odd[i];
  }
}

// A warp's share of the softmax and the output.
template <typename Traits>
struct Accumulator {
  float o[Traits::kDimTiles][Traits::kTiles][4];
  float reference[Traits::kTiles][2];
  float sum[Traits::kTiles][2];  // over this thread's rows only

  __device__ void Reset() {
#pragma unroll
    for (int tile = 0; tile < Traits::kTiles; ++tile) {
      reference[tile][0] = reference[tile][1] = kNoReference;
      sum[tile][0] = sum[tile][1] = 0.0f;
#pragma unroll
      for (int d = 0; d < Traits::kDimTiles; ++d) {
#pragma unroll
        for (int i = 0; i < 4; ++i) o[d][tile][i] = 0.0f;
      }
    }
  }

  // Turns logits into weights, in place.
  __device__ void Weigh(float (&s)[Traits::kGroups][Traits::kTiles][4]) {
    float excess = 0.0f;
#pragma unroll
    for (int tile = 0; tile < Traits::kTiles; ++tile) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        excess = fmaxf(excess, Largest(s, tile, c) - reference[tile][c]);
      }
    }
    if (__any_sync(0xffffffffu, excess > Traits::kLargest)) RaiseReference(s);
#pragma unroll
    for (int g = 0; g < Traits::kGroups; ++g) {
#pragma unroll
      for (int tile = 0; tile < Traits::kTiles; ++tile) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          s[g][tile][i] = Exp2(s[g][tile][i] - reference[tile][i % 2]);
          sum[tile][i % 2] += s[g][tile][i];
        }
      }
    }
  }

  // This thread's largest logit of a column.
  static __device__ float Largest(const float (&s)[Traits::kGroups][Traits::kTiles][4], int tile,
                                  int c) {
    float largest = fmaxf(s[0][tile][c], s[0][tile][c + 2]);
#pragma unroll
    for (int g = 1; g < Traits::kGroups; ++g) {
      largest = fmaxf(largest, fmaxf(s[g][tile][c], s[g][tile][c + 2]));
    }
    return largest;
  }

  // Moves the references up to what the largest logits so far ask for, and with them what was
  // summed.
  __device__ void RaiseReference(const float (&s)[Traits::kGroups][Traits::kTiles][4]) {
#pragma unroll
    for (int tile = 0; tile < Traits::kTiles; ++tile) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        float raised = fmaxf(reference[tile][c], Largest(s, tile, c) - Traits::kBelow);
#pragma unroll
        for (int mask = 4; mask < 32; mask *= 2) {
          raised = fmaxf(raised, __shfl_xor_sync(0xffffffffu, raised, mask));
        }
        const float factor = Exp2(reference[tile][c] - raised);
        reference[tile][c] = raised;
        sum[tile][c] *= factor;
#pragma unroll
        for (int d = 0; d < Traits::kDimTiles; ++d) {
          o[d][tile][c] *= factor;
          o[d][tile][c + 2] *= factor;
        }
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

// From raw products to logits in base 2.
template <typename Traits>
__device__ __forceinline__ void ScaleScores(const AttentionArgs& args,
                                            const float (&scale)[Traits::kTiles][2],
                                            float (&s)[Traits::kGroups][Traits::kTiles][4]) {
#pragma unroll
  for (int g = 0; g < Traits::kGroups; ++g) {
#pragma unroll
    for (int tile = 0; tile < Traits::kTiles; ++tile) {
#pragma unroll
      for (int i = 0; i < 4; ++i) s[g][tile][i] *= scale[tile][i % 2];
    }
  }
  if (args.soft_cap <= 0.0f) return;
#pragma unroll
  for (int g = 0; g < Traits::kGroups; ++g) {
#pragma unroll
    for (int tile = 0; tile < Traits::kTiles; ++tile) CapLogits(args.soft_cap, s[g][tile]);
  }
}

// Sets logits of keys outside their column's range, or behind the item's end, to -inf.
template <typename Traits>
__device__ __forceinline__ void MaskScores(const WorkItem& item,
                                           const PackedRowState<Traits::kTileRows>& columns,
                                           int group, float (&s)[Traits::kTiles][4]) {
  const int lane = threadIdx.x % 32;
  const int first = group * kStripSlots + TokenOfRow(lane / 4);
  const bool missing = Traits::kGroups > 1 && group >= item.strip_end;
#pragma unroll
  for (int tile = 0; tile < Traits::kTiles; ++tile) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const RowKeys keys = columns.keys[tile * 8 + lane % 4 * 2 + c];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int slot = first + 2 * i;
        if (slot < keys.begin || slot >= keys.end || missing)
          s[tile][2 * i + c] = EmptyLse<float>();
      }
    }
  }
}

// Dead slots may hold anything, NaN included, and 0 * NaN is NaN.
template <typename Traits>
__device__ __forceinline__ void ClearDeadValues(const WorkItem& item, int group,
                                                uint4 (&v)[Traits::kValueVectors]) {
  const uint32_t alive = AliveTokens(item, group * kStripSlots + threadIdx.x % 4 * kQuadTokens);
#pragma unroll
  for (int i = 0; i < Traits::kValueVectors; ++i) KeepTokens<Traits::kKv>(v[i], alive);
}

// Puts a tile of columns of a warp's unnormalised output where all threads can merge it.
template <typename Traits>
__device__ __forceinline__ void PublishTile(const Accumulator<Traits>& acc, int tile,
                                            typename Traits::Shared& shared) {
  constexpr int kDims = 2 * Traits::kTilesPerVector;  // a thread's neighbouring dimensions
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int c = 0; c < 2; ++c) {
#pragma unroll
    for (int i = 0; i < Traits::kValueVectors; ++i) {
      float* to = &shared.o[threadIdx.x / 32][lane % 4 * 2 + c][(i * 8 + lane / 4) * kDims];
#pragma unroll
      for (int j = 0; j < Traits::kTilesPerVector; ++j) {
        const float* from = acc.o[i * Traits::kTilesPerVector + j][tile];
        *reinterpret_cast<float2*>(to + 2 * j) = make_float2(from[c], from[c + 2]);
      }
    }
  }
}

template <typename Traits>
__device__ __forceinline__ void PublishSums(const Accumulator<Traits>& acc,
                                            typename Traits::Shared& shared) {
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
#pragma unroll
  for (int tile = 0; tile < Traits::kTiles; ++tile) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      float sum = acc.sum[tile][c];
#pragma unroll
      for (int mask = 4; mask < 32; mask *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, mask);
      if (lane / 4 == 0) {
        shared.warps.reference[warp][tile * 8 + lane * 2 + c] = acc.reference[tile][c];
        shared.warps.sum[warp][tile * 8 + lane * 2 + c] = sum;
      }
    }
  }
}

// Adds up the warps' outputs of a tile of columns and writes the block's, or keeps it for its
// cluster.
template <typename Traits>
__device__ __forceinline__ void StoreTile(const AttentionArgs& args, const WorkItem& item, int tile,
                                          bool of_cluster, typename Traits::Shared& shared) {
  constexpr int kUnits = Traits::kValueDim / 4;  // of a packed row
#pragma unroll 1
  for (int i = threadIdx.x; i < 8 * kUnits; i += Traits::kThreads) {
    const int packed_row = tile * 8 + i / kUnits;
    const int d = i % kUnits * 4;
    if (packed_row >= item.packed_count) continue;
    float4 o = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
    for (int w = 0; w < Traits::kWarps; ++w) {
      AddScaled(o, shared.warps.factor[w][packed_row],
                *reinterpret_cast<const float4*>(&shared.o[w][i / kUnits][d]));
    }
    if (of_cluster) {
      *reinterpret_cast<float4*>(&shared.block_o[packed_row][d]) = o;
    } else {
      StorePackedRow<Traits::kValueDim, Traits::kTileRows>(args, item, packed_row, d, o,
                                                           shared.warps.lse2[packed_row]);
    }
  }
}

// Puts dimensions [8 * vector, 8 * vector + 8) of a column's query where the lanes will take them.
template <typename Traits>
__device__ __forceinline__ void StageQuery(typename Traits::Shared& shared, int packed_row,
                                           int vector, uint4 x) {
  auto& q = shared.q[packed_row / 8];
  const int of_column = packed_row % 8 * 4;
  constexpr int kPanelVectors = Traits::kFullSteps * 4;  // of the full panels
  if constexpr (Traits::kHasTail) {
    const int in_tail = vector - kPanelVectors;
    if (in_tail >= 0) {
      uint4* to = &q[Traits::kFullSteps][of_column];
      if constexpr (Traits::kElementBytes == 1) {
        to[in_tail] = x;  // a lane's two quads
      } else {            // a lane has one quad, in the first of the step's products
        to[2 * in_tail] = make_uint4(x.x, x.y, 0, 0);
        to[2 * in_tail + 1] = make_uint4(x.z, x.w, 0, 0);
      }
      return;
    }
  }
  // A lane's vector of K starts at dimension kElements * (4 * panel + lane % 4).
  constexpr int kOfVector = Traits::kStepsPerPanel;  // steps with one vector of K
  const int of_lane = vector / kOfVector;
  const int step = of_lane / 4 * kOfVector + vector % kOfVector;
  q[step][of_column + of_lane % 4] = x;
}

template <typename Traits>
__global__ void __launch_bounds__(Traits::kThreads, Traits::kBlocksPerMultiprocessor)
    MmaAttentionKernel(const __grid_constant__ AttentionArgs args) {
  extern __shared__ uint4 shared_bytes[];
  auto& shared = *reinterpret_cast<typename Traits::Shared*>(shared_bytes);
  const int lane = threadIdx.x % 32;
  const ClusterPlace place = ThisCluster();
  const int warp = place.rank * Traits::kWarps + threadIdx.x / 32;  // of the cluster
  const int warps = place.size * Traits::kWarps;
  const bool of_cluster = place.size > 1;

  Tokens<Traits> tokens;
  GroupCursor<Traits> next(args, warp, warps);
  // Groups that a step lacks will weigh nothing; their values must be numbers all the same.
  const std::byte* keys[Traits::kGroups] = {};
  const auto load_keys = [&] {
    if (next.IsLate()) WaitForLaunchesAhead();
#pragma unroll
    for (int i = 0; i < Traits::kGroups; ++i) {
      if (i > 0 && !next.Has(i)) continue;
      keys[i] = next.Keys(i);
      LoadKeys<Traits>(keys[i], tokens.k[i]);
    }
    next.FetchNextPages();
  };
  const auto load_values = [&] {
#pragma unroll
    for (int i = 0; i < Traits::kGroups; ++i) {
      if (i > 0 && !next.Has(i)) {
#pragma unroll
        for (uint4& v : tokens.v[i]) v = make_uint4(0, 0, 0, 0);
      } else {
        LoadValues<Traits>(keys[i] + next.ValuesAfterKeys(i), tokens.v[i]);
      }
    }
  };
  const auto load_tokens = [&] {
    if (next.Done()) return;
    load_keys();
    load_values();
  };
  QueryStager<Traits::kKv, Traits::kKeyDim, Traits::kStagedDims, Traits::kTileRows,
              Traits::kThreads>
      queries;
  const auto stage_queries = [&] {
    queries.Finish(args, shared.columns, [&](int packed_row, int vector, uint4 x) {
      StageQuery<Traits>(shared, packed_row, vector, x);
    });
  };

  // Until the launches ahead have ended, what this one will read is asked for; where they are known
  // to write no more than the end of a sequence, it is read, too.
  LetNextLaunchBegin();
  const int index = static_cast<int>(place.cluster);
  const WorkItem first = args.items[index];
  CopyItem(args, index, &shared.items[0]);
  next.Start(*reinterpret_cast<const int4*>(&first));
#pragma unroll
  for (int i = 0; i < Traits::kGroups; ++i) {
    if (next.Has(i)) PrefetchGroup<Traits>(next.Keys(i), next.ValuesAfterKeys(i));
  }
  if (next.Has(kLongItem)) {
#pragma unroll
    for (int i = Traits::kGroups; i < 2 * Traits::kGroups; ++i) {
      PrefetchGroup<Traits>(next.LaterKeys(i), next.ValuesAfterKeys(i));
    }
  }
  queries.Prefetch(args, first);
  if (args.late_strips == 0 || first.packed_count == 0) WaitForLaunchesAhead();
  if (first.packed_count == 0) return;
  load_tokens();
  queries.Load(args, first);
  WaitForCopies();
  for (int parity = 0;; parity ^= 1) {
    stage_queries();
    SyncThreads<Traits::kThreads>();
    const WorkItem& item = shared.items[parity];
    const bool has_next = item.next >= 0;
    int4 next_item = {};
    if (has_next) {
      next_item = __ldg(reinterpret_cast<const int4*>(args.items + item.next));
      CopyItem(args, item.next, &shared.items[parity ^ 1]);
    }
    float scale[Traits::kTiles][2];
#pragma unroll
    for (int tile = 0; tile < Traits::kTiles; ++tile) {
#pragma unroll
      for (int c = 0; c < 2; ++c)
        scale[tile][c] = shared.columns.scale[tile * 8 + lane % 4 * 2 + c];
    }
    Accumulator<Traits> acc;
    acc.Reset();
    const int begin = item.strip_begin + warp;
    bool in_item = begin < item.strip_end;
    // A warp that has nothing here has not asked for its part of the next item yet.
    if (!in_item && has_next) {
      next.Start(next_item);
      load_tokens();
    }
    for (int group = begin; in_item; group += Traits::kGroups * warps) {
      // What to ask for when the registers are free: this item's next groups or the next item's
      // first.
      next.Advance();
      in_item = !next.Done();
      if (!in_item && has_next) next.Start(next_item);
      const bool more = !next.Done();
      float s[Traits::kGroups][Traits::kTiles][4];
      Scores<Traits>(tokens.k, shared, s);
      if (more) load_keys();
      ScaleScores<Traits>(args, scale, s);
      const int last = group + (Traits::kGroups - 1) * warps;
      // There, and seen by every column.
      const bool dense = group * kStripSlots >= item.dense_begin &&
                         (last + 1) * kStripSlots <= item.dense_end &&
                         (Traits::kGroups == 1 || last < item.strip_end);
      if (!dense) {
#pragma unroll
        for (int i = 0; i < Traits::kGroups; ++i) {
          MaskScores<Traits>(item, shared.columns, group + i * warps, s[i]);
        }
      }
      acc.Weigh(s);
      if (!dense) {
#pragma unroll
        for (int i = 0; i < Traits::kGroups; ++i) {
          ClearDeadValues<Traits>(item, group + i * warps, tokens.v[i]);
        }
      }
#pragma unroll
      for (int i = 0; i < Traits::kGroups; ++i) acc.AddValues(tokens.v[i], s[i]);
      if (more) load_values();
    }

    PublishSums<Traits>(acc, shared);
    PublishTile<Traits>(acc, 0, shared);
    WaitForCopies();
    WaitForLaunchesAhead();           // who follows is behind them, too, whatever was read here
    SyncThreads<Traits::kThreads>();  // the queries' place is free, the next item is there
    if (has_next) queries.Load(args, shared.items[parity ^ 1]);
    CombineWarps(shared.warps, ValueScale(args, item), /*bias=*/0.0f);
    SyncThreads<Traits::kThreads>();
    StoreTile<Traits>(args, item, 0, of_cluster, shared);
#pragma unroll
    for (int tile = 1; tile < Traits::kTiles; ++tile) {
      SyncThreads<Traits::kThreads>();
      PublishTile<Traits>(acc, tile, shared);
      SyncThreads<Traits::kThreads>();
      StoreTile<Traits>(args, item, tile, of_cluster, shared);
    }
    if (of_cluster) {
      ArriveAtCluster(place);
      WaitForCluster(place);
      MergeCluster<Traits::kValueDim, Traits::kTileRows, Traits::kThreads>(
          place, shared.block_o, shared.warps.lse2,
          [&](int packed_row, int d, const PackedRowPart& part) {
            if (packed_row >= item.packed_count) return;
            StorePackedRow<Traits::kValueDim, Traits::kTileRows>(args, item, packed_row, d, part.o,
                                                                 part.lse2);
          });
      ArriveAtCluster(place);
    }
    if (item.split_count > 1) {
      MergeIfLast<Traits::kValueDim, Traits::kTileRows, Traits::kThreads>(
          args, item, place, &shared.is_last, [] { SyncThreads<Traits::kThreads>(); });
    }
    WaitForCluster(place);  // the others have read block_o
    if (!has_next) return;
  }
}

}  // namespace tributary::cuda
