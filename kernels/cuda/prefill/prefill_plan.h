// The plan of a prefill: many query rows a sequence, either over its context in the paged cache or
// over the new tokens themselves.
//
// Host arithmetic over lengths and ranges, made once a step and used by every layer. The query rows
// of a sequence are cut into tiles; a tile of one query head with the keys its rows may see is an
// item, which one block of the grid works off alone. Items go out heaviest first to whichever block
// has the least to do, and among equals those of one kv head together, so that its keys are read
// from L2. Context is first gathered from its pages, a bounded number of slots at a time: each such
// pass attends over what it gathered and merges with the passes before it. When items are too few
// to fill the grid, each is split over its keys, and the partials are merged.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kernels/cuda/plan/plan.h"  // RowKeys
#include "kernels/key_range.h"

namespace tributary::cuda {

// Slots gathered at a time: a multiple of every kernel's tile of keys.
inline constexpr int32_t kGatherSlots = 128;

// A tile of query rows of one head and the keys it attends over. A key is a local slot of the
// sequence's context, or a new token's place in its sequence.
struct alignas(16) PrefillItem {
  int32_t row_begin = 0;  // of the call
  int32_t row_count = 0;
  int32_t head = 0;       // query head
  int32_t key_row = 0;    // key k is row key_row + k of dense K and V; may be negative
  int32_t key_begin = 0;  // keys to visit, in tiles from key_begin on; none: key_end <= key_begin
  int32_t key_end = 0;
  int32_t dense_begin = 0;  // the keys that every row sees: no mask needed
  int32_t dense_end = 0;
  int32_t key_limit = 0;   // keys from here on belong to somebody else
  int32_t accumulate = 0;  // 1: merge with the result that is already there
  int32_t next = -1;       // the block's next item, -1 for none
  int32_t split = -1;      // >= 0: the result is this partial of its rows, to be merged
};
static_assert(sizeof(PrefillItem) == 48);

// kGatherSlots slots of a sequence's context, of which [slot_begin, slot_end) are gathered and the
// others, which may hold anything, are replaced by zeros.
struct alignas(16) PrefillGather {
  int32_t page_table = 0;  // where the sequence's first page is in the device's page table array
  int32_t first_slot = 0;  // a multiple of kGatherSlots
  int32_t slot_begin = 0;
  int32_t slot_end = 0;
};

// One round of gathering and attending.
struct PrefillPass {
  int32_t gather_begin = 0;
  int32_t gather_count = 0;
  int32_t item_begin = 0;
  int32_t item_count = 0;
  int32_t blocks = 0;  // of the grid; block b starts at item item_begin + b
  // > 1: all rows of the call, [row_begin, row_begin + row_count), were split over keys, so many
  // times, and their partials are merged; with the result that is already there, too, when
  // accumulate is set.
  int32_t splits = 1;
  int32_t row_begin = 0;
  int32_t row_count = 0;
  bool accumulate = false;
};

struct PrefillEntry {
  int32_t row_begin = 0;
  int32_t row_count = 0;
  // Context: where the sequence's first page is in the device's page table array.
  int32_t page_table = 0;
  // New tokens: the sequence's tokens are rows [token_begin, token_begin + token_count) of K and V.
  int32_t token_begin = 0;
  int32_t token_count = 0;
};

struct PrefillPlanShape {
  int32_t rows_per_tile = 128;
  int32_t keys_per_tile = 128;
  int32_t group = 1;       // query heads of a kv head
  int32_t head_begin = 0;  // the query heads to compute
  int32_t head_count = 1;
  int32_t blocks = 1;  // of the grid
  bool accumulate = false;
  // Context only: how many slots fit the workspace, at least kGatherSlots.
  int64_t workspace_slots = 0;
};

// Rows times splits of a plan are at most this: what the workspace holds partials for.
inline constexpr int32_t kMaxSplitRows = 1024;
inline constexpr int32_t kMaxSplits = 15;  // of a merge's sources one is the result before

struct PrefillPlan {
  std::vector<PrefillItem> items;
  std::vector<PrefillGather> gathers;
  std::vector<RowKeys> keys;  // [rows]
  std::vector<PrefillPass> passes;
};

// Fill *plan, whose vectors keep their capacity. keys holds a range for each row of the entries, of
// slots (context) or of places in the sequence (new tokens, within [0, token_count)), below 2^31.
void PlanPrefillContext(const PrefillPlanShape& shape, std::span<const PrefillEntry> entries,
                        std::span<const KeyRange> keys, PrefillPlan* plan);
void PlanPrefillNewTokens(const PrefillPlanShape& shape, std::span<const PrefillEntry> entries,
                          std::span<const KeyRange> keys, PrefillPlan* plan);

}  // namespace tributary::cuda
