// The plan of an attention call: which block of the grid does which piece of it.
//
// Planning is host arithmetic over lengths, ranges and the number of multiprocessors; no tensor and
// no page table is looked at. The result is one flat list that the host copies to the device once a
// step; every layer of the step launches with it.
//
// The query rows of a sequence times the query heads of a kv head are *columns* of the product K
// Q^T. A job is a block of columns of one sequence and kv head over all the keys any of them may
// see. Jobs laid end to end are cut into equal parts, one a block of the grid, so that one long row
// costs little more than the same number of tokens in short ones. Parts are equal in the time they
// take: every piece of a job costs its share of the keys and then some (PlanShape::piece_cost),
// without which blocks of many short pieces end last. A job that was cut is merged by
// whichever of its blocks finishes last, or by all of them together (cut_job.cuh), in the order of
// its pieces.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kernels/cuda/plan/work_item.h"
#include "kernels/key_range.h"

namespace tributary::cuda {

struct PlanEntry {
  int32_t row_begin = 0;
  int32_t row_count = 0;
  int32_t page_table = 0;  // where the sequence's first page is in the device's page table array
};

// The unit of PlanShape::piece_cost: a share costs 2^kShareBits.
inline constexpr int32_t kShareBits = 2;

struct PlanShape {
  int32_t group = 1;  // query heads of a kv head
  int32_t kv_heads = 1;
  int32_t columns_per_block = 8;
  int32_t share_groups = 16;  // shares are multiples of this many 16-slot groups
  int32_t blocks = 1;         // that take items: blocks of the grid, or clusters of them
  int32_t cluster_size = 1;   // blocks of the grid to each of these
  // What beginning and ending a piece of a job costs beside its shares (kShareBits).
  int32_t piece_cost = 0;
  // Blocks whose only item is a piece of a job merge these faster than others do.
  bool lone_pieces = true;
  // Cuts every job at multiples of kInvariantGroups, wherever its pieces end up, so that a
  // sequence's result does not depend on what else is in the batch.
  bool batch_invariant = false;
};

inline constexpr int32_t kInvariantGroups = 64;  // 1024 slots

// A block of columns of one sequence, the same for each of its kv heads.
struct PlannedColumns {
  WorkItem item;
  int64_t shares = 1;  // a job without keys still has to write its empty result
};

struct Plan {
  std::vector<WorkItem> items;  // the first `blocks` of them are where the blocks start
  std::vector<RowKeys> keys;    // [rows]
  int32_t blocks = 0;           // blocks with work; the grid may be larger
  int32_t arrivals = 0;  // arrival counters in use: for each job cut, one a block of a cluster
  int32_t partials = 0;  // workspace slots in use, each columns_per_block x (head_dim + 1)

  std::vector<PlannedColumns> columns;  // scratch of PlanAttention, kept for the next call
};

// Fills *plan, whose vectors keep their capacity. keys holds a range for each row of the entries,
// of slots below 2^31.
void PlanAttention(const PlanShape& shape, std::span<const PlanEntry> entries,
                   std::span<const KeyRange> keys, Plan* plan);

// Upper bounds for any plan with this shape, for buffers that a captured graph keeps.
struct PlanBounds {
  int64_t items = 0;
  int64_t partials = 0;
  int64_t arrivals = 0;
};
PlanBounds BoundPlan(const PlanShape& shape, int64_t max_entries, int64_t max_rows,
                     int64_t max_keys_in_batch);

}  // namespace tributary::cuda
