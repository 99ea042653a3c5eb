#include "worker/errors.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "worker/status_conversion.h"

namespace tributary::worker {
namespace {

TEST(Errors, CarryTheField) {
  const absl::Status status = InvalidField("spec.q_heads", "is 3");
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(status.message(), "spec.q_heads: is 3");
  EXPECT_EQ(FieldOf(status), "spec.q_heads");
}

TEST(Errors, OthersNameNone) {
  EXPECT_EQ(FieldOf(absl::OkStatus()), "");
  EXPECT_EQ(FieldOf(absl::NotFoundError("cache")), "");
}

TEST(Errors, APrefixGoesBeforeTheField) {
  const absl::Status status =
      PrefixField("spec", FieldError(absl::StatusCode::kOutOfRange, "layers", "is 0"));
  EXPECT_EQ(status.code(), absl::StatusCode::kOutOfRange);
  EXPECT_EQ(status.message(), "spec.layers: is 0");
  EXPECT_EQ(FieldOf(status), "spec.layers");
  const absl::Status plain = absl::NotFoundError("cache");
  EXPECT_EQ(PrefixField("spec", plain), plain);
  EXPECT_TRUE(PrefixField("spec", absl::OkStatus()).ok());
}

TEST(Errors, LowerFloorsMapOneToOne) {
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

TEST(Errors, ABrokenCollectiveIsAbortedOrLate) {
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
