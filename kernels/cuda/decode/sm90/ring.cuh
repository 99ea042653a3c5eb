// Places and lengths of rings of tiles in shared memory.
#pragma once

#include <cstdint>

#include "kernels/cuda/decode/sm90/tile_source.cuh"

namespace tributary::cuda {

// What a thread block asks memory for at once: enough to keep it busy (with half of it, calls take
// a tenth longer). More would stand in queues, which serve multiprocessors so unequally that with
// 160 KB one was done with its share when another had two thirds of it.
inline constexpr int kBytesUnderWay = 64 * 1024;

// So many tiles of one warpgroup's ring come nearest to its share of kBytesUnderWay.
constexpr int TilesUnderWay(int tile_bytes) {
  const int of_all_rings = kComputeWarpgroups * tile_bytes;
  return (kBytesUnderWay + of_all_rings / 2) / of_all_rings;
}

// A place in a ring, and the parity of its barrier's next phase.
template <int kStages>
struct RingPlace {
  int stage = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ void Advance() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
  // The place `places` before this one, no more than the ring has.
  __device__ __forceinline__ RingPlace Before(int places) const {
    const bool wraps = stage < places;
    return {stage - places + (wraps ? kStages : 0), parity ^ (wraps ? 1 : 0)};
  }
};

// The stages of a ring that has room for `most`, and two warps to fill them in turn, each of which
// waits until the tile `under_way` places before its own has come. It must not miss that, so nobody
// may fill that stage again before this warp has copied its tile: it does so itself where the
// ring's length and `under_way` are both even or both odd, and where the length is twice
// `under_way` the other warp waits for that tile in turn.
constexpr int RingLength(int most, int under_way) {
  return (most - under_way) % 2 == 0 || most == 2 * under_way ? most : most - 1;
}

}  // namespace tributary::cuda
