#include "base/config/settings_reload.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace tributary {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::Pair;

TEST(PlanReload, AppliesWhatHasChangedAndCanBeApplied) {
  const ReloadPlan plan =
      PlanReload({{"log_level", "info"}, {"workers", "4"}, {"a", "1"}},
                 {{"log_level", "debug"}, {"workers", "8"}, {"a", "1"}}, {"log_level", "a"}, {});
  EXPECT_THAT(plan.apply, ElementsAre(Pair("log_level", "debug")));
  EXPECT_THAT(plan.at_restart, ElementsAre("workers"));
}

TEST(PlanReload, SettingsComeAndGo) {
  const ReloadPlan plan = PlanReload({{"old", "1"}}, {{"new", "2"}}, {"old", "new"}, {});
  EXPECT_THAT(plan.apply, ElementsAre(Pair("new", "2"), Pair("old", std::nullopt)));
  EXPECT_THAT(plan.at_restart, IsEmpty());
  EXPECT_THAT(PlanReload({{"old", "1"}}, {}, {}, {}).at_restart, ElementsAre("old"));
}

TEST(PlanReload, TheCommandLineWins) {
  const ReloadPlan plan = PlanReload({{"log_level", "info"}, {"workers", "4"}},
                                     {{"log_level", "debug"}, {"workers", "8"}}, {"log_level"},
                                     {"log_level", "workers"});
  EXPECT_THAT(plan.apply, IsEmpty());
  EXPECT_THAT(plan.at_restart, IsEmpty());
}

TEST(FlagsGiven, AreThoseOfTheCommandLine) {
  std::vector<std::string> words = {"program", "--log-level=info", "--noconfig", "--config",
                                    "/a/b.yaml"};
  std::vector<char*> argv;
  for (std::string& word : words) argv.push_back(word.data());
  EXPECT_THAT(FlagsGiven(static_cast<int>(argv.size()), argv.data()),
              ElementsAre("config", "log_level"));
  EXPECT_EQ(ConfigFileOf(static_cast<int>(argv.size()), argv.data()), "/a/b.yaml");
}

}  // namespace
}  // namespace tributary
