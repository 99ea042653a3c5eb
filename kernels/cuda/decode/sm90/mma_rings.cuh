// How a warp of mma_attention brings strips of an NVFP4 cache to its registers where a
// multiprocessor has shared memory for it: through a ring that is the warp's own.
//
// With 16 packed rows, or long keys, registers that hold strips leave too few for widening them. A
// warp has a place for each of a few strips, asks for the next one when it has multiplied one, and
// shares nothing with other warps, as over caches of other types.
// Nothing else in the kernel copies to shared memory like this, because what is waited for is
// counted.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "kernels/cuda/decode/attention_args.h"
#include "kernels/cuda/decode/nvfp4_keys.cuh"
#include "kernels/cuda/decode/sm80/mma_attention.cuh"
#include "kernels/cuda/decode/sm80/mma_strips.cuh"
#include "kernels/cuda/decode/sm80/mma_traits.cuh"
#include "kernels/cuda/layout/nvfp4_layout.h"
#include "kernels/cuda/ptx/cluster.cuh"
#include "kernels/cuda/ptx/ptx.cuh"

namespace tributary::cuda {

// The warps' rings, in shared memory.
template <typename Config>
requires(Config::kRings) struct MmaRings<Config> {
  // Of a thread block; 1 KB of each is the system's.
  static constexpr int kMostBytes = (Config::kBlocksPerMultiprocessor == 2 ? 113 : 227) * 1024;
  static constexpr int kRingStripBytes = int(Config::kKeyStripBytes + Config::kValueStripBytes);
  // As many strips as keep memory busy, and fit beside the rest, of which the warps' outputs are
  // most.
  static constexpr int kOutputBytes =
      (Config::kWarps * 8 + Config::kTileRows) * (Config::kPaddedValueDim + 4) * int(sizeof(float));
  static constexpr int kQueryBytes = Config::kRowTiles * Config::kSteps * 512;
  static constexpr int kRoom = kMostBytes - kOutputBytes - kQueryBytes - 2560;
  static constexpr int kStagesThatFit = kRoom / (Config::kWarps * kRingStripBytes);
  static constexpr int kStagesWanted =
      2 + 64 * 1024 / (Config::kWarps * Config::kBlocksPerMultiprocessor * kRingStripBytes);
  static constexpr int kStages = std::min(kStagesThatFit, kStagesWanted);
  static_assert(kStages >= 2);

  alignas(16) std::byte ring[Config::kWarps][kStages][kRingStripBytes];
};

// The strips of an item that a warp takes, one after the other; they lie as many strips apart as
// the cluster has warps. A lane holds the page of every 32nd of them.
template <typename Traits>
class RingCursor {
 public:
  __device__ RingCursor(const AttentionArgs& args, int warp, int warps)
      : args_(args), warp_(warp), warps_(warps) {}

  // Goes to the warp's first strip of an item, given by the item's first 16 bytes.
  __device__ void Start(int4 item) {
    pages_ = args_.page_tables + item.x;
    head_ = item.y;
    strip_ = item.z + warp_;
    end_ = item.w;
    taken_ = 0;
    now_ = PageOfLane(0);
    ahead_ = PageOfLane(32);
  }
  __device__ bool Done() const { return strip_ >= end_; }
  __device__ bool Has(int i) const { return strip_ + i * warps_ < end_; }
  // Whether the launch ahead may still be writing the strip.
  __device__ bool IsLate() const { return strip_ + args_.late_strips >= end_; }
  __device__ void Advance() {
    strip_ += warps_;
    if (++taken_ < 32) return;
    taken_ = 0;
    now_ = ahead_;
    ahead_ = PageOfLane(32);
  }

  // Where K of the i-th strip from here lies, one of those whose pages are known; its V lies
  // ValuesAfterKeys(i) bytes further.
  __device__ const std::byte* Keys(int i) const {
    const int page = __shfl_sync(0xffffffffu, now_, taken_ + i);
    const size_t strips = size_t(page) * args_.kv_heads << shift();
    constexpr size_t kBoth = Traits::kKeyStripBytes + Traits::kValueStripBytes;
    return args_.cache + strips * kBoth + size_t(InPlane(i)) * Traits::kKeyStripBytes;
  }
  __device__ size_t ValuesAfterKeys(int i) const {
    // As many strips lie ahead of it in the planes of V as in those of K.
    const size_t keys = (size_t(args_.kv_heads) << shift()) * Traits::kKeyStripBytes;
    constexpr auto kFurther = static_cast<ptrdiff_t>(Traits::kValueStripBytes) -
                              static_cast<ptrdiff_t>(Traits::kKeyStripBytes);
    return keys + static_cast<size_t>(InPlane(i) * kFurther);
  }

 private:
  __device__ int shift() const { return args_.page_shift - 4; }
  __device__ int PageOfLane(int first) const {
    const int strip = strip_ + (first + static_cast<int>(threadIdx.x) % 32) * warps_;
    return strip < end_ ? __ldg(pages_ + (strip >> shift())) : 0;
  }
  // How many strips lie ahead of the i-th one in the planes of its page.
  __device__ int InPlane(int i) const {
    return (head_ << shift()) + ((strip_ + i * warps_) & ((1 << shift()) - 1));
  }

  const AttentionArgs& args_;
  const int warp_;   // of the cluster
  const int warps_;  // of the cluster
  const int32_t* pages_ = nullptr;
  int strip_ = 0;
  int end_ = 0;
  int head_ = 0;
  int taken_ = 0;  // of the 32 strips whose pages the lanes have
  int now_ = 0;
  int ahead_ = 0;
};

// A warp's ring.
template <typename Traits>
class StripRing {
 public:
  __device__ StripRing(const AttentionArgs& args, int warp, int warps,
                       typename Traits::Shared& shared)
      : next(args, warp, warps), ring_(shared.ring[threadIdx.x / 32][0]) {}

  // Asks L2 for the first strips.
  __device__ void Prefetch() const {
    constexpr int kLines = (int(Traits::kKeyStripBytes) + 127) / 128;
    constexpr int kValueLines = (int(Traits::kValueStripBytes) + 127) / 128;
    const int lane = threadIdx.x % 32;
#pragma unroll 1
    for (int i = 0; i < kStages && next.Has(i); ++i) {
      const std::byte* const keys = next.Keys(i);
      const std::byte* const values = keys + next.ValuesAfterKeys(i);
#pragma unroll 1
      for (int line = lane; line < kLines + kValueLines; line += 32) {
        PrefetchToL2(line < kLines ? keys + line * 128 : values + (line - kLines) * 128);
      }
    }
  }

  // Called when an item begins; the cursor is at its strips, or past them.
  __device__ void Begin(bool has_next, int4 next_item) {
    may_start_next_ = has_next;
    next_item_ = next_item;
  }
  // Asks for strips until all places are taken: of this item, then of the next.
  __device__ void TopUp() {
#pragma unroll 1
    while (asked_ < kStages) {
      if (next.Done()) {
        if (!may_start_next_) return;
        next.Start(next_item_);
        may_start_next_ = false;
        continue;
      }
      Ask();
    }
  }
  // The oldest strip that was asked for, when it has come.
  __device__ const std::byte* Take() {
    __syncwarp();  // all lanes have read the strip before
    TopUp();
    // So many groups of copies are behind this strip's, some of them empty.
    for (int i = asked_; i < kStages; ++i) CommitCopies();
    WaitForCopiesBut<kStages - 1>();
    __syncwarp();
    const std::byte* const strip = ring_ + taken_ * kStripBytes;
    taken_ = taken_ + 1 == kStages ? 0 : taken_ + 1;
    --asked_;
    return strip;
  }

  RingCursor<Traits> next;

 private:
  static constexpr int kStages = Traits::Shared::kStages;
  static constexpr int kStripBytes = Traits::Shared::kRingStripBytes;

  __device__ void Ask() {
    if (next.IsLate()) WaitForLaunchesAhead();
    const std::byte* const keys = next.Keys(0);
    int stage = taken_ + asked_;
    if (stage >= kStages) stage -= kStages;
    std::byte* const to = ring_ + stage * kStripBytes;
    Copy<int(Traits::kKeyStripBytes)>(to, keys);
    Copy<int(Traits::kValueStripBytes)>(to + Traits::kKeyStripBytes,
                                        keys + next.ValuesAfterKeys(0));
    CommitCopies();
    next.Advance();
    ++asked_;
  }
  template <int kBytes>
  static __device__ __forceinline__ void Copy(std::byte* to, const std::byte* from) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int at = 0; at < kBytes; at += 512) {
      if (at + 512 <= kBytes || at + lane * 16 < kBytes) {
        CopyStreaming16(to + at + lane * 16, from + at + lane * 16);
      }
    }
  }

  std::byte* const ring_;
  int taken_ = 0;  // the place of the strip to be taken next
  int asked_ = 0;  // strips that are in the ring, or on their way
  bool may_start_next_ = false;
  int4 next_item_ = {};
};

// Its part of the values of a strip in the ring.
template <OfNvfp4 Traits>
__device__ __forceinline__ void ReadValues(const std::byte* values, ValueStrip<Traits>& v) {
  const unsigned lane = threadIdx.x % 32;
  constexpr int kElementBytes = Nvfp4ElementBytes(Traits::kValueDim);
  constexpr int kBlocks = Traits::kValueDim / kNvfp4Block;
  constexpr int kOfVector = Traits::kVectorDims / kNvfp4Block;
  // Two neighbouring rows of lanes have the dimensions of one block.
  const std::byte* const scales =
      values + kElementBytes + lane / 8 * kStripSlots + lane % 4 * kQuadTokens;
#pragma unroll
  for (int i = 0; i < Traits::kValueVectors; ++i) {
    if ((i + 1) * kOfVector <= kBlocks || i * kOfVector + lane / 8 < kBlocks) {
      v.vectors[i] = *reinterpret_cast<const uint4*>(values + i * 512 + lane * 16);
      v.scales[i] = *reinterpret_cast<const uint32_t*>(scales + i * kOfVector * kStripSlots);
    } else {  // dimensions that are computed and not stored
      v.vectors[i] = make_uint4(0, 0, 0, 0);
      v.scales[i] = 0;
    }
  }
}

// As AttendItem of mma_attention.cuh does, with strips that come through the warp's ring.
template <typename Traits>
requires(Traits::kRings) __device__ __forceinline__
    void AttendItem(const AttentionArgs& args, const WorkItem& item, const int4& next_item,
                    int warp, int warps, const typename Traits::Shared& shared,
                    StripRing<Traits>& strips, Accumulator<Traits>& acc) {
  const int lane = threadIdx.x % 32;
  float scale[Traits::kRowTiles][2];
#pragma unroll
  for (int tile = 0; tile < Traits::kRowTiles; ++tile) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      scale[tile][c] = shared.packed_rows.scale[tile * 8 + lane % 4 * 2 + c];
    }
  }
  acc.Reset();
  strips.Begin(item.next >= 0, next_item);
  int strip = item.strip_begin + warp;
  if (strip >= item.strip_end) strips.TopUp();
#pragma unroll 1
  for (; strip < item.strip_end; strip += warps) {
    const std::byte* const keys = strips.Take();
    KeyStrip<Traits> k[1];
    k[0].Read(keys,
              []<typename T>(const std::byte* at, T& x) { x = *reinterpret_cast<const T*>(at); });
    ValueStrip<Traits> v;
    ReadValues(keys + Traits::kKeyStripBytes, v);
    float s[1][Traits::kRowTiles][4];
    Scores<Traits>(k, shared, s);
    ScaleScores<Traits>(args, scale, s);
    const bool dense =
        strip * kStripSlots >= item.dense_begin && (strip + 1) * kStripSlots <= item.dense_end;
    if (!dense) MaskScores<Traits>(item, shared.packed_rows, strip, s[0]);
    acc.Weigh(s);
    if (!dense) {
      ClearDeadValues<Traits>(item, strip, v);
      if (RowsDiffer(item) && AnyNonFinite<Traits>(v)) {
        acc.ConfineValues(shared.packed_rows, strip, v);
      }
    }
    acc.AddValues(v, s[0]);
  }
}

// Through registers where copies to shared memory are counted (StripRing).
template <typename Traits>
requires(Traits::kRings) class ItemCopier<Traits> {
 public:
  __device__ __forceinline__ void Begin(const AttentionArgs& args, int index, WorkItem*) {
    if (threadIdx.x >= kVectors) return;
    held_ = __ldg(reinterpret_cast<const uint4*>(args.items + index) + threadIdx.x);
  }
  __device__ __forceinline__ void End(WorkItem* to) const {
    if (threadIdx.x < kVectors) reinterpret_cast<uint4*>(to)[threadIdx.x] = held_;
  }

 private:
  static constexpr int kVectors = sizeof(WorkItem) / sizeof(uint4);
  uint4 held_ = {};
};

template <typename Traits>
requires(Traits::kRings) __device__ __forceinline__ void AskForFirst(StripRing<Traits>& strips) {
  strips.TopUp();
}

template <typename Traits>
requires(Traits::kRings) struct StripsOf<Traits> {
  using Type = StripRing<Traits>;
};

}  // namespace tributary::cuda
