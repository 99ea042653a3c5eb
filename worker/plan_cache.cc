#include "worker/plan_cache.h"

#include <algorithm>

namespace tributary::worker {

bool PlanCache::Matches(const Slot& slot, const PlanShape& shape,
                        std::span<const StepEntry> entries, TableOfEntry tables) {
  if (slot.entries.size() != entries.size() || slot.kind != shape.kind || slot.mask != shape.mask ||
      slot.ward != shape.ward) {
    return false;
  }
  // One branch per entry: this is the cost of every layer but a step's first. (Twice unrolled it is
  // a tenth less; four times, a batch of one pays for it.)
#pragma GCC unroll 2
  for (size_t i = 0; i < entries.size(); ++i) {
    const EntryKey key = KeyOf(entries[i], *tables[i]);
    const EntryKey& known = slot.entries[i];
    const uint64_t differs = (key.sequence ^ known.sequence) |
                             (key.first_position ^ known.first_position) |
                             (key.counts ^ known.counts) | (key.first_row ^ known.first_row) |
                             (key.table_version ^ known.table_version);
    if (differs != 0) return false;
  }
  return true;
}

const StepPlan& PlanCache::Get(const PlanShape& shape, const DcpLayout& layout,
                               std::span<const StepEntry> entries, TableOfEntry tables) {
  ++clock_;
  for (Slot& slot : slots_) {
    if (Matches(slot, shape, entries, tables)) {
      ++reused_;
      slot.used = clock_;
      return slot.plan;
    }
  }
  if (slots_.size() < kPlans) slots_.emplace_back();
  Slot& slot = *std::min_element(slots_.begin(), slots_.end(),
                                 [](const Slot& a, const Slot& b) { return a.used < b.used; });
  // Without entries until the plan is made: should memory run out half way, the slot matches
  // nothing.
  slot.entries.clear();
  PlanStep(shape, layout, entries, tables, &slot.plan);
  slot.kind = shape.kind;
  slot.mask = shape.mask;
  slot.ward = shape.ward;
  slot.entries.reserve(entries.size());
  for (size_t i = 0; i < entries.size(); ++i) {
    slot.entries.push_back(KeyOf(entries[i], *tables[i]));
  }
  slot.used = clock_;
  slot.plan.id = static_cast<uint64_t>(++made_);
  return slot.plan;
}

}  // namespace tributary::worker
