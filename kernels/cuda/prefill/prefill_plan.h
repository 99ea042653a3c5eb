// The plan of a prefill: attention of many query rows per sequence, either over its context in the
// paged cache or over the new tokens themselves.
//
// A plan is host arithmetic over lengths and ranges. It is made once per step and every layer uses
// it. The query rows of a sequence are cut into query tiles. A query tile of one query head,
// together with the keys that its rows may see, is an item; one thread block works it off alone.
// Items are dealt heaviest first, each to the thread block that has the least to do. Among equals,
// those of one KV head come together, so that its keys are read from L2. Context is first gathered
// from its pages, a bounded number of slots at a time: each such pass attends over what it gathered
// and merges with the passes before it. When items are too few to fill the grid, each is split over
// its keys, and the partials of the splits are merged.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kernels/cuda/plan/plan.h"  // RowKeys
#include "kernels/key_range.h"

namespace tributary::cuda {

// Slots that one gather brings: a multiple of every kernel's KV tile.
inline constexpr int32_t kGatherSlots = 128;

// A batch-invariant plan attends over the context of every sequence in parts that end at multiples
// of so many slots, one after the other.
inline constexpr int32_t kInvariantSlots = 32768;
static_assert(kInvariantSlots % kGatherSlots == 0);

// A query tile of one head and the keys it attends over. A key is numbered by its local slot in the
// sequence's context, or by the place of a new token in its sequence.
struct alignas(16) PrefillItem {
  int32_t row_begin = 0;  // the first row, counted from the first row of the call
  int32_t row_count = 0;
  int32_t head = 0;         // the query head
  int32_t key_row = 0;      // key k lies in row key_row + k of dense K and V; may be negative
  int32_t key_begin = 0;    // the keys to visit, in KV tiles from key_begin on; there are none when
  int32_t key_end = 0;      // key_end <= key_begin
  int32_t dense_begin = 0;  // the keys that every row sees: they need no mask
  int32_t dense_end = 0;
  int32_t key_limit = 0;   // rows of dense K and V from this key on belong to others
  int32_t accumulate = 0;  // 1: merge with the result that is already there
  int32_t next = -1;       // the thread block's next item, -1 for none
  int32_t split = -1;      // >= 0: the result is this split's partial of the rows, merged later
};
static_assert(sizeof(PrefillItem) == 48);

// kGatherSlots slots of a sequence's context. Those in [slot_begin, slot_end) are gathered; the
// others may hold anything, and zeros take their place.
struct alignas(16) PrefillGather {
  int32_t page_table = 0;  // where the sequence's first page is in the device's page table array
  int32_t first_slot = 0;  // a multiple of kGatherSlots
  int32_t slot_begin = 0;
  int32_t slot_end = 0;
};

// One round of gathering and attending. Indices count within the plan's arrays.
struct PrefillPass {
  int32_t gather_begin = 0;
  int32_t gather_count = 0;
  int32_t item_begin = 0;
  int32_t item_count = 0;
  int32_t blocks = 0;  // thread blocks of the grid; block b starts at item item_begin + b
  // When this is more than 1, all rows of the call, [row_begin, row_begin + row_count), are split
  // over keys into so many splits, whose partials are merged. With accumulate, the result that is
  // already there is merged with them.
  int32_t splits = 1;
  int32_t row_begin = 0;
  int32_t row_count = 0;
  bool accumulate = false;
};

// One sequence of the call.
struct PrefillEntry {
  int32_t row_begin = 0;
  int32_t row_count = 0;
  // Context: where the sequence's first page is in the device's page table array.
  int32_t page_table = 0;
  // New tokens: the sequence's tokens are rows [token_begin, token_begin + token_count) of K and V.
  int32_t token_begin = 0;
  int32_t token_count = 0;
};

// What a plan is made from; PrefillPlanShapeFor (prefill.h) fills it in.
struct PrefillPlanShape {
  int32_t rows_per_tile = 128;  // of a query tile
  int32_t keys_per_tile = 128;  // slots of a KV tile
  int32_t gqa_ratio = 1;        // query heads per KV head
  int32_t head_begin = 0;       // the query heads to compute
  int32_t head_count = 1;
  int32_t blocks = 1;       // thread blocks of the grid
  bool accumulate = false;  // merge with the result that is already there
  // For context only: how many slots fit the workspace. With fewer than kGatherSlots, LaunchPrefill
  // refuses the plan.
  int64_t workspace_slots = 0;
  // The result of a row is the same to the bit whatever else is in the call, and wherever a call is
  // cut between rows: the context is cut at fixed places, and few items are not split over their
  // keys. For that the workspace must hold kInvariantSlots slots, or all context of the call.
  bool batch_invariant = false;
};

// The workspace holds partials for so many rows, counted once for each of their splits.
inline constexpr int32_t kMaxSplitRows = 1024;
// One less than a merge has sources: one source may be the result that is already there.
inline constexpr int32_t kMaxSplits = 15;

struct PrefillPlan {
  std::vector<PrefillItem> items;
  std::vector<PrefillGather> gathers;
  std::vector<RowKeys> keys;  // [rows]
  std::vector<PrefillPass> passes;
};

// Both fill *plan, whose vectors keep their capacity. `keys` holds one range for each row of the
// entries: of slots (context), or of places in the sequence (new tokens, within [0, token_count)).
// All ends are below 2^31.
void PlanPrefillContext(const PrefillPlanShape& shape, std::span<const PrefillEntry> entries,
                        std::span<const KeyRange> keys, PrefillPlan* plan);
void PlanPrefillNewTokens(const PrefillPlanShape& shape, std::span<const PrefillEntry> entries,
                          std::span<const KeyRange> keys, PrefillPlan* plan);

}  // namespace tributary::cuda
