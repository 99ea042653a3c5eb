// Attention in which several sequences begin with the same pages (plan/shared_plan.h): these pages
// are attended to once for all of their rows.
//
//   PlanShared(costs, entries, page_tables, keys, shared, &shared_plan);        // once per step
//   PlanAttention(own_shape, own_entries, shared_plan.rest, &own);
//   PlanAttention(gathered_shape, shared_plan.entries, shared_plan.keys, &gathered);
//   ... copy both plans and the shared plan's lists to the device ...
//   LaunchSharedAttention(own_launch..., gathered_launch, stream);              // once per layer
//
// The kernels are those of attention.h. Queries of gathered rows are first brought side by side,
// unless they lie so; at the end their partials are merged into those of the rows they stand for.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "kernels/cuda/decode/attention.h"
#include "kernels/cuda/plan/shared_plan.h"
#include "kernels/status.h"

namespace tributary::cuda {

// The launch over what is shared, and where its results go. All pointers are device pointers.
struct GatheredLaunch {
  KernelChoice choice;
  AttentionShape shape;
  int32_t blocks = 0;  // of the plan
  const WorkItem* items = nullptr;
  const RowKeys* keys = nullptr;  // [gathered rows]
  int32_t gathered_rows = 0;      // that launches are made for; the plan may have fewer
  // [gathered_rows]: the row of the call whose queries it has, below 0 for none. nullptr: gathered
  // row i is row first_row + i of the call.
  const int32_t* rows = nullptr;
  int32_t first_row = 0;
  std::byte* q = nullptr;              // [gathered_rows, q_heads, key_dim], where `rows` is given
  float* o = nullptr;                  // [gathered_rows, q_heads, value_dim]
  float* lse = nullptr;                // [gathered_rows, q_heads], natural log
  int32_t call_rows = 0;               // rows of the call that launches are made for
  const RowParts* parts = nullptr;     // [call_rows]
  const int32_t* part_rows = nullptr;  // gathered rows
  // The launch over the rest runs beside this one (side_by_side.h), both planned for their part of
  // the device. Then what this launch uses of the workspace begins at this partial of one row, and
  // at this arrival counter, behind what the other one uses.
  bool side_by_side = false;
  int64_t first_partial_row = 0;
  int32_t first_arrival = 0;
};

// LaunchAttention of a call whose rows also see what is shared: `args.items` and `args.keys` have
// the rest. Launches that are not side by side use the call's workspace one after the other. Where
// the first launch waits for what is ahead (AttentionArgs::late_strips), so does this; side by side
// it waits for all of that.
Status LaunchSharedAttention(const KernelChoice& choice, const AttentionShape& shape,
                             const AttentionArgs& args, int32_t blocks,
                             const GatheredLaunch& gathered, cudaStream_t stream);

}  // namespace tributary::cuda
