// The exchange of partials that lie in host memory, over the group's communicator: what the CPU
// backend does, and a GPU's where partials are brought to the host.
#pragma once

#include "absl/status/status.h"
#include "collective/exchange/exchange.h"
#include "worker/step_operations.h"
#include "worker/step_run.h"

namespace tributary::worker {

// Of one step. Time spent here, waiting for peers included, is added to results.times.exchange. An
// error is the communicator's (CollectiveStatus).
class HostExchange {
 public:
  using Partial = StepOperations::Partial;

  // All references outlive the object.
  HostExchange(const PlannedStep& step, collective::Strategy strategy,
               collective::ExchangeWorkspace& workspace, StepResults& results)
      : step_(step), strategy_(strategy), workspace_(workspace), results_(results) {}

  // partial: [rows of the pass, q_heads]. Merged with the sinks into the pass's rows of the step's
  // result on rank 0.
  absl::Status MergeToRoot(const RowPass& pass, Partial partial);
  // partial: [rows of the pass, q_heads]; out: [rows of the pass, heads of the rank], no sinks.
  absl::Status MergeToSlices(const RowPass& pass, Partial partial, Partial out);
  // rows: [rows of the pass, heads of the rank]. Into the step's result on rank 0.
  absl::Status GatherToRoot(const RowPass& pass, Partial rows);
  // The pass's rows of the step's result; null on other ranks than 0. A rank that is alone may have
  // its partial there: MergeToRoot leaves it in its place.
  Partial ResultOf(const RowPass& pass) const;

 private:
  absl::Status Merge(const RowPass& pass, Partial partial, const float* sinks,
                     collective::Placement placement, Partial out);

  const PlannedStep& step_;
  const collective::Strategy strategy_;
  collective::ExchangeWorkspace& workspace_;
  StepResults& results_;
};

}  // namespace tributary::worker
