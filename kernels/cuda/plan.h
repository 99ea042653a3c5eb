// The plan of an attention call: which block of the grid does which piece of it.
//
// Planning is host arithmetic over lengths, ranges and the number of multiprocessors; no tensor and
// no page table is looked at. The result is one flat list that the host copies to the device once a
// step; every layer of the step launches with it.
//
// The query rows of a sequence times the query heads of a kv head are *columns* of the product K
// Q^T. A job is a block of columns of one sequence and kv head over all the keys any of them may
// see. Jobs laid end to end are cut into equal shares, one a block of the grid, so that one long
// row costs no more than the same number of tokens in short ones. A job that was cut is merged by
// whichever of its blocks finishes last, in the order of its pieces.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kernels/key_range.h"

namespace tributary::cuda {

// The keys a query row may see, as the device takes them.
struct RowKeys {
  int32_t begin = 0;
  int32_t end = 0;
};

// One piece of one job. Slots are local slots of the sequence.
struct alignas(16) WorkItem {
  // What a warp needs to ask for keys comes first, in 16 bytes.
  int32_t page_table = 0;  // where the sequence's first page is in the device's page table array
  int32_t kv_head = 0;
  int32_t group_begin = 0;  // the piece, in groups of 16 slots
  int32_t group_end = 0;
  int32_t row_begin = 0;     // the sequence's first query row
  int32_t column_begin = 0;  // the block's first column; column c is row c / group, head c % group
  int32_t column_count = 0;  // 0: nothing to do
  int32_t key_begin = 0;     // the slots that some row of the block may see
  int32_t key_end = 0;
  int32_t dense_begin = 0;  // the slots that every row of the block may see: no mask needed
  int32_t dense_end = 0;
  int32_t partial_begin = 0;  // the first partial of the job in the workspace
  int32_t partial_index = 0;  // this piece among the job's
  int32_t partial_count = 1;
  int32_t job = 0;    // the job's arrival counter; used when partial_count > 1
  int32_t next = -1;  // the block's next item, -1 for none
};
static_assert(sizeof(WorkItem) == 64);

struct PlanEntry {
  int32_t row_begin = 0;
  int32_t row_count = 0;
  int32_t page_table = 0;  // where the sequence's first page is in the device's page table array
};

struct PlanShape {
  int32_t group = 1;  // query heads of a kv head
  int32_t kv_heads = 1;
  int32_t columns_per_block = 8;
  int32_t share_groups = 16;  // shares are multiples of this many 16-slot groups
  int32_t blocks = 1;         // blocks of the grid
  // Cuts every job at multiples of kInvariantGroups, wherever its pieces end up, so that a
  // sequence's result does not depend on what else is in the batch.
  bool batch_invariant = false;
};

inline constexpr int32_t kInvariantGroups = 64;  // 1024 slots

struct Plan {
  std::vector<WorkItem> items;  // the first `blocks` of them are where the blocks start
  std::vector<RowKeys> keys;    // [rows]
  // How many jobs were cut, then the first piece of each.
  std::vector<int32_t> cut_items;
  int32_t blocks = 0;    // blocks with work; the grid may be larger
  int32_t jobs_cut = 0;  // arrival counters in use
  int32_t partials = 0;  // workspace slots in use, each columns_per_block x (head_dim + 1)
};

// Fills *plan, whose vectors keep their capacity. keys holds a range for each row of the entries,
// of slots below 2^31.
void PlanAttention(const PlanShape& shape, std::span<const PlanEntry> entries,
                   std::span<const KeyRange> keys, Plan* plan);

// Upper bounds for any plan with this shape, for buffers that a captured graph keeps.
struct PlanBounds {
  int64_t items = 0;  // cut_items has jobs_cut + 1
  int64_t partials = 0;
  int64_t jobs_cut = 0;
};
PlanBounds BoundPlan(const PlanShape& shape, int64_t max_entries, int64_t max_rows,
                     int64_t max_keys_in_batch);

}  // namespace tributary::cuda
