// What a thread of a computing warpgroup of wgmma_attention.cuh keeps in registers.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/cuda/decode/attention_args.h"
#include "kernels/cuda/decode/nvfp4_keys.cuh"
#include "kernels/cuda/decode/sm90/ring.cuh"
#include "kernels/cuda/decode/sm90/tile_source.cuh"
#include "kernels/cuda/decode/sm90/uniform.cuh"
#include "kernels/cuda/decode/sm90/wgmma_traits.cuh"
#include "kernels/cuda/ptx/bulk_copy.cuh"
#include "kernels/cuda/ptx/wgmma.cuh"

namespace tributary::cuda {

// A lane's part of the keys of its warp's strip.
template <typename Traits>
struct RawKeys {
  uint4 panels[Traits::kPanels][2] = {};
  uint4 tail = {};
};
template <OfNvfp4 Traits>
struct RawKeys<Traits> : Nvfp4Keys<Traits::kKeyDim> {};

// One struct, and functions over it in files by what they do: wgmma_operands.cuh (tiles),
// wgmma_softmax.cuh (weights), wgmma_merge.cuh (output) and wgmma_warpgroup.cuh (the loop).
template <typename Traits>
struct Warpgroup {
  using Shared = typename Traits::Shared;

  __device__ Warpgroup(const AttentionArgs& args, Shared& shared, int warpgroup)
      : args(args),
        shared(shared),
        lane(threadIdx.x % 32),
        warp(threadIdx.x / 32 % 4),
        warpgroup(warpgroup),
        weights_at(Kept(SharedAddress(shared.scratch[warpgroup].p) +
                        SwizzledChunk(lane / 16 * 8 + lane % 8, warp * 2 + lane / 8 % 2))) {}

  const AttentionArgs& args;
  Shared& shared;
  const int lane;
  const int warp;  // of the warpgroup
  const int warpgroup;
  const uint32_t weights_at;         // this lane's, in the first of the two places
  RingPlace<Traits::kStages> place;  // of the next tile
  uint32_t parity = 0;               // of the weights' two places
  uint32_t weights_parity = 0;       // of the phase of weights_published
  float s[Traits::kTileRows / 2];    // the tile's scores
  float o[Traits::kDimTiles][Traits::kTileRows / 2];
  float own[Traits::kOwnDimTiles][Traits::kOwnTileRows / 2];  // of the block's output
  RawKeys<Traits> k;
  uint32_t v[kTileStrips][Traits::kDimTiles][Traits::kValueWords];
  float sum[Traits::kCells];  // of weights, over this thread's rows only
};

}  // namespace tributary::cuda
