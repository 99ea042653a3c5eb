// From a checked step of one layer to what a shard is given.
#pragma once

#include <cstdint>
#include <vector>

#include "collective/communicator.h"
#include "worker/backend.h"
#include "worker/cache_shard.h"
#include "worker/command.h"
#include "worker/page_tables.h"
#include "worker/plan.h"

namespace tributary::worker {

// Each rank has one. Not thread safe.
class StepPlanner {
 public:
  // `rows_per_pass`: of every cache; 0: what each cache's own geometry asks for.
  explicit StepPlanner(int32_t rows_per_pass) : rows_per_pass_(rows_per_pass) {}

  // The step's plan: found in the cache's plans, or made. Valid as long as PlanCache says.
  const StepPlan& Plan(CacheShard& cache, const StepCommand& step);

 private:
  const int32_t rows_per_pass_;
  std::vector<const PageTable*> tables_;
};

// `cache`, `step`, `plan` and `comm` stay while the result is in use; its tensors are copied.
PlannedStep Planned(const CacheShard& cache, const StepCommand& step, const StepPlan& plan,
                    collective::Communicator& comm, collective::Deadline deadline);

}  // namespace tributary::worker
