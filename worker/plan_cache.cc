#include "worker/plan_cache.h"

#include <algorithm>

namespace tributary::worker {
namespace {

bool Same(const StepEntry& a, const StepEntry& b) {
  return a.sequence == b.sequence && a.first_position == b.first_position &&
         a.query_rows == b.query_rows && a.new_tokens == b.new_tokens && a.replay == b.replay;
}

}  // namespace

bool PlanCache::Matches(const Slot& slot, const PlanShape& shape,
                        std::span<const StepEntry> entries, TableOfEntry tables) {
  return slot.kind == shape.kind && slot.mask == shape.mask &&
         std::equal(entries.begin(), entries.end(), slot.entries.begin(), slot.entries.end(),
                    Same) &&
         std::equal(tables.begin(), tables.end(), slot.versions.begin(), slot.versions.end(),
                    [](const PageTable* t, uint64_t version) { return t->version() == version; });
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
  slot.versions.clear();
  PlanStep(shape, layout, entries, tables, &slot.plan);
  slot.kind = shape.kind;
  slot.mask = shape.mask;
  for (const PageTable* table : tables) slot.versions.push_back(table->version());
  slot.entries.assign(entries.begin(), entries.end());
  slot.used = clock_;
  slot.plan.id = static_cast<uint64_t>(++made_);
  return slot.plan;
}

}  // namespace tributary::worker
