#include "worker/rpc/place_in_group.h"

#include <gtest/gtest.h>

namespace tributary::worker {
namespace {

TEST(PlaceInGroup, IsTheRankWhereNodesHaveOne) {
  EXPECT_EQ(*PlaceInGroup({.rank = 3}), 3);
  EXPECT_EQ(*PlaceInGroup({}), std::nullopt);
}

TEST(PlaceInGroup, CountsOverNodes) {
  EXPECT_EQ(*PlaceInGroup({.rank = 0, .ranks_per_node = 8, .node = 0}), 0);
  EXPECT_EQ(*PlaceInGroup({.rank = 7, .ranks_per_node = 8, .node = 0}), 7);
  EXPECT_EQ(*PlaceInGroup({.rank = 2, .ranks_per_node = 8, .node = 1}), 10);
  EXPECT_EQ(*PlaceInGroup({.rank = 0, .ranks_per_node = 1, .node = 5}), 5);
}

TEST(PlaceInGroup, NamesTheFlagAtFault) {
  const auto refusal = [](const PlaceFlags& flags) {
    return std::string(PlaceInGroup(flags).status().message());
  };
  EXPECT_EQ(refusal({.rank = -2}), "rank: must be >= -1");
  EXPECT_EQ(refusal({.rank = 0, .ranks_per_node = -1}), "ranks_per_node: must be >= 0");
  EXPECT_EQ(refusal({.rank = 0, .ranks_per_node = 2, .node = -1}), "node: must be >= 0");
  EXPECT_EQ(refusal({.rank = 0, .node = 1}), "node: counts only with --ranks_per_node");
  EXPECT_EQ(refusal({.rank = 2, .ranks_per_node = 2}),
            "rank: must be 0 to 1 with --ranks_per_node=2, is 2");
  EXPECT_EQ(refusal({.ranks_per_node = 2}), "rank: must be 0 to 1 with --ranks_per_node=2, is -1");
  EXPECT_EQ(refusal({.rank = 0, .ranks_per_node = 1 << 20, .node = 1 << 20}),
            "node: 1048576 is too large");
}

}  // namespace
}  // namespace tributary::worker
