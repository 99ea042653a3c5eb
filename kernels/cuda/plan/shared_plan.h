// Pages that several sequences of a call have alike, attended to once for all of their rows.
//
// Sequences that were forked begin with the same pages (SharedPages: runs of slots, a tree of any
// depth). A run is planned as one sequence of its own, whose rows are those of all entries that
// have it: gathered rows. What lies behind an entry's last run is planned as ever. A query row then
// has one partial of each of its runs and one of the rest, which are merged by the algebra of
// kernels/lse.h.
//
// Planning is host arithmetic, as plan.h. It also decides whether sharing is worth it.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kernels/cuda/plan/plan.h"
#include "kernels/dtype.h"
#include "kernels/key_range.h"
#include "kernels/params.h"

namespace tributary::cuda {

// What the decision depends on besides the rows.
struct SharingCosts {
  int32_t gqa_ratio = 1;     // query heads that share a KV head
  int32_t widest_tile = 16;  // packed rows that a kernel takes with one read of the keys
  int32_t kv_heads = 1;
  int64_t bytes_per_token = 0;  // keys and values of one KV head
  int32_t multiprocessors = 1;
};

// How often a slot is read for so many query rows. (A further tile of a run finds in L2 what the
// first one has read, but has as much to multiply, and takes as long.)
constexpr int64_t ReadsOf(int64_t rows, const SharingCosts& costs) {
  return (rows * costs.gqa_ratio + costs.widest_tile - 1) / costs.widest_tile;
}

// Whether a run that saves so many bytes of reading is worth the jobs that it adds.
bool RunIsWorthSharing(int64_t bytes_saved, const SharingCosts& costs);
// Whether all runs of a call together are worth the launches that sharing adds.
bool CallIsWorthSharing(int64_t bytes_saved, const SharingCosts& costs);

// Where a row's parts are in SharedPlan::part_rows.
struct alignas(8) RowParts {
  int32_t begin = 0;
  int32_t count = 0;  // 0 or below: the row has nothing to merge
};

struct SharedPlan {
  std::vector<PlanEntry> entries;  // one per run, of gathered rows; empty: nothing is shared
  std::vector<KeyRange> keys;      // [gathered rows], within the run
  std::vector<int32_t> rows;       // [gathered rows]: which row of the call it is
  std::vector<RowParts> parts;     // [rows of the call]
  std::vector<int32_t> part_rows;  // gathered rows, those of a row of the call side by side
  std::vector<KeyRange> rest;      // [rows of the call]: what is left to see apart from the runs
  int32_t most_rows = 0;           // of one run
  int64_t total_keys = 0;          // slots of all runs
  // Slots as often as they are read (ReadsOf): those of all runs, and those that are left.
  int64_t shared_reads = 0;
  int64_t rest_reads = 0;

  std::vector<int64_t> taken;  // scratch of PlanShared: [entries], the slots before this one

  bool empty() const { return entries.empty(); }
  // Whether the gathered rows are consecutive rows of the call, so that their queries need not be
  // brought together.
  bool InOrder() const;
};

// Fills *plan, whose vectors keep their capacity. `entries` and `shared`: as in AttentionParams.
// `page_tables`: where each entry's pages begin in the device's array. `keys`: [rows].
void PlanShared(const SharingCosts& costs, std::span<const AttentionEntry> entries,
                std::span<const int32_t> page_tables, std::span<const KeyRange> keys,
                std::span<const SharedPages> shared, SharedPlan* plan);

}  // namespace tributary::cuda
