#include "worker/status_conversion.h"

#include "absl/strings/str_cat.h"

namespace tributary::worker {
namespace {

absl::StatusCode ToAbsl(StatusCode code) {
  switch (code) {
    case StatusCode::kOk:
      return absl::StatusCode::kOk;
    case StatusCode::kInvalidArgument:
      return absl::StatusCode::kInvalidArgument;
    case StatusCode::kFailedPrecondition:
      return absl::StatusCode::kFailedPrecondition;
    case StatusCode::kDeadlineExceeded:
      return absl::StatusCode::kDeadlineExceeded;
    case StatusCode::kAborted:
      return absl::StatusCode::kAborted;
    case StatusCode::kUnavailable:
      return absl::StatusCode::kUnavailable;
    case StatusCode::kInternal:
      return absl::StatusCode::kInternal;
  }
  return absl::StatusCode::kUnknown;
}

}  // namespace

absl::Status ToAbsl(const tributary::Status& status) {
  return absl::Status(ToAbsl(status.code()), status.message());
}

absl::Status CollectiveStatus(const tributary::Status& status) {
  if (status.ok()) return absl::OkStatus();
  const absl::StatusCode code = status.code() == StatusCode::kDeadlineExceeded
                                    ? absl::StatusCode::kDeadlineExceeded
                                    : absl::StatusCode::kAborted;
  return absl::Status(code, absl::StrCat("collective: ", status.message()));
}

}  // namespace tributary::worker
