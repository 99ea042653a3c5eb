// A short soak (model_soak.h) of every kind of fault that needs no rights. `make soak-faults` makes
// a long one.
#include <gtest/gtest.h>

#include <set>
#include <string>

#include "tests/fault/model_soak.h"

namespace tributary::test {
namespace {

class ShortSoak : public ModelSoak {};

TEST_F(ShortSoak, NoAnswerIsWrongAndNothingIsLost) {
  Soak({.seed = 20240901,
        .faults = 9,
        .kinds = {FaultKind::kKillWorker, FaultKind::kOtherBuild, FaultKind::kKillCoordinator,
                  FaultKind::kStopCoordinator, FaultKind::kTornJournal, FaultKind::kSlowLink,
                  FaultKind::kMemoryPressure, FaultKind::kResize, FaultKind::kKilledResize}});
  PrintCounts();
}

TEST(FaultPlan, FollowsFromItsSeedAndLeavesNothingOut) {
  const std::vector<FaultKind> kinds = {FaultKind::kKillWorker, FaultKind::kPauseCoordinator,
                                        FaultKind::kTornJournal};
  FaultPlan one(7, 4, kinds), same(7, 4, kinds), other(8, 4, kinds);
  std::string of_one, of_other;
  for (int round = 0; round < 3; ++round) {
    std::set<FaultKind> seen;
    for (size_t i = 0; i < kinds.size(); ++i) {
      const Fault fault = one.Next();
      EXPECT_EQ(Describe(fault), Describe(same.Next()));
      seen.insert(fault.kind);
      EXPECT_GE(fault.rank, 0);
      EXPECT_LT(fault.rank, 4);
      of_one += Describe(fault) + ";";
      of_other += Describe(other.Next()) + ";";
    }
    EXPECT_EQ(seen.size(), kinds.size());
  }
  EXPECT_NE(of_one, of_other);
}

TEST(FaultKind, NamesAreRead) {
  for (int i = 0; i < kFaultKinds; ++i) {
    FaultKind kind{};
    EXPECT_TRUE(ParseFaultKind(Name(static_cast<FaultKind>(i)), &kind));
    EXPECT_EQ(kind, static_cast<FaultKind>(i));
  }
  FaultKind kind{};
  EXPECT_FALSE(ParseFaultKind("flood", &kind));
}

}  // namespace
}  // namespace tributary::test
