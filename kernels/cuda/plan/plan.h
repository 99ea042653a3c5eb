// The plan of a decode call: which thread block of the grid does which part of the work.
//
// Planning is host arithmetic over lengths, key ranges and the number of multiprocessors; it looks
// at no tensor and no page table. The result is one flat list that the host copies to the device
// once per step; every layer of the step launches with it.
//
// The query rows of a sequence times the query heads that share a KV head are the sequence's packed
// rows. A query tile is `tile_rows` of them. A job is a query tile in one KV head over all the keys
// that any of its rows may see. Jobs laid end to end are cut into equal parts, one part per thread
// block, so that one long sequence costs little more than the same number of tokens in short ones.
// Parts are equal in the time they take: every split of a job costs its share of the keys and a
// constant (DecodePlanShape::split_cost), without which thread blocks of many short splits end
// last. A job that was split is merged by whichever of its thread blocks finishes last, or by all
// of them together (cut_job.cuh), in the order of its splits.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kernels/cuda/plan/work_item.h"
#include "kernels/key_range.h"

namespace tributary::cuda {

// One sequence of a call.
struct PlanEntry {
  int32_t row_begin = 0;
  int32_t row_count = 0;
  int32_t page_table = 0;  // where the sequence's first page is in the device's page table array
};

// The unit of DecodePlanShape::split_cost: a share costs 2^kShareBits.
inline constexpr int32_t kShareBits = 2;

// What a decode plan is made from besides the sequences.
struct DecodePlanShape {
  int32_t gqa_ratio = 1;  // query heads that share a KV head
  int32_t kv_heads = 1;
  int32_t tile_rows = 8;      // packed rows of a query tile
  int32_t share_strips = 16;  // jobs are split at multiples of so many strips: a share
  int32_t blocks = 1;         // what items are dealt to: thread blocks, or clusters of them
  int32_t cluster_size = 1;   // thread blocks in each of these
  // What beginning and ending a split costs besides its shares (kShareBits).
  int32_t split_cost = 0;
  // A thread block whose only item is a split merges it faster than one with more items.
  bool lone_splits = true;
  // Splits every job at multiples of kInvariantStrips, whoever gets the splits, so that a
  // sequence's result does not depend on what else is in the batch.
  bool batch_invariant = false;
};

inline constexpr int32_t kInvariantStrips = 64;  // 1024 slots

// A query tile of one sequence, the same for each of its KV heads.
struct PlannedTile {
  WorkItem item;
  int64_t shares = 1;  // a job without keys still has to write its empty result
};

struct Plan {
  std::vector<WorkItem> items;  // the first `blocks` of them are where the thread blocks start
  std::vector<RowKeys> keys;    // [rows]
  int32_t blocks = 0;           // thread blocks (or clusters) with work; the grid may be larger
  int32_t arrivals = 0;  // arrival counters in use: one per job that is split and rank of a cluster
  int32_t partials = 0;  // workspace slots in use, each of tile_rows x (value_dim + 1) floats

  std::vector<PlannedTile> tiles;  // scratch of PlanAttention, kept for the next call
};

// Fills *plan, whose vectors keep their capacity. `keys` holds one range for each row of the
// entries, of slots below 2^31.
void PlanAttention(const DecodePlanShape& shape, std::span<const PlanEntry> entries,
                   std::span<const KeyRange> keys, Plan* plan);

// Upper bounds for any plan with this shape, for buffers that a captured graph keeps.
struct PlanBounds {
  int64_t items = 0;
  int64_t partials = 0;
  int64_t arrivals = 0;
};
PlanBounds BoundPlan(const DecodePlanShape& shape, int64_t max_entries, int64_t max_rows,
                     int64_t max_keys_in_batch);

}  // namespace tributary::cuda
