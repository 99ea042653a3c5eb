#include "worker/page_tables.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/status/errors.h"

namespace tributary::worker {
namespace {

using ::testing::ElementsAre;

TEST(PageTables, GrowByIndex) {
  PageTables tables(10);
  tables.Update({1, 0, {3, 4}});
  tables.Update({1, 2, {5}});
  tables.Update({1, 1, {9}});
  ASSERT_NE(tables.Find(1), nullptr);
  EXPECT_THAT(tables.Find(1)->pages(), ElementsAre(3, 9, 5));
  EXPECT_EQ(tables.Find(2), nullptr);
}

TEST(PageTables, VersionsChangeWithEntriesOnly) {
  PageTables tables(10);
  tables.Update({1, 0, {3, 4}});
  const uint64_t first = tables.Find(1)->version();
  tables.Update({1, 0, {3}});
  tables.Replace({1, 0, {3, 4}});
  tables.Update({2, 0, {7}});
  EXPECT_EQ(tables.Find(1)->version(), first);
  tables.Update({1, 1, {5}});
  EXPECT_GT(tables.Find(1)->version(), first);
}

TEST(PageTables, ReplaceForgetsWhatLayBeyond) {
  PageTables tables(10);
  tables.Update({1, 0, {3, 4, 5}});
  const uint64_t before = tables.Find(1)->version();
  tables.Replace({1, 0, {3}});
  EXPECT_THAT(tables.Find(1)->pages(), ElementsAre(3));
  EXPECT_GT(tables.Find(1)->version(), before);
  tables.Replace({1, 1, {8, 9}});  // a long table comes in pieces
  EXPECT_THAT(tables.Find(1)->pages(), ElementsAre(3, 8, 9));
}

TEST(PageTables, CheckFollowsTheUpdatesInOrder) {
  PageTables tables(10);
  tables.Update({1, 0, {3}});
  PageTables::Sizes after;
  EXPECT_TRUE(tables.Check({{1, 1, {4}}, {1, 2, {5}}, {2, 0, {6}}}, "u", &after).ok());
  EXPECT_EQ(after.at(1), 3);
  EXPECT_EQ(after.at(2), 1);
  after.clear();
  const absl::Status hole = tables.Check({{1, 1, {4}}, {1, 3, {5}}}, "u", &after);
  EXPECT_EQ(FieldOf(hole), "u[1].first_index");
  // As replacements, the first shortens the table before the second comes.
  EXPECT_EQ(FieldOf(tables.CheckReplace({{1, 0, {}}, {1, 1, {5}}}, "t")), "t[1].first_index");
  EXPECT_EQ(tables.Find(1)->size(), 1);
}

}  // namespace
}  // namespace tributary::worker
