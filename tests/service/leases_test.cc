#include "service/schedule/leases.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <string>
#include <vector>

#include "base/status/errors.h"

namespace tributary::service {
namespace {

using std::chrono::hours;
using ::testing::ElementsAre;
using ::testing::IsEmpty;

// The time is stated, so that no test waits.
class LeasesTest : public ::testing::Test {
 protected:
  Leases leases_{hours(1)};
  const Leases::Clock::time_point now_ = Leases::Clock::now();
};

TEST_F(LeasesTest, EndsWhenNobodyHasHeldItForTheTimeout) {
  Leases::HolderPtr call = leases_.Present("a");
  const LeasePtr of_sequence = call->lease();
  EXPECT_LE(leases_.NextLook(), now_ + hours(2));
  EXPECT_THAT(leases_.TakeEnded(now_ + hours(10)), IsEmpty()) << "it is held";
  Leases::HolderPtr another = leases_.Present("a");
  EXPECT_EQ(another->lease(), of_sequence);
  call.reset();
  EXPECT_THAT(leases_.TakeEnded(now_ + hours(20)), IsEmpty()) << "another holds it";
  another.reset();
  EXPECT_THAT(leases_.TakeEnded(now_ + hours(30)), ElementsAre(of_sequence));
  EXPECT_EQ(leases_.size(), 0u);
  EXPECT_EQ(leases_.NextLook(), Leases::Clock::time_point::max());
  EXPECT_NE(leases_.Present("a")->lease(), of_sequence) << "another begins";
}

TEST_F(LeasesTest, APresentedLeaseIsLookedAtAfterAWholeTimeout) {
  const LeasePtr of_sequence = leases_.Present("a")->lease();
  EXPECT_THAT(leases_.TakeEnded(now_ + std::chrono::minutes(59)), IsEmpty());
  EXPECT_GE(leases_.NextLook(), now_ + hours(1));
  EXPECT_EQ(leases_.size(), 1u);
}

TEST_F(LeasesTest, NothingIsKeptOfALeaseWithoutSequences) {
  for (int i = 0; i < 100; ++i) leases_.Present("lease-" + std::to_string(i));
  EXPECT_EQ(leases_.size(), 0u);
  LeasePtr of_sequence = leases_.Present("a")->lease();
  EXPECT_EQ(leases_.size(), 1u);
  of_sequence.reset();  // closed
  EXPECT_THAT(leases_.TakeEnded(now_ + hours(2)), IsEmpty());
  EXPECT_EQ(leases_.size(), 0u);
}

TEST_F(LeasesTest, ARestoredLeaseHasAWholeTimeoutFromThenOn) {
  const LeasePtr restored = leases_.Restore("a", now_ + hours(5));
  EXPECT_EQ(leases_.NextLook(), now_ + hours(6));
  EXPECT_EQ(leases_.Restore("a", now_ + hours(5)), restored);
  EXPECT_THAT(leases_.TakeEnded(now_ + hours(6)), ElementsAre(restored));
}

TEST(Leases, NeverEndWithoutATimeout) {
  Leases leases(std::chrono::milliseconds(0));
  const LeasePtr of_sequence = leases.Present("a")->lease();
  EXPECT_EQ(leases.NextLook(), Leases::Clock::time_point::max());
  EXPECT_THAT(leases.TakeEnded(Leases::Clock::now() + hours(1000)), IsEmpty());
}

TEST(Leases, AHolderMayOutliveThem) {
  Leases::HolderPtr call;
  {
    Leases leases(hours(1));
    call = leases.Present("a");
  }
  EXPECT_EQ(call->lease()->name(), "a");
}

TEST(Leases, NamesAreChecked) {
  EXPECT_TRUE(Leases::CheckName("A.z_0-9", "lease").ok());
  EXPECT_TRUE(Leases::CheckName(std::string(128, 'a'), "lease").ok());
  for (const std::string& bad : {std::string(), std::string(129, 'a'), std::string("a b"),
                                 std::string("\xc3\xa4"), std::string("a\0b", 3)}) {
    const absl::Status status = Leases::CheckName(bad, "lease");
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << bad;
    EXPECT_EQ(FieldOf(status), "lease");
  }
}

}  // namespace
}  // namespace tributary::service
