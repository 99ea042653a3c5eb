#include "worker/dflash.h"

#include "base/status/status_macros.h"

namespace tributary::worker {

absl::Status DflashWrapper::Run(const PlannedStep& step) {
  const collective::HeadSlice heads = step.own_heads();
  for (const RowPass& pass : step.plan.passes) {
    const StepOperations::Partial partial = operations_.ReservePass(pass);
    TRIBUTARY_RETURN_IF_ERROR(operations_.AttendContext(pass, partial));
    TRIBUTARY_RETURN_IF_ERROR(operations_.AddBlock(pass, heads, partial));
    TRIBUTARY_RETURN_IF_ERROR(operations_.MergeToRoot(pass, partial));
  }
  return absl::OkStatus();
}

}  // namespace tributary::worker
