#include "kernels/cuda/prefill/prefill_plan.h"

#include <algorithm>
#include <queue>
#include <tuple>
#include <utility>

namespace tributary::cuda {
namespace {

// What an item costs besides its KV tiles, in KV tiles: it loads queries, fills the pipeline and
// writes its result.
constexpr int64_t kItemOverhead = 1;

int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

RowKeys ToRowKeys(KeyRange range) {
  if (Empty(range)) return {0, 0};
  return {static_cast<int32_t>(range.lo), static_cast<int32_t>(range.hi)};
}

RowKeys Clip(RowKeys keys, RowKeys to) {
  const RowKeys clipped{std::max(keys.begin, to.begin), std::min(keys.end, to.end)};
  return clipped.begin < clipped.end ? clipped : RowKeys{0, 0};
}

bool IsEmpty(RowKeys keys) { return keys.end <= keys.begin; }

// The smallest range that holds every key that some row sees.
RowKeys UnionOf(std::span<const RowKeys> rows) {
  RowKeys any{INT32_MAX, 0};
  for (const RowKeys& row : rows) {
    if (!IsEmpty(row)) any = {std::min(any.begin, row.begin), std::max(any.end, row.end)};
  }
  return any.end == 0 ? RowKeys{0, 0} : any;
}

// The keys that every row sees.
RowKeys IntersectionOf(std::span<const RowKeys> rows) {
  RowKeys all{0, INT32_MAX};
  for (const RowKeys& row : rows) {
    all = {std::max(all.begin, row.begin), std::min(all.end, row.end)};
  }
  return all.begin < all.end ? all : RowKeys{0, 0};
}

// Where the dense K and V of an entry lie, and which of its keys they hold.
struct Segment {
  RowKeys keys;         // begins at a multiple of kGatherSlots
  int32_t key_row = 0;  // as in PrefillItem
  int32_t key_limit = 0;
};

class Planner {
 public:
  Planner(const PrefillPlanShape& shape, std::span<const KeyRange> keys, PrefillPlan* plan)
      : shape_(shape), plan_(*plan) {
    plan_.items.clear();
    plan_.gathers.clear();
    plan_.keys.clear();
    plan_.passes.clear();
    for (const KeyRange& range : keys) plan_.keys.push_back(ToRowKeys(range));
  }

  void BeginPass() {
    PrefillPass& pass = plan_.passes.emplace_back();
    pass.gather_begin = static_cast<int32_t>(plan_.gathers.size());
    pass.item_begin = static_cast<int32_t>(plan_.items.size());
  }

  // Adds the items of all rows of the entry over the segment. The items of an entry's first segment
  // also write the rows without keys.
  void AddSegment(const PrefillEntry& entry, const Segment& segment, bool first) {
    for (int32_t begin = 0; begin < entry.row_count; begin += shape_.rows_per_tile) {
      const int32_t count = std::min(shape_.rows_per_tile, entry.row_count - begin);
      const auto rows = std::span(plan_.keys).subspan(entry.row_begin + begin, count);
      const RowKeys any = Clip(UnionOf(rows), segment.keys);
      PrefillItem item;
      item.accumulate = shape_.accumulate || !first;
      if (IsEmpty(any) && item.accumulate) continue;
      const RowKeys all = IntersectionOf(rows);
      item.row_begin = entry.row_begin + begin;
      item.row_count = count;
      item.key_row = segment.key_row;
      item.key_begin = any.begin / shape_.keys_per_tile * shape_.keys_per_tile;
      item.key_end = any.end;
      item.dense_begin = all.begin;
      item.dense_end = all.end;
      item.key_limit = segment.key_limit;
      for (int32_t i = 0; i < shape_.head_count; ++i) {
        item.head = shape_.head_begin + i;
        plan_.items.push_back(item);
      }
    }
  }

  void AddGathers(const PrefillEntry& entry, RowKeys slots, RowKeys alive) {
    for (int32_t slot = slots.begin; slot < slots.end; slot += kGatherSlots) {
      plan_.gathers.push_back({entry.page_table, slot, alive.begin, alive.end});
    }
  }

  void EndPass() {
    PrefillPass& pass = plan_.passes.back();
    pass.gather_count = static_cast<int32_t>(plan_.gathers.size()) - pass.gather_begin;
    pass.item_count = static_cast<int32_t>(plan_.items.size()) - pass.item_begin;
    if (pass.item_count == 0) {
      plan_.gathers.resize(pass.gather_begin);
      plan_.passes.pop_back();
      return;
    }
    DealItems(pass);
  }

  // Splits the items of a context that takes one pass over their keys, when they would leave much
  // of the grid idle and cover consecutive rows.
  void SplitIfFew(std::span<const PrefillEntry> entries) {
    if (plan_.passes.size() != 1) return;
    PrefillPass& pass = plan_.passes[0];
    int64_t items = 0;
    int32_t rows = 0;
    for (const PrefillEntry& entry : entries) {
      if (entry.row_begin != entries[0].row_begin + rows) return;
      rows += entry.row_count;
      items += CeilDiv(entry.row_count, int64_t{shape_.rows_per_tile}) * shape_.head_count;
    }
    if (items != pass.item_count) return;
    const int32_t splits =
        std::min({shape_.blocks / pass.item_count, kMaxSplitRows / rows, kMaxSplits});
    if (splits < 2) return;
    pass.splits = splits;
    pass.row_begin = entries[0].row_begin;
    pass.row_count = rows;
    pass.accumulate = shape_.accumulate;
    const std::vector<PrefillItem> whole = std::exchange(plan_.items, {});
    for (const PrefillItem& item : whole) AddSplits(item, splits);
    pass.item_count = static_cast<int32_t>(plan_.items.size());
    DealItems(pass);
  }

  std::span<const RowKeys> RowsOf(const PrefillEntry& entry) const {
    return std::span(plan_.keys).subspan(entry.row_begin, entry.row_count);
  }

 private:
  int64_t TilesOf(const PrefillItem& item) const {
    return CeilDiv(std::max(0, item.key_end - item.key_begin), int64_t{shape_.keys_per_tile});
  }
  int64_t CostOf(const PrefillItem& item) const { return kItemOverhead + TilesOf(item); }

  void AddSplits(const PrefillItem& whole, int32_t splits) {
    const int64_t tiles = TilesOf(whole);
    const auto begin_of = [&](int64_t split) {
      return static_cast<int32_t>(whole.key_begin + tiles * split / splits * shape_.keys_per_tile);
    };
    for (int32_t i = 0; i < splits; ++i) {
      PrefillItem& item = plan_.items.emplace_back(whole);
      item.accumulate = 0;
      item.next = -1;
      item.split = i;
      item.key_begin = begin_of(i);
      item.key_end = std::min(whole.key_end, begin_of(i + 1));
    }
  }

  // Sorts the pass's items heaviest first and chains each behind the items of the thread block with
  // the least to do. The first item of thread block b is the pass's b-th.
  void DealItems(PrefillPass& pass) {
    const auto items = std::span(plan_.items).subspan(pass.item_begin, pass.item_count);
    std::stable_sort(items.begin(), items.end(), [&](const PrefillItem& a, const PrefillItem& b) {
      const int64_t cost_a = CostOf(a);
      const int64_t cost_b = CostOf(b);
      if (cost_a != cost_b) return cost_a > cost_b;
      return a.head / shape_.gqa_ratio < b.head / shape_.gqa_ratio;
    });
    pass.blocks = std::min(shape_.blocks, pass.item_count);
    using Load = std::pair<int64_t, int32_t>;  // cost so far, thread block
    std::priority_queue<Load, std::vector<Load>, std::greater<Load>> blocks;
    last_of_block_.resize(pass.blocks);
    for (int32_t i = 0; i < pass.item_count; ++i) {
      int32_t block = i;
      int64_t load = 0;
      if (i >= pass.blocks) {
        std::tie(load, block) = blocks.top();
        blocks.pop();
        items[last_of_block_[block]].next = pass.item_begin + i;
      }
      last_of_block_[block] = i;
      blocks.push({load + CostOf(items[i]), block});
    }
  }

  const PrefillPlanShape& shape_;
  PrefillPlan& plan_;
  std::vector<int32_t> last_of_block_;
};

// How many gathers of an entry come next, of those from `next` to `end`: 0 where they are to begin
// with an empty workspace. `room` and `capacity`: what is left of the workspace, and all of it.
int32_t NextGathers(const PrefillPlanShape& shape, int32_t next, int32_t end, int32_t room,
                    int32_t capacity) {
  if (!shape.batch_invariant) return std::min(end - next, room);
  constexpr int32_t kOfPart = kInvariantSlots / kGatherSlots;
  const int32_t part = std::min(end, (next / kOfPart + 1) * kOfPart) - next;
  if (part > room && room < capacity) return 0;
  return std::min(part, room);
}

}  // namespace

void PlanPrefillContext(const PrefillPlanShape& shape, std::span<const PrefillEntry> entries,
                        std::span<const KeyRange> keys, PrefillPlan* plan) {
  Planner planner(shape, keys, plan);
  // A workspace that takes no gather at all takes none of the passes either: LaunchPrefill says so.
  const auto capacity = std::max(
      1, static_cast<int32_t>(std::min<int64_t>(shape.workspace_slots, INT32_MAX) / kGatherSlots));
  int32_t used = 0;  // gathers of the current pass
  planner.BeginPass();
  for (const PrefillEntry& entry : entries) {
    const RowKeys any = UnionOf(planner.RowsOf(entry));
    const int32_t end = static_cast<int32_t>(CeilDiv(any.end, kGatherSlots));
    int32_t next = any.begin / kGatherSlots;
    bool first = true;
    do {
      int32_t take = NextGathers(shape, next, end, capacity - used, capacity);
      if (take == 0 && next < end) {
        planner.EndPass();
        planner.BeginPass();
        used = 0;
        take = NextGathers(shape, next, end, capacity, capacity);
      }
      const RowKeys slots{next * kGatherSlots, (next + take) * kGatherSlots};
      planner.AddGathers(entry, slots, any);
      planner.AddSegment(entry, {slots, used * kGatherSlots - slots.begin, slots.end}, first);
      first = false;
      next += take;
      used += take;
    } while (next < end);
  }
  planner.EndPass();
  if (!shape.batch_invariant) planner.SplitIfFew(entries);
}

void PlanPrefillNewTokens(const PrefillPlanShape& shape, std::span<const PrefillEntry> entries,
                          std::span<const KeyRange> keys, PrefillPlan* plan) {
  Planner planner(shape, keys, plan);
  planner.BeginPass();
  for (const PrefillEntry& entry : entries) {
    planner.AddSegment(entry, {{0, entry.token_count}, entry.token_begin, entry.token_count}, true);
  }
  planner.EndPass();
}

}  // namespace tributary::cuda
