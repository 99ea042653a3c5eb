// Queries of wgmma_attention.cuh, in shared memory as operand B of products with K.
#pragma once

#include "kernels/cuda/decode/attention_args.h"
#include "kernels/cuda/decode/nvfp4_keys.cuh"
#include "kernels/cuda/decode/queries.cuh"
#include "kernels/cuda/layout/nvfp4_layout.h"
#include "kernels/cuda/plan/work_item.h"
#include "kernels/cuda/ptx/ptx.cuh"
#include "kernels/cuda/ptx/wgmma.cuh"

namespace tributary::cuda {

// Where four elements of a query are that lie one after the other, as those of a key are that a
// lane has in one word or two: of which step of 16 dimensions, and of which of the four lanes that
// share a row. They are slots 2t, 2t + 1, 2t + 8 and 2t + 9 of the step, of lane t.
struct QueryQuad {
  int step;
  int lane;
};

// Quad `quad` of the eight elements of a vector. A lane's vector of K starts at dimension kElements
// * (4 * panel + lane % 4), in the tail of a row at half as many from its first.
template <typename Traits>
requires(!OfNvfp4<Traits>) __device__ __forceinline__ QueryQuad QuadOfVector(int vector, int quad) {
  constexpr int kOfVector = Traits::kQuadsPerVector / 2;  // vectors of eight elements
  const int of_lane = vector / kOfVector;
  QueryQuad place = {of_lane / 4 * Traits::kQuadsPerVector + vector % kOfVector * 2 + quad,
                     of_lane % 4};
  if constexpr (Traits::kHasTail) {
    const int in_tail = (vector - Traits::kPanels * 4 * kOfVector) * 2 + quad;
    if (in_tail >= 0) {
      place.step = Traits::kPanels * Traits::kQuadsPerVector + in_tail % Traits::kTailSteps;
      place.lane = in_tail / Traits::kTailSteps;
    }
  }
  return place;
}

template <OfNvfp4 Traits>
__device__ __forceinline__ QueryQuad QuadOfVector(int vector, int quad) {
  const int d = vector * 8 + quad * 4;
  const KeyPiece piece = KeyPieceOf(d, Traits::kKeyDim);
  const int of_lane = piece.dims / 4;  // dimensions
  const int in_piece = d - piece.first;
  return {piece.first / 16 + in_piece % of_lane / 4, in_piece / of_lane};
}

// Brings an item's queries to their place. By all threads that compute, once QueryCopier has asked
// for them.
template <typename Traits>
__device__ __forceinline__ void StageQueries(const AttentionArgs& args, const WorkItem& item,
                                             typename Traits::Queries& queries,
                                             typename Traits::Shared& shared, uint32_t parity) {
  WaitForCopies();
  queries.Finish(args, shared.raw, shared.packed_rows, [&](int packed_row, int vector, uint4 x) {
    const uint32_t words[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const QueryQuad at = QuadOfVector<Traits>(vector, i / 2);
      std::byte* to = shared.q[at.step / 4] + SwizzledChunk(packed_row, at.step % 4 * 2 + i % 2);
      *reinterpret_cast<uint32_t*>(to + at.lane * 4) = words[i];
    }
  });
  if (threadIdx.x == 0) shared.v_scale = ValueScale<Traits::kKv>(args, item);
  FenceSharedForWgmma();
  shared.queries_staged.Arrive();
  shared.queries_staged.Wait(parity);
}

}  // namespace tributary::cuda
