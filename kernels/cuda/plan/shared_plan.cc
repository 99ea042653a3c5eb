#include "kernels/cuda/plan/shared_plan.h"

#include <algorithm>

namespace tributary::cuda {
namespace {

// What a run's jobs cost in each KV head besides their reads: beginning, ending and merging them,
// as bytes that could have been read meanwhile.
constexpr int64_t kRunBytes = 128 * 1024;
// The same of the launches that sharing adds to a call, for each multiprocessor: 8 us of an H200.
// Forks that read the same pages at about the same time find most of them in L2, so that what is
// saved would be read about twice as fast as memory.
constexpr int64_t kCallBytes = 512 * 1024;

KeyRange Intersection(KeyRange a, KeyRange b) {
  const KeyRange both{std::max(a.lo, b.lo), std::min(a.hi, b.hi)};
  return Empty(both) ? KeyRange{0, 0} : both;
}

KeyRange Hull(KeyRange a, KeyRange b) {
  if (Empty(a)) return b;
  if (Empty(b)) return a;
  return {std::min(a.lo, b.lo), std::max(a.hi, b.hi)};
}

// Adds runs to a plan, in the order in which they come.
class Planner {
 public:
  Planner(const SharingCosts& costs, std::span<const AttentionEntry> entries,
          std::span<const int32_t> page_tables, std::span<const KeyRange> keys, SharedPlan* plan)
      : costs_(costs), entries_(entries), page_tables_(page_tables), keys_(keys), plan_(*plan) {}

  // Returns the bytes that it saves; 0 if it is left.
  int64_t AddRun(const SharedPages& run) {
    KeyRange seen{0, 0};
    int64_t apart = 0;
    int64_t rows = 0;
    for (const int32_t index : run.entries) {
      // What comes before must have been taken, or the rest would be no range.
      if (plan_.taken[static_cast<size_t>(index)] != run.slots.lo) return 0;
      const Seen of_entry = SeenBy(index, run.slots);
      seen = Hull(seen, of_entry.slots);
      apart += Length(of_entry.slots) * ReadsOf(of_entry.rows, costs_);
      rows += of_entry.rows;
    }
    const int64_t tokens = apart - Length(seen) * ReadsOf(rows, costs_);
    const int64_t saved = tokens * costs_.kv_heads * costs_.bytes_per_token;
    if (!RunIsWorthSharing(saved, costs_)) return 0;
    Take(run, static_cast<int32_t>(rows), Length(seen));
    return saved;
  }

  // All runs have been added.
  void Finish() {
    for (size_t i = 0; i < entries_.size(); ++i) {
      const AttentionEntry& entry = entries_[i];
      KeyRange seen{0, 0};
      for (int32_t row = entry.row_begin; row < entry.row_begin + entry.row_count; ++row) {
        KeyRange& rest = plan_.rest[static_cast<size_t>(row)];
        rest = Intersection(keys_[static_cast<size_t>(row)], {plan_.taken[i], INT64_MAX});
        seen = Hull(seen, rest);
      }
      plan_.rest_reads += Length(seen) * ReadsOf(entry.row_count, costs_);
    }
    int32_t begin = 0;
    for (RowParts& row : plan_.parts) {
      row.begin = begin;
      begin += row.count;
      row.count = 0;
    }
    plan_.part_rows.resize(plan_.rows.size());
    for (size_t i = 0; i < plan_.rows.size(); ++i) {
      RowParts& row = plan_.parts[static_cast<size_t>(plan_.rows[i])];
      const int32_t place = row.begin + row.count++;
      plan_.part_rows[static_cast<size_t>(place)] = static_cast<int32_t>(i);
    }
  }

 private:
  // What rows of an entry see of a run.
  struct Seen {
    KeyRange slots;
    int32_t rows = 0;
  };
  Seen SeenBy(int32_t index, KeyRange run) const {
    const AttentionEntry& entry = entries_[static_cast<size_t>(index)];
    Seen seen;
    for (int32_t row = entry.row_begin; row < entry.row_begin + entry.row_count; ++row) {
      const KeyRange slots = Intersection(keys_[static_cast<size_t>(row)], run);
      if (Empty(slots)) continue;
      seen.slots = Hull(seen.slots, slots);
      ++seen.rows;
    }
    return seen;
  }

  void Take(const SharedPages& run, int32_t rows, int64_t slots) {
    PlanEntry& added =
        plan_.entries.emplace_back(PlanEntry{static_cast<int32_t>(plan_.rows.size()), rows, 0});
    size_t most_pages = 0;
    for (const int32_t index : run.entries) {
      const AttentionEntry& entry = entries_[static_cast<size_t>(index)];
      // A list of pages ends where its rows' keys end: the longest has them all.
      if (entry.pages.size() > most_pages) {
        most_pages = entry.pages.size();
        added.page_table = page_tables_[static_cast<size_t>(index)];
      }
      plan_.taken[static_cast<size_t>(index)] = run.slots.hi;
      for (int32_t row = entry.row_begin; row < entry.row_begin + entry.row_count; ++row) {
        const KeyRange seen = Intersection(keys_[static_cast<size_t>(row)], run.slots);
        if (Empty(seen)) continue;
        plan_.keys.push_back(seen);
        plan_.rows.push_back(row);
        ++plan_.parts[static_cast<size_t>(row)].count;
      }
    }
    plan_.most_rows = std::max(plan_.most_rows, rows);
    plan_.total_keys += slots;
    plan_.shared_reads += slots * ReadsOf(rows, costs_);
  }

  const SharingCosts& costs_;
  const std::span<const AttentionEntry> entries_;
  const std::span<const int32_t> page_tables_;
  const std::span<const KeyRange> keys_;
  SharedPlan& plan_;
};

void Clear(SharedPlan* plan) {
  plan->entries.clear();
  plan->keys.clear();
  plan->rows.clear();
  plan->parts.clear();
  plan->part_rows.clear();
  plan->rest.clear();
  plan->most_rows = 0;
  plan->total_keys = 0;
  plan->shared_reads = 0;
  plan->rest_reads = 0;
}

}  // namespace

bool RunIsWorthSharing(int64_t bytes_saved, const SharingCosts& costs) {
  return bytes_saved > kRunBytes * costs.kv_heads;
}

bool CallIsWorthSharing(int64_t bytes_saved, const SharingCosts& costs) {
  return bytes_saved > kCallBytes * costs.multiprocessors;
}

bool SharedPlan::InOrder() const {
  for (size_t i = 1; i < rows.size(); ++i) {
    if (rows[i] != rows[i - 1] + 1) return false;
  }
  return true;
}

void PlanShared(const SharingCosts& costs, std::span<const AttentionEntry> entries,
                std::span<const int32_t> page_tables, std::span<const KeyRange> keys,
                std::span<const SharedPages> shared, SharedPlan* plan) {
  Clear(plan);
  if (shared.empty()) return;
  plan->taken.assign(entries.size(), 0);
  plan->parts.assign(keys.size(), RowParts{});
  plan->rest.assign(keys.size(), KeyRange{});
  Planner planner(costs, entries, page_tables, keys, plan);
  int64_t saved = 0;
  for (const SharedPages& run : shared) saved += planner.AddRun(run);
  if (!CallIsWorthSharing(saved, costs)) return Clear(plan);
  planner.Finish();
}

}  // namespace tributary::cuda
