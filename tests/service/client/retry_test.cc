#include "service/client/retry.h"

#include <string>

#include "base/status/rpc_errors.h"
#include "google/rpc/error_details.pb.h"
#include "google/rpc/status.pb.h"
#include "gtest/gtest.h"
#include "tests/support/rpc_status.h"

namespace tributary::client {
namespace {

using std::chrono::milliseconds;
using test::Rpc;
using test::UnavailableAfter;

TEST(RetryDelay, DoublesUpToTheCapWithJitterBelow) {
  EXPECT_EQ(RetryDelay(1, std::nullopt, 0.0), milliseconds(50));
  EXPECT_EQ(RetryDelay(1, std::nullopt, 0.5), milliseconds(75));
  EXPECT_EQ(RetryDelay(2, std::nullopt, 0.0), milliseconds(100));
  EXPECT_EQ(RetryDelay(3, std::nullopt, 0.0), milliseconds(200));
  EXPECT_EQ(RetryDelay(6, std::nullopt, 0.0), milliseconds(1000));
  EXPECT_EQ(RetryDelay(1'000'000, std::nullopt, 0.0), milliseconds(1000));
  EXPECT_LT(RetryDelay(1'000'000, std::nullopt, 0.999), milliseconds(2000));
}

TEST(Retry, AttemptsAreBoundedOnlyWhereTheHostSaysSo) {
  EXPECT_TRUE(MayAttempt(1, 2));
  EXPECT_FALSE(MayAttempt(2, 2));
  EXPECT_FALSE(MayAttempt(1, 1));
  EXPECT_TRUE(MayAttempt(1'000'000'000, 0));
}

TEST(RetryDelay, NeverComesSoonerThanAsked) {
  EXPECT_EQ(RetryDelay(1, milliseconds(300), 0.0), milliseconds(300));
  EXPECT_EQ(RetryDelay(9, milliseconds(300), 0.0), milliseconds(300));
  EXPECT_EQ(RetryDelay(1, milliseconds(300), 0.5), milliseconds(330));
  EXPECT_EQ(RetryDelay(1, milliseconds(0), 0.9), milliseconds(0));
}

TEST(Retry, OnlyUnavailableAndAbortedAreTransient) {
  for (int code = 0; code <= 16; ++code) {
    const absl::Status status = FromRpcStatus(Rpc(code, "x"));
    EXPECT_EQ(IsTransient(status), code == 14 || code == 10) << code;
  }
}

TEST(Retry, UnavailableWithADelayIsAnAnswerOfTheService) {
  EXPECT_TRUE(IsOutcomeUnknown(absl::UnavailableError("connection reset")));
  EXPECT_FALSE(IsOutcomeUnknown(UnavailableAfter(0, 1)));
  EXPECT_TRUE(IsOutcomeUnknown(absl::DeadlineExceededError("")));
  EXPECT_FALSE(IsOutcomeUnknown(absl::AbortedError("")));
  EXPECT_FALSE(IsOutcomeUnknown(absl::OkStatus()));
  EXPECT_FALSE(IsOutcomeUnknown(absl::InvalidArgumentError("")));
}

TEST(Retry, ForgottenRegionIsToldByItsField) {
  EXPECT_FALSE(IsForgottenRegion(absl::NotFoundError("cache")));
  google::rpc::Status status = Rpc(5, "no region");
  google::rpc::BadRequest bad;
  bad.add_field_violations()->set_field("q.shared_memory.region");
  status.add_details()->PackFrom(bad);
  EXPECT_TRUE(IsForgottenRegion(FromRpcStatus(status)));
}

}  // namespace
}  // namespace tributary::client
