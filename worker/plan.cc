#include "worker/plan.h"

#include <algorithm>

#include "worker/shared_prefixes.h"
#include "worker/token_slots.h"

namespace tributary::worker {
namespace {

class Planner {
 public:
  Planner(const PlanShape& shape, const DcpLayout& layout, StepPlan* plan)
      : shape_(shape),
        layout_(layout),
        ward_{shape.ward, layout.size, layout.interleave},
        plan_(*plan) {}

  void Plan(std::span<const StepEntry> entries, TableOfEntry tables) {
    Clear(entries);
    may_share_ = entries.size() > 1;
    for (size_t i = 0; i < entries.size(); ++i) {
      entries_left_ = entries.size() - i;
      if (keeps_tokens()) AddTokens(entries[i], static_cast<int32_t>(i), *tables[i]);
      AddRows(entries[i], *tables[i]);
      plan_.new_tokens += entries[i].new_tokens;
      plan_.query_rows += entries[i].query_rows;
    }
    ShareLastPass();
  }

 private:
  void Clear(std::span<const StepEntry> entries) {
    plan_.query_rows = 0;
    plan_.new_tokens = 0;
    plan_.write_slots.clear();
    plan_.compare_slots.clear();
    plan_.entry_of_token.clear();
    plan_.kept_slots.clear();
    plan_.keeps_any = false;
    if (!plan_.passes.empty()) spare_.swap(plan_.passes.front().entries);
    spare_.clear();
    plan_.passes.clear();
    plan_.context_keys.clear();
    plan_.runs.clear();
    plan_.new_keys.clear();
    plan_.table_lookups = 0;
    for (const StepEntry& entry : entries) {
      if (keeps_tokens() && entry.new_tokens > 0) {
        (entry.replay ? any_replay_ : any_write_) = true;
      }
    }
  }

  void AddTokens(const StepEntry& entry, int32_t index, const PageTable& table) {
    for (int32_t i = 0; i < entry.new_tokens; ++i) {
      const int64_t slot = Keeps(entry, i) ? SlotOf(entry.first_position + i, table) : kPadSlot;
      if (any_write_) plan_.write_slots.push_back(entry.replay ? kPadSlot : slot);
      if (any_replay_) {
        plan_.compare_slots.push_back(entry.replay ? slot : kPadSlot);
        plan_.entry_of_token.push_back(index);
      }
    }
    if (shape_.ward >= 0 && any_write_) AddKept(entry, table);
  }

  void AddKept(const StepEntry& entry, const PageTable& table) {
    for (int32_t i = 0; i < entry.new_tokens; ++i) {
      int64_t slot = kPadSlot;
      if (!entry.replay && Keeps(entry, i)) {
        slot = SlotOfToken(ward_, shape_.page_size, entry.first_position + i, table);
      }
      plan_.keeps_any |= slot != kPadSlot;
      plan_.kept_slots.push_back(slot);
    }
  }

  // Where the shard keeps token t; kPadSlot when it is another rank's.
  int64_t SlotOf(int64_t t, const PageTable& table) {
    const int64_t slot = SlotOfToken(layout_, shape_.page_size, t, table);
    if (slot != kPadSlot) ++plan_.table_lookups;
    return slot;
  }

  bool keeps_tokens() const { return shape_.kind != StepKind::kDflash; }
  // Whether this step writes or compares token i of an entry. Of several steps of its rows each
  // does so with those at the positions of its own, so that none takes much longer than the others.
  static bool Keeps(const StepEntry& entry, int32_t i) {
    return i >= entry.first_row && i < entry.first_row + entry.kept_tokens();
  }

  // Whether any row may see the tokens of its entry as they came, beside the cache.
  bool any_in_two_parts() const {
    return shape_.kind == StepKind::kPrefill || shape_.kind == StepKind::kDflash;
  }

  // Whether those of an entry do. Of a draft nothing is in the cache.
  bool InTwoParts(const StepEntry& entry) const {
    if (shape_.kind == StepKind::kDflash) return entry.new_tokens > 0 && entry.query_rows > 0;
    return shape_.kind == StepKind::kPrefill &&
           SeesTokensAsTheyCame(entry.query_rows, entry.new_tokens, shape_.max_decode_rows);
  }

  void AddRows(const StepEntry& entry, const PageTable& table) {
    const bool new_part = InTwoParts(entry);
    int32_t row = 0;
    while (row < entry.query_rows) {
      RowPass& pass = PassWithRoom(entry.query_rows > kMaxDecodeRows, new_part);
      const int32_t count = std::min(entry.query_rows - row, shape_.rows_per_pass - pass.row_count);
      AddContextRows(entry, table, row, count, new_part, &pass);
      row += count;
    }
    if (!any_in_two_parts()) return;
    for (int32_t i = 0; i < entry.query_rows; ++i) {
      plan_.new_keys.push_back(new_part ? Visible(entry, i).block : KeyRange{});
    }
    if (new_part) AddToRun(entry);
  }

  // What a row sees, cut where the tokens of its call begin.
  SplitRange Visible(const StepEntry& entry, int32_t row) const {
    return SplitAt(VisibleKeys(shape_.mask, entry.first_row_position(), entry.query_rows, row),
                   entry.first_position);
  }

  // Rows [row, row + count) of the entry. Rows with a part of their own among the new tokens see
  // only what was in the cache before the call; every other row finds all it sees there.
  void AddContextRows(const StepEntry& entry, const PageTable& table, int32_t row, int32_t count,
                      bool new_part, RowPass* pass) {
    int64_t last_key = 0;
    for (int32_t i = row; i < row + count; ++i) {
      const KeyRange global =
          new_part ? Visible(entry, i).context
                   : VisibleKeys(shape_.mask, entry.first_position, entry.query_rows, i);
      const KeyRange local = LocalRange(layout_, global);
      plan_.context_keys.push_back(local);
      pass->any_context |= !Empty(global);
      if (!Empty(local)) last_key = std::max(last_key, local.hi);
    }
    // Handing on no more of the table than the rows may see: what lies beyond is not ours to read.
    const size_t pages = static_cast<size_t>((last_key + shape_.page_size - 1) / shape_.page_size);
    pass->entries.push_back({pass->row_count, count, table.pages().first(pages)});
    if (may_share_) AddUser(table, last_key, *pass);
    pass->row_count += count;
  }

  // The last entry of a pass, where its table shares pages: most tables do not, and say so.
  void AddUser(const PageTable& table, int64_t last_key, const RowPass& pass) {
    const std::span<PagePrefix* const> shared = table.shared_prefixes();
    if (shared.empty()) return;
    users_.push_back({static_cast<int32_t>(pass.entries.size()) - 1, shared, {0, last_key}});
  }

  RowPass& PassWithRoom(bool many_rows, bool in_two_parts) {
    int32_t begin = 0;
    if (!plan_.passes.empty()) {
      RowPass& last = plan_.passes.back();
      if (last.row_count < shape_.rows_per_pass && last.many_rows == many_rows &&
          last.in_two_parts == in_two_parts) {
        return last;
      }
      begin = last.row_begin + last.row_count;
    }
    ShareLastPass();
    plan_.passes.push_back(
        {.row_begin = begin, .many_rows = many_rows, .in_two_parts = in_two_parts});
    RowPass& pass = plan_.passes.back();
    pass.entries.swap(spare_);  // the memory of the plan that was here before
    pass.entries.reserve(
        std::min<size_t>(entries_left_, static_cast<size_t>(shape_.rows_per_pass)));
    return pass;
  }

  // The last pass has all its entries.
  void ShareLastPass() {
    if (users_.size() > 1) plan_.passes.back().shared = FindSharedPages(users_);
    users_.clear();
  }

  void AddToRun(const StepEntry& entry) {
    // Rows without some of those before them, or after them, are not numbered as the tokens are.
    const int32_t more_tokens = entry.new_tokens - entry.query_rows;
    const bool follows =
        more_tokens == 0 && !plan_.runs.empty() &&
        plan_.runs.back().row_begin + plan_.runs.back().count == plan_.query_rows &&
        plan_.runs.back().token_begin + plan_.runs.back().count == plan_.new_tokens;
    if (!follows) {
      plan_.runs.push_back({.row_begin = plan_.query_rows, .token_begin = plan_.new_tokens});
    }
    NewTokensRun& run = plan_.runs.back();
    run.entries.push_back({run.count, entry.query_rows, more_tokens});
    run.count += entry.query_rows;
  }

  const PlanShape& shape_;
  const DcpLayout& layout_;
  const DcpLayout ward_;
  StepPlan& plan_;
  std::vector<PrefixUser> users_;  // entries of the last pass whose tables share pages
  decltype(RowPass::entries) spare_;
  size_t entries_left_ = 0;  // that have not been added, this one included
  bool may_share_ = false;   // an entry alone shares with nobody
  bool any_write_ = false;
  bool any_replay_ = false;
};

}  // namespace

RowMask MaskOf(const LayerSpec& layer, StepKind kind) {
  switch (kind) {
    case StepKind::kAppend:
      return {};
    case StepKind::kDecode:
    case StepKind::kPrefill:
      return {.window = {layer.window.left, -1}};
    case StepKind::kDflash:
      return {.window = layer.window, .base = layer.window_base, .causal = layer.causal_block};
  }
  return {};
}

void PlanStep(const PlanShape& shape, const DcpLayout& layout, std::span<const StepEntry> entries,
              TableOfEntry tables, StepPlan* plan) {
  Planner(shape, layout, plan).Plan(entries, tables);
}

int32_t RowsPerPass(const CacheSpec& spec) {
  constexpr int64_t kPassBytes = int64_t{16} << 20;
  int64_t widest = 1;  // elements of a row's partial
  for (const LayerSpec& layer : spec.layers) {
    const LayerGeometry g = GeometryOf(spec, layer);
    widest = std::max(widest, int64_t{g.q_heads} * g.kv.value_dim);
  }
  const int64_t row_bytes = widest * static_cast<int64_t>(sizeof(float));
  return static_cast<int32_t>(std::clamp<int64_t>(kPassBytes / row_bytes, 1, 1 << 20));
}

}  // namespace tributary::worker
