#include "worker/self_test.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <memory>
#include <numbers>
#include <string>
#include <vector>

#include "kernels/cpu/thread_pool.h"
#include "worker/cpu_backend.h"

namespace tributary::worker {
namespace {

using ::testing::HasSubstr;

TEST(SelfTest, AWorkingDevicePasses) {
  for (const int threads : {1, 3}) {
    const absl::Status status = SelfTest(
        CreateCpuBackend(std::make_shared<cpu::ThreadPool>(threads), collective::Strategy::kAuto));
    EXPECT_TRUE(status.ok()) << status;
  }
}

// The mean of the values that a row sees, and the logarithm of how many those are, plus 1.
Reply GoodReply() {
  Reply reply;
  reply.o.assign(size_t{2} * 4 * 64, 1.0f);
  std::fill(reply.o.begin() + 4 * 64, reply.o.end(), 2.0f);
  reply.lse.assign(8, 1.0f);
  std::fill(reply.lse.begin() + 4, reply.lse.end(), 1.0f + std::numbers::ln2_v<float>);
  return reply;
}

TEST(SelfTest, WrongAnswersAreSeen) {
  ASSERT_TRUE(CheckSelfTestReply(GoodReply()).ok());
  const auto refused = [](const auto& spoil) {
    Reply reply = GoodReply();
    spoil(reply);
    const absl::Status status = CheckSelfTestReply(reply);
    EXPECT_EQ(status.code(), absl::StatusCode::kInternal) << status;
    return std::string(status.message());
  };
  EXPECT_THAT(refused([](Reply& r) { r.o[5] = 0; }), HasSubstr("output is 0 where it is 1"));
  // The second row did not see the second token, the first one did, or a value is lost.
  EXPECT_THAT(refused([](Reply& r) { r.o[4 * 64 + 7] = 1; }), HasSubstr("output"));
  EXPECT_THAT(refused([](Reply& r) { r.o[0] = 2; }), HasSubstr("output"));
  EXPECT_THAT(refused([](Reply& r) { r.o.back() = std::numeric_limits<float>::quiet_NaN(); }),
              HasSubstr("nan"));
  EXPECT_THAT(refused([](Reply& r) { r.lse[7] = 1; }), HasSubstr("LSE"));
  EXPECT_THAT(refused([](Reply& r) { r.o.pop_back(); }), HasSubstr("shape"));
  EXPECT_THAT(refused([](Reply& r) { r = Reply(); }), HasSubstr("shape"));
}

TEST(SelfTest, AFailureKeepsItsCode) {
  Reply reply;
  reply.status = absl::ResourceExhaustedError("no memory");
  const absl::Status status = CheckSelfTestReply(reply);
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(status.message(), "self-test: no memory");
}

}  // namespace
}  // namespace tributary::worker
