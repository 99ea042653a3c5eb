// Rows of a call that attend together to pages that their sequences share: their queries are
// brought side by side, and their partials back to the rows they stand for (shared_attention.h).
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/cuda/plan/shared_plan.h"
#include "kernels/status.h"

namespace tributary::cuda {

// Lists come from a plan: only copies write them. All pointers are device pointers.
struct GatherQueriesArgs {
  const uint4* from = nullptr;    // the call's queries, row_vectors to a row
  uint4* to = nullptr;            // the gathered rows' likewise
  const int32_t* rows = nullptr;  // [gathered_rows]: the row of the call, below 0 for none
  int32_t gathered_rows = 0;
  int32_t row_vectors = 0;  // of 16 bytes
};
Status LaunchGatherQueries(const GatherQueriesArgs& args, bool begins_early, cudaStream_t stream);

// Merges partials of gathered rows into those of the call's rows, in place.
struct MergeGatheredArgs {
  float* o = nullptr;                   // [rows, heads, value_dim]
  float* lse = nullptr;                 // [rows, heads], natural log
  const float* gathered_o = nullptr;    // [gathered rows, heads, value_dim]
  const float* gathered_lse = nullptr;  // [gathered rows, heads]
  const RowParts* parts = nullptr;      // [rows]
  const int32_t* part_rows = nullptr;   // gathered rows, where `parts` says
  int32_t rows = 0;
  int32_t heads = 0;
  int32_t value_dim = 0;  // a multiple of 4
};
Status LaunchMergeGathered(const MergeGatheredArgs& args, bool begins_early, cudaStream_t stream);

}  // namespace tributary::cuda
