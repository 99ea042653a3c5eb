#include "worker/status_conversion.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/status/errors.h"

namespace tributary::worker {
namespace {

TEST(StatusConversion, LowerFloorsMapOneToOne) {
  EXPECT_TRUE(ToAbsl(Status::Ok()).ok());
  const std::pair<StatusCode, absl::StatusCode> codes[] = {
      {StatusCode::kInvalidArgument, absl::StatusCode::kInvalidArgument},
      {StatusCode::kFailedPrecondition, absl::StatusCode::kFailedPrecondition},
      {StatusCode::kDeadlineExceeded, absl::StatusCode::kDeadlineExceeded},
      {StatusCode::kAborted, absl::StatusCode::kAborted},
      {StatusCode::kUnavailable, absl::StatusCode::kUnavailable},
      {StatusCode::kInternal, absl::StatusCode::kInternal}};
  for (const auto& [from, to] : codes) {
    EXPECT_EQ(ToAbsl(Status(from, "why")), absl::Status(to, "why"));
  }
}

TEST(StatusConversion, ABrokenCollectiveIsAbortedOrLate) {
  EXPECT_TRUE(CollectiveStatus(Status::Ok()).ok());
  EXPECT_EQ(CollectiveStatus({StatusCode::kDeadlineExceeded, ""}).code(),
            absl::StatusCode::kDeadlineExceeded);
  for (const StatusCode code :
       {StatusCode::kAborted, StatusCode::kUnavailable, StatusCode::kInternal}) {
    EXPECT_EQ(CollectiveStatus({code, ""}).code(), absl::StatusCode::kAborted);
  }
}

}  // namespace
}  // namespace tributary::worker
