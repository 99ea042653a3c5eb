#include "service/workers/worker_group.h"

#include "absl/strings/str_cat.h"
#include "base/status/errors.h"

namespace tributary::service {

bool BreaksGroup(const absl::Status& reply) {
  switch (reply.code()) {
    case absl::StatusCode::kOk:
    case absl::StatusCode::kInvalidArgument:
    case absl::StatusCode::kNotFound:
    case absl::StatusCode::kAlreadyExists:
    case absl::StatusCode::kFailedPrecondition:
    case absl::StatusCode::kResourceExhausted:
    case absl::StatusCode::kUnimplemented:
      return false;
    default:
      return true;
  }
}

absl::Status NoRegions(absl::string_view why) {
  return FieldError(absl::StatusCode::kFailedPrecondition, "cuda_ipc",
                    absl::StrCat("memory of GPUs cannot be registered here: ", why));
}

absl::Status NoDeviceSessions(absl::string_view why) {
  return FieldError(absl::StatusCode::kFailedPrecondition, "open.memory",
                    absl::StrCat("there are no mailboxes on GPUs here: ", why));
}

absl::Status WorkerGroup::CheckResize() const {
  return FieldError(
      absl::StatusCode::kFailedPrecondition, "workers",
      "the workers are threads of the coordinator: their number changes when it is started anew");
}

}  // namespace tributary::service
