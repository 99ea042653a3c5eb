// The operations of a step on the CPU.
#pragma once

#include <optional>

#include "worker/host_exchange.h"
#include "worker/step_operations.h"
#include "worker/step_run.h"

namespace tributary::worker {

// Takes what the operations of a step need of the workspace: of the passes' partials and slices,
// not of the exchange, whose pieces are bounded. Throws std::bad_alloc.
void ReserveWorkspace(const PlannedStep& step, StepWorkspace* workspace);

class CpuOperations final : public StepOperations {
 public:
  // All references outlive the operations. `kv` is the step's layer.
  CpuOperations(const PlannedStep& step, const PagedKv& kv, const RankResources& rank,
                StepResults* results);

  Partial ReserveSlice(collective::HeadSlice heads) override;
  Partial ReservePass(const RowPass& pass) override;
  absl::Status AppendOrCompare() override;
  absl::Status AttendContext(const RowPass& pass, Partial out) override;
  absl::Status AttendNewTokens(collective::HeadSlice heads, Partial out) override;
  absl::Status AddBlock(const RowPass& pass, collective::HeadSlice heads, Partial partial) override;
  absl::Status MergeToRoot(const RowPass& pass, Partial partial) override;
  absl::StatusOr<Partial> MergeToSlices(const RowPass& pass, Partial partial) override;
  absl::Status AddToSlice(const RowPass& pass, collective::HeadSlice heads, Partial context,
                          Partial slice) override;
  absl::Status GatherToRoot(const RowPass& pass, collective::HeadSlice heads,
                            Partial slice) override;

 private:
  size_t ValueDim() const { return static_cast<size_t>(operands_.geometry.kv.value_dim); }
  Partial RowsOf(const RowPass& pass, collective::HeadSlice heads, Partial slice) const;

  const PlannedStep& step_;
  const RankResources& rank_;
  const StepOperands operands_;
  StepResults& results_;
  HostExchange exchange_;
  std::optional<Partial> block_;  // of all rows of a draft, once a pass has asked for its own
};

}  // namespace tributary::worker
