#include "worker/dcp_decode.h"
#include "worker/dcp_prefill.h"
#include "worker/dflash.h"
#include "worker/step_operations.h"

namespace tributary::worker {

absl::Status RunStep(const PlannedStep& step, StepOperations& operations) {
  switch (step.kind) {
    case StepKind::kAppend:
      return operations.AppendOrCompare();
    case StepKind::kDecode:
      return DcpDecodeWrapper(operations).Run(step);
    case StepKind::kPrefill:
      return DcpPrefillWrapper(operations).Run(step);
    case StepKind::kDflash:
      return DflashWrapper(operations).Run(step);
  }
  return absl::InternalError("unknown kind of step");
}

}  // namespace tributary::worker
