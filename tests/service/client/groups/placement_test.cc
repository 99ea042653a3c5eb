#include "service/client/groups/placement.h"

#include <gtest/gtest.h>

#include <random>

#include "base/status/errors.h"
#include "service/client/groups/targets.h"

namespace tributary::client {
namespace {

size_t First(size_t) { return 0; }

TEST(PlacementTest, AnIdCarriesItsGroupsTag) {
  std::mt19937_64 random(1);
  for (int i = 0; i < 1000; ++i) {
    const uint32_t tag = TagOfGroup(random());
    ASSERT_NE(tag, 0u);
    ASSERT_LT(tag, uint32_t{1} << kTagBits);
    const uint64_t id = SequenceIdFor(tag, random());
    ASSERT_NE(id, 0u);
    ASSERT_EQ(TagOfSequence(id), tag);
  }
  EXPECT_NE(TagOfGroup(1), TagOfGroup(2)) << "ids that differ little have tags that differ";
}

TEST(PlacementTest, TheMostFreePagesComeFirst) {
  const std::vector<std::optional<GroupLoad>> loads = {GroupLoad{.free_pages = 5}, std::nullopt,
                                                       GroupLoad{.free_pages = 9},
                                                       GroupLoad{.free_pages = 7}};
  EXPECT_EQ(PlacementOrder(loads, First), (std::vector<size_t>{2, 3, 0}));
  EXPECT_TRUE(PlacementOrder({std::nullopt}, First).empty());
  EXPECT_TRUE(PlacementOrder({}, First).empty());
}

TEST(PlacementTest, SequencesPlacedSinceTheReportCountAsTheOthers) {
  // Ten sequences have 40 pages: two more will have eight.
  EXPECT_EQ(FreePagesToCome({.free_pages = 20, .used_pages = 40, .sequences = 10, .placed = 2}),
            12);
  EXPECT_EQ(FreePagesToCome({.free_pages = 20, .placed = 2}), 18) << "one page each without others";
  EXPECT_EQ(FreePagesToCome({.free_pages = 20, .used_pages = 1, .sequences = 10, .placed = 2}), 9)
      << "nine of the ten have no page yet";
}

TEST(PlacementTest, AmongEqualsEveryGroupMayBeFirst) {
  const std::vector<std::optional<GroupLoad>> loads(4, GroupLoad{.free_pages = 5});
  std::mt19937 random(1);
  std::vector<int> first(4);
  for (int i = 0; i < 400; ++i) {
    ++first[PlacementOrder(loads, [&](size_t n) { return random() % n; }).front()];
  }
  for (const int count : first) EXPECT_GT(count, 50);
}

TEST(TargetsTest, NameGroups) {
  EXPECT_FALSE(NamesGroups("localhost:7400"));
  EXPECT_FALSE(NamesGroups("unix:/run/tributary.sock"));
  EXPECT_TRUE(NamesGroups("a:1,b:1"));
  EXPECT_TRUE(NamesGroups("groups:tributary.inference:7400"));

  const auto fixed = ParseGroupTargets("a:1,unix:/b");
  ASSERT_TRUE(fixed.ok());
  EXPECT_EQ(fixed->fixed, (std::vector<std::string>{"a:1", "unix:/b"}));
  const auto named = ParseGroupTargets("groups:tributary.inference:7400");
  ASSERT_TRUE(named.ok());
  EXPECT_EQ(named->name, "tributary.inference");
  EXPECT_EQ(named->port, "7400");
  for (const char* bad : {"a:1,", ",a:1", "a:1,,b:1", "a:1,a:1", "groups:name", "groups::1",
                          "groups:name:", "groups:a:1,b:1"}) {
    const auto refused = ParseGroupTargets(bad);
    EXPECT_EQ(FieldOf(refused.status()), "target") << bad;
  }
}

TEST(TargetsTest, EveryAddressOfANameIsAGroup) {
  const auto found = ResolveGroups("127.0.0.1", "7400");
  ASSERT_TRUE(found.ok()) << found.status();
  EXPECT_EQ(*found, std::vector<std::string>{"ipv4:127.0.0.1:7400"});
  const auto six = ResolveGroups("::1", "7400");
  ASSERT_TRUE(six.ok()) << six.status();
  EXPECT_EQ(*six, std::vector<std::string>{"ipv6:[::1]:7400"});
  EXPECT_TRUE(absl::IsUnavailable(ResolveGroups("no-such-name.invalid", "7400").status()));
}

}  // namespace
}  // namespace tributary::client
