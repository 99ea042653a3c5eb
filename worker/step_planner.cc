#include "worker/step_planner.h"

#include <algorithm>

namespace tributary::worker {

const StepPlan& StepPlanner::Plan(CacheShard& cache, const StepCommand& step) {
  tables_.clear();
  for (const StepEntry& entry : step.entries) {
    // A draft without context may be of a sequence that nothing was ever written to.
    static const PageTable kNoPages;
    const PageTable* table = cache.tables.Find(entry.sequence);
    tables_.push_back(table == nullptr ? &kNoPages : table);
  }
  const LayerSpec& layer = cache.spec.layers[static_cast<size_t>(step.layer)];
  const PlanShape shape{.kind = step.kind,
                        .mask = MaskOf(layer, step.kind),
                        .page_size = cache.spec.page_size,
                        .rows_per_pass = rows_per_pass_ > 0 ? rows_per_pass_ : cache.rows_per_pass,
                        .ward = cache.replicas.ward()};
  return cache.plans.Get(shape, cache.layout, step.entries, tables_);
}

PlannedStep Planned(const CacheShard& cache, const StepCommand& step, const StepPlan& plan,
                    collective::Communicator& comm, collective::Deadline deadline) {
  int64_t reach = 0;
  for (const StepEntry& entry : step.entries) {
    reach += entry.first_position + std::max(entry.query_rows, entry.new_tokens);
  }
  return {.kind = step.kind,
          .layer_index = step.layer,
          .spec = cache.spec,
          .q = step.q,
          .k = step.k,
          .v = step.v,
          .plan = plan,
          .comm = comm,
          .deadline = deadline,
          .entries = static_cast<int32_t>(step.entries.size()),
          .reach = reach,
          .bf16_partials = step.bf16_partials,
          .replica = plan.kept_slots.empty() ? nullptr : cache.replicas.kept()};
}

}  // namespace tributary::worker
