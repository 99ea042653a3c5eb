// How a warp of mma_attention finds its strips in the pages and brings them to its registers.
#pragma once

#include "kernels/cuda/decode/attention_args.h"
#include "kernels/cuda/decode/nvfp4_keys.cuh"
#include "kernels/cuda/decode/sm80/mma_traits.cuh"
#include "kernels/cuda/layout/nvfp4_layout.h"
#include "kernels/cuda/layout/page_layout.h"
#include "kernels/cuda/ptx/cluster.cuh"
#include "kernels/cuda/ptx/ptx.cuh"

namespace tributary::cuda {

// A warp that has more strips than this in its first item asks L2 for two steps of them before the
// launches ahead have ended, not for one: it gains more than the copies that come before it lose.
inline constexpr int kLongItem = 7;

// A lane's part of the keys of a strip.
template <typename Traits>
struct KeyStrip {
  uint4 panels[Traits::kPanels][2];  // of rows lane / 4 and lane / 4 + 8
};
template <typename Traits>
requires(Traits::kHasTail) struct KeyStrip<Traits> {
  uint4 panels[Traits::kPanels][2];
  uint4 tail;  // eight bytes of each of the two rows
};
template <OfNvfp4 Traits>
struct KeyStrip<Traits> : Nvfp4Keys<Traits::kKeyDim> {};

// Its part of the values.
template <typename Traits>
struct ValueStrip {
  uint4 vectors[Traits::kValueVectors];

  __device__ __forceinline__ void Clear() {
#pragma unroll
    for (uint4& v : vectors) v = make_uint4(0, 0, 0, 0);
  }
};
template <OfNvfp4 Traits>
struct ValueStrip<Traits> {
  uint4 vectors[Traits::kValueVectors];
  uint32_t
      scales[Traits::kValueVectors];  // of four tokens, of the block of the vector's dimensions

  // (What has no scale is zero: codes are always finite.)
  __device__ __forceinline__ void Clear() {
#pragma unroll
    for (uint32_t& x : scales) x = 0;
  }
};

// K and V of the strips that a warp works on, or has asked for.
template <typename Traits>
struct Tokens {
  KeyStrip<Traits> k[Traits::kStrips];
  ValueStrip<Traits> v[Traits::kStrips];
};

// Which strips of an item a warp takes, kStrips at a time. The strips of a warp lie as many strips
// apart as the cluster has warps.
template <typename Traits>
class StripCursor {
 public:
  __device__ StripCursor(const AttentionArgs& args, int warp, int warps)
      : args_(args), warp_(warp), warps_(warps) {}

  // Goes to the warp's first strips of an item, given by the item's first 16 bytes.
  __device__ void Start(int4 item) {
    pages_ = args_.page_tables + item.x;
    head_ = item.y;
    strip_ = item.z + warp_;
    end_ = item.w;
    FetchPages(0);
  }
  // Asks for the pages of the next step, once the Keys of this one have been taken: a step ahead,
  // because the compiler has one counter for all loads that are under way at the end of a step, so
  // that whoever waits for a page waits for the tokens, too.
  __device__ void FetchNextPages() { FetchPages(Traits::kStrips); }
  __device__ void Advance() { strip_ += Traits::kStrips * warps_; }
  __device__ bool Done() const { return !Has(0); }
  // Whether the item has the i-th of the warp's strips from here; the next step begins with the
  // kStrips-th.
  __device__ bool Has(int i) const { return strip_ + i * warps_ < end_; }
  // Whether the launch ahead may still be writing one of this step's strips.
  __device__ bool IsLate() const {
    return strip_ + (Traits::kStrips - 1) * warps_ + args_.late_strips >= end_;
  }

  // Where the i-th strip's K lies; its V lies ValuesAfterKeys(i) bytes further.
  __device__ const std::byte* Keys(int i) const { return KeysIn(i, page_[i]); }
  // The same for strips of the next step.
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
    return __ldg(pages_ + ((strip_ + i * warps_) >> (args_.page_shift - 4)));
  }
  __device__ void FetchPages(int first) {
#pragma unroll
    for (int i = 0; i < Traits::kStrips; ++i) {
      if (Has(first + i)) page_[i] = FetchPage(first + i);
    }
  }
  // Which strip of its page the i-th is.
  __device__ int InPage(int i) const {
    return (strip_ + i * warps_) & ((1 << (args_.page_shift - 4)) - 1);
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
  int strip_ = 0;
  int end_ = 0;
  int head_ = 0;
  int page_[Traits::kStrips] = {};
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
__device__ __forceinline__ void PrefetchStrip(const std::byte* keys, size_t values_after_keys) {
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

// A lane's vectors of the values of a strip, of which all lanes have kStripVectors.
template <int kStripVectors, int kValueVectors>
__device__ __forceinline__ void LoadVectors(const std::byte* values, uint4 (&v)[kValueVectors]) {
  const unsigned lane = threadIdx.x % 32;  // of no sign, which an address would be extended by
  const std::byte* at = values + lane * kVectorBytes;
#pragma unroll
  for (int i = 0; i < kValueVectors; ++i) {
    if ((i + 1) * 32 <= kStripVectors || i * 32 + lane < kStripVectors) {
      v[i] = LoadStreaming(at + i * 32 * kVectorBytes);
    } else {
      v[i] = make_uint4(0, 0, 0, 0);
    }
  }
}

template <typename Traits>
__device__ __forceinline__ void LoadValues(const std::byte* values, ValueStrip<Traits>& v) {
  LoadVectors<int(Traits::kValueStripBytes) / kVectorBytes>(values, v.vectors);
}

template <OfNvfp4 Traits>
__device__ __forceinline__ void LoadKeys(const std::byte* keys, KeyStrip<Traits>& k) {
  k.Read(keys, [](const std::byte* at, auto& x) { LoadStreamingTo(at, x); });
}

template <OfNvfp4 Traits>
__device__ __forceinline__ void LoadValues(const std::byte* values, ValueStrip<Traits>& v) {
  constexpr int kElementBytes = Nvfp4ElementBytes(Traits::kValueDim);
  LoadVectors<kElementBytes / kVectorBytes>(values, v.vectors);
  const unsigned lane = threadIdx.x % 32;
  // Two neighbouring rows of lanes have the dimensions of one block.
  const std::byte* at = values + kElementBytes + lane / 8 * kStripSlots + lane % 4 * kQuadTokens;
  constexpr int kBlocks = Traits::kValueDim / kNvfp4Block;
  constexpr int kOfVector = Traits::kVectorDims / kNvfp4Block;
#pragma unroll
  for (int i = 0; i < Traits::kValueVectors; ++i) {
    if ((i + 1) * kOfVector <= kBlocks || i * kOfVector + lane / 8 < kBlocks) {
      LoadStreamingTo(at + i * kOfVector * kStripSlots, v.scales[i]);
    } else {
      v.scales[i] = 0;
    }
  }
}

// Brings a warp's strips to its registers, ahead of their use.
template <typename Traits>
class StripLoader {
 public:
  // warp, warps: this warp among those of the cluster.
  __device__ StripLoader(const AttentionArgs& args, int warp, int warps,
                         const typename Traits::Shared&)
      : next(args, warp, warps) {}

  // Asks L2 for the strips of the first step, and of the second one in a long item.
  __device__ void Prefetch() const {
#pragma unroll
    for (int i = 0; i < Traits::kStrips; ++i) {
      if (next.Has(i)) PrefetchStrip<Traits>(next.Keys(i), next.ValuesAfterKeys(i));
    }
    if (next.Has(kLongItem)) {
#pragma unroll
      for (int i = Traits::kStrips; i < 2 * Traits::kStrips; ++i) {
        PrefetchStrip<Traits>(next.LaterKeys(i), next.ValuesAfterKeys(i));
      }
    }
  }

  // Asks for the keys of the strips at the cursor; the registers of the keys before are free.
  __device__ void AskForKeys() {
    if (next.IsLate()) WaitForLaunchesAhead();
#pragma unroll
    for (int i = 0; i < Traits::kStrips; ++i) {
      if (i > 0 && !next.Has(i)) continue;
      keys_[i] = next.Keys(i);
      LoadKeys<Traits>(keys_[i], tokens.k[i]);
    }
    next.FetchNextPages();
  }
  // Asks for the values of the same strips.
  __device__ void AskForValues() {
#pragma unroll
    for (int i = 0; i < Traits::kStrips; ++i) {
      if (i > 0 && !next.Has(i)) {
        tokens.v[i].Clear();  // a strip that the step lacks weighs nothing, but 0 * NaN is NaN
      } else {
        LoadValues<Traits>(keys_[i] + next.ValuesAfterKeys(i), tokens.v[i]);
      }
    }
  }
  __device__ void AskForBoth() {
    if (next.Done()) return;
    AskForKeys();
    AskForValues();
  }

  StripCursor<Traits> next;
  Tokens<Traits> tokens;

 private:
  const std::byte* keys_[Traits::kStrips] = {};
};

}  // namespace tributary::cuda
