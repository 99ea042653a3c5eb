// The plan of a step: where each new token goes and which keys each query row sees, on one rank.
//
// Planning is host arithmetic over positions and page tables: no tensor is looked at, nothing is
// copied from a device, and its cost is the step's rows and tokens, whatever the length of the
// sequences. A plan depends on the layer only through its mask, so the layers of a model share one
// or two plans per step (worker/plan_cache.h).
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kernels/key_range.h"
#include "kernels/params.h"
#include "kernels/row_mask.h"
#include "worker/choose_path.h"
#include "worker/command.h"
#include "worker/page_tables.h"

namespace tributary::worker {

// What a plan is made from; with the entries' tables and the layout, all of it.
struct PlanShape {
  StepKind kind = StepKind::kDecode;
  RowMask mask;
  int32_t page_size = 0;
  // Rows a pass may take, which bounds the memory of partials (RowsPerPass).
  int32_t rows_per_pass = 0;
  // In a kPrefill step: see SeesTokensAsTheyCame.
  int32_t max_decode_rows = kMaxDecodeRows;
  // The rank whose tokens this one keeps as well (worker/replica.h); -1: none.
  int32_t ward = -1;
};

// Query rows that attend over the cache and exchange partials together: consecutive rows of a call,
// all served in one way, so that none depends on what else is in the call.
struct RowPass {
  int32_t row_begin = 0;
  int32_t row_count = 0;
  // Whether its rows are of entries with more than kMaxDecodeRows rows.
  bool many_rows = false;
  // Whether its rows see the tokens of their entries as they came, apart from the cache.
  bool in_two_parts = false;
  // Whether any of its rows sees a key of the cache on any rank. Decided on global positions, so
  // that all ranks skip a pass or none does.
  bool any_context = false;
  std::vector<AttentionEntry> entries;  // rows counted from row_begin
  std::vector<SharedPages> shared;      // of these entries (worker/shared_prefixes.h)
};

// Consecutive entries whose rows see the tokens that they bring as they came: their rows and tokens
// are numbered alike from row_begin and token_begin on.
struct NewTokensRun {
  int32_t row_begin = 0;
  int32_t token_begin = 0;
  int32_t count = 0;
  std::vector<NewTokensEntry> entries;  // rows counted from row_begin
};

struct StepPlan {
  // Of plans made by one PlanCache, never used twice: what a device keeps of a plan stays good
  // while it sees the same id. 0 otherwise.
  uint64_t id = 0;

  int32_t query_rows = 0;
  int32_t new_tokens = 0;

  // [new_tokens]: slots to write, and slots to compare with (replays); kPadSlot where the token is
  // another rank's or of the other kind. Empty when no entry of the step asks for it.
  std::vector<int64_t> write_slots;
  std::vector<int64_t> compare_slots;
  // [new_tokens]: the entry (by index) of a token. Empty without replays.
  std::vector<int32_t> entry_of_token;
  // [new_tokens]: the slots of the ward's pages to write, and whether there is any. Empty without a
  // ward, and when no entry writes anything.
  std::vector<int64_t> kept_slots;
  bool keeps_any = false;

  // Over the cache.
  std::vector<RowPass> passes;
  std::vector<KeyRange> context_keys;  // [query_rows], local slots

  // Prefill and DFlash: new tokens over each other.
  std::vector<NewTokensRun> runs;
  std::vector<KeyRange> new_keys;  // [query_rows], relative to the entry's first new token

  // Entries of page tables looked up to make the plan: grows with the step's tokens only.
  int64_t table_lookups = 0;
};

// The table of an entry's sequence. Covers the keys its rows see in the cache, and the tokens it
// writes (CheckStep).
using TableOfEntry = std::span<const PageTable* const>;  // [entries]

// The mask of a layer in a step of this kind. Steps without rows have the widest, so that all
// layers share a plan.
RowMask MaskOf(const LayerSpec& layer, StepKind kind);

// Makes the plan in `plan`, whose memory is reused. The entries are valid and `tables` holds the
// table of each.
void PlanStep(const PlanShape& shape, const DcpLayout& layout, std::span<const StepEntry> entries,
              TableOfEntry tables, StepPlan* plan);

// Rows whose fp32 partials, all heads of the widest layer, stay near 16 MiB: the exchange holds a
// few times that. It is the same on all ranks and for all layers, so that layers share plans.
int32_t RowsPerPass(const CacheSpec& spec);

}  // namespace tributary::worker
