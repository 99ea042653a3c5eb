#include "worker/dcp_prefill.h"

#include "base/status/status_macros.h"

namespace tributary::worker {

absl::Status DcpPrefillWrapper::Run(const PlannedStep& step) {
  TRIBUTARY_RETURN_IF_ERROR(operations_.AppendOrCompare());
  const collective::HeadSlice heads = step.own_heads();
  const StepOperations::Partial slice = operations_.ReserveSlice(heads);
  TRIBUTARY_RETURN_IF_ERROR(operations_.AttendNewTokens(heads, slice));
  for (const RowPass& pass : step.plan.passes) {
    if (!pass.in_two_parts) {  // as in a decode
      const StepOperations::Partial partial = operations_.ReservePass(pass);
      TRIBUTARY_RETURN_IF_ERROR(operations_.AttendContext(pass, partial));
      TRIBUTARY_RETURN_IF_ERROR(operations_.MergeToRoot(pass, partial));
      continue;
    }
    StepOperations::Partial context;
    if (pass.any_context) {  // on every rank alike
      const StepOperations::Partial partial = operations_.ReservePass(pass);
      TRIBUTARY_RETURN_IF_ERROR(operations_.AttendContext(pass, partial));
      TRIBUTARY_ASSIGN_OR_RETURN(context, operations_.MergeToSlices(pass, partial));
    }
    TRIBUTARY_RETURN_IF_ERROR(operations_.AddToSlice(pass, heads, context, slice));
    TRIBUTARY_RETURN_IF_ERROR(operations_.GatherToRoot(pass, heads, slice));
  }
  return absl::OkStatus();
}

}  // namespace tributary::worker
