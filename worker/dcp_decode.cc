#include "worker/dcp_decode.h"

#include "base/status/status_macros.h"

namespace tributary::worker {

absl::Status DcpDecodeWrapper::Run(const PlannedStep& step) {
  TRIBUTARY_RETURN_IF_ERROR(operations_.AppendOrCompare());
  for (const RowPass& pass : step.plan.passes) {
    const StepOperations::Partial partial = operations_.ReservePass(pass);
    TRIBUTARY_RETURN_IF_ERROR(operations_.AttendContext(pass, partial));
    TRIBUTARY_RETURN_IF_ERROR(operations_.MergeToRoot(pass, partial));
  }
  return absl::OkStatus();
}

}  // namespace tributary::worker
