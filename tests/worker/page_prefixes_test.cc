// Which beginnings of page tables are alike, and what entries of a step share.
#include "worker/page_prefixes.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <vector>

#include "worker/page_tables.h"
#include "worker/shared_prefixes.h"

namespace tributary::worker {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::SizeIs;

// ------------------------------------------------------------------------------------ of tables

std::vector<const PagePrefix*> PrefixesOf(const PageTables& tables, SequenceId sequence) {
  const auto span = tables.Find(sequence)->prefixes();
  return {span.begin(), span.end()};
}

TEST(PagePrefixesTest, ForksAreAlikeUntilTheyDiffer) {
  PageTables tables(1000, /*unit_pages=*/2);
  tables.Update({1, 0, {10, 11, 12, 13, 14}});
  tables.Update({2, 0, {10, 11, 12, 13, 15, 16}});  // forked within the third unit
  const auto of = [&](SequenceId s) { return PrefixesOf(tables, s); };
  ASSERT_THAT(of(1), SizeIs(2)) << "whole units alone";
  ASSERT_THAT(of(2), SizeIs(3));
  EXPECT_EQ(of(1)[0], of(2)[0]);
  EXPECT_EQ(of(1)[1], of(2)[1]);
  tables.Update({1, 5, {17}});
  EXPECT_NE(of(1)[2], of(2)[2]);
  // A copy on write changes its unit and all behind it.
  const PagePrefix* first = of(1)[0];
  tables.Update({2, 2, {20}});
  EXPECT_EQ(of(2)[0], first);
  EXPECT_NE(of(2)[1], of(1)[1]);
  // The same pages behind another beginning are not the same beginning.
  tables.Update({3, 0, {50, 51, 12, 13}});
  EXPECT_NE(of(3)[1], of(1)[1]);
}

// What one table says of itself follows what others do.
TEST(PagePrefixesTest, ATableKnowsHowMuchItSharesWithAnyOther) {
  PageTables tables(1000, /*unit_pages=*/2);
  const auto shared = [&](SequenceId s) { return tables.Find(s)->shared_prefixes().size(); };
  tables.Update({1, 0, {10, 11, 12, 13, 14, 15, 16}});
  EXPECT_EQ(shared(1), 0u);
  tables.Replace({2, 0, {10, 11, 12, 13, 14, 15, 16}});  // a fork
  EXPECT_EQ(shared(1), 3u);
  EXPECT_EQ(shared(2), 3u);
  tables.Update({2, 5, {20}});  // a copy on write
  EXPECT_EQ(shared(1), 2u);
  EXPECT_EQ(shared(2), 2u);
  tables.Replace({3, 0, {10, 11, 12, 13, 14, 20}});  // a fork of the fork
  EXPECT_EQ(shared(1), 2u);
  EXPECT_EQ(shared(2), 3u);
  tables.Replace({2, 0, {10, 11}});  // truncated
  EXPECT_EQ(shared(1), 2u);
  EXPECT_EQ(shared(2), 1u);
  EXPECT_EQ(shared(3), 2u);
  tables.Drop(3);  // closed
  EXPECT_EQ(shared(1), 1u);
  tables.Drop(1);
  EXPECT_EQ(shared(2), 0u);
}

TEST(PagePrefixesTest, NothingIsKeptOfTablesThatAreGone) {
  PagePrefixes prefixes(2);
  PrefixesOfTable a, b;
  prefixes.Update(std::vector<int32_t>{1, 2, 3, 4}, 0, &a);
  prefixes.Update(std::vector<int32_t>{1, 2, 5, 6, 7, 8}, 0, &b);
  EXPECT_EQ(prefixes.size(), 4u);
  prefixes.Update(std::vector<int32_t>{1, 2}, 2, &b);  // truncated
  EXPECT_EQ(prefixes.size(), 2u);
  prefixes.Drop(&a);
  EXPECT_EQ(prefixes.size(), 1u);
  prefixes.Drop(&b);
  EXPECT_EQ(prefixes.size(), 0u);
}

TEST(PagePrefixesTest, TablesThatChangeAtRandomAgreeWithTheirPages) {
  constexpr size_t kUnit = 4;
  PageTables tables(50, kUnit);
  std::mt19937 random(1);
  for (int move = 0; move < 4000; ++move) {
    const SequenceId id = 1 + random() % 6;
    const PageTable* table = tables.Find(id);
    const auto size = table == nullptr ? 0u : static_cast<uint32_t>(table->size());
    PageUpdate update{id, static_cast<int32_t>(random() % (size + 1)), {}};
    for (uint32_t i = random() % 6; i > 0; --i) update.pages.push_back(random() % 3);
    switch (random() % 8) {
      case 0:
        tables.Drop(id);
        break;
      case 1:
        update.first_index = 0;
        tables.Replace(update);
        break;
      case 2: {  // a fork
        const PageTable* parent = tables.Find(1 + random() % 6);
        if (parent == nullptr) break;
        update = {id, 0, {parent->pages().begin(), parent->pages().end()}};
        tables.Replace(update);
        break;
      }
      default:
        if (size < 60) tables.Update(update);
    }
    const PageTable* a = tables.Find(1);
    size_t shared = 0;  // units of the first table
    for (SequenceId other = 1; a != nullptr && other <= 6; ++other) {
      const PageTable* b = tables.Find(other);
      if (b == nullptr) continue;
      ASSERT_EQ(b->prefixes().size(), b->size() / kUnit);
      const size_t units = std::min(a->prefixes().size(), b->prefixes().size());
      for (size_t u = 0; u < units; ++u) {
        const bool alike = std::equal(a->pages().begin(), a->pages().begin() + (u + 1) * kUnit,
                                      b->pages().begin());
        ASSERT_EQ(a->prefixes()[u] == b->prefixes()[u], alike) << move;
        if (alike && other != 1) shared = std::max(shared, u + 1);
      }
    }
    if (a == nullptr) continue;
    ASSERT_EQ(a->shared_prefixes().size(), shared) << move;
  }
}

// --------------------------------------------------------------------------------- what is shared

constexpr int64_t kUnitSlots = kSharedSlots;

// Entries with these beginnings, which see so many slots. Beginnings are named by numbers.
struct Entries {
  std::map<int, PagePrefix> prefixes;
  std::vector<PrefixesOfTable> tables;
  std::vector<KeyRange> slots;

  void Add(const std::vector<int>& of_entry, int64_t end) {
    PrefixesOfTable& table = tables.emplace_back();
    for (const int name : of_entry) table.push_back(&prefixes[name]);
    slots.push_back({0, end});
  }
  std::vector<SharedPages> Find() const {
    std::vector<PrefixUser> users;
    for (size_t i = 0; i < tables.size(); ++i) {
      users.push_back({static_cast<int32_t>(i), tables[i], slots[i]});
    }
    return FindSharedPages(users);
  }
};

void ExpectRun(const SharedPages& run, int64_t begin, int64_t end, std::vector<int32_t> entries) {
  EXPECT_EQ(run.slots.lo, begin * kUnitSlots);
  EXPECT_EQ(run.slots.hi, end * kUnitSlots);
  EXPECT_EQ(run.entries, entries);
}

TEST(SharedPrefixesTest, NothingIsSharedByOneOrByStrangers) {
  Entries entries;
  EXPECT_THAT(entries.Find(), IsEmpty());
  entries.Add({1, 2, 3}, 3 * kUnitSlots);
  EXPECT_THAT(entries.Find(), IsEmpty());
  entries.Add({4, 5}, 2 * kUnitSlots);
  entries.Add({}, 100);
  EXPECT_THAT(entries.Find(), IsEmpty());
}

TEST(SharedPrefixesTest, ForksOfOneSequence) {
  Entries entries;
  entries.Add({1, 2, 3, 10}, 4 * kUnitSlots);
  entries.Add({9}, 900);  // a stranger
  entries.Add({1, 2, 3, 11}, 4 * kUnitSlots);
  entries.Add({1, 2, 3}, 3 * kUnitSlots + 5);
  const std::vector<SharedPages> runs = entries.Find();
  ASSERT_THAT(runs, SizeIs(1));
  ExpectRun(runs[0], 0, 3, {0, 2, 3});
}

TEST(SharedPrefixesTest, TheLastUnitMayBeSeenInPart) {
  Entries entries;
  entries.Add({1, 2}, kUnitSlots + 1);
  entries.Add({1, 2}, kUnitSlots + 700);
  ASSERT_THAT(entries.Find(), SizeIs(1));
  ExpectRun(entries.Find()[0], 0, 2, {0, 1});
}

TEST(SharedPrefixesTest, ThreeLevels) {
  Entries entries;  // 1 2 | 3 or 4 | own
  entries.Add({1, 2, 3, 5}, 4 * kUnitSlots);
  entries.Add({1, 2, 4, 6}, 4 * kUnitSlots);
  entries.Add({1, 2, 3, 7}, 4 * kUnitSlots);
  entries.Add({1, 2, 4, 8}, 4 * kUnitSlots);
  entries.Add({1, 2, 4, 8, 9}, 5 * kUnitSlots);
  const std::vector<SharedPages> runs = entries.Find();
  ASSERT_THAT(runs, SizeIs(4));
  ExpectRun(runs[0], 0, 2, {0, 1, 2, 3, 4});
  ExpectRun(runs[1], 2, 3, {0, 2});
  ExpectRun(runs[2], 2, 3, {1, 3, 4});
  ExpectRun(runs[3], 3, 4, {3, 4});
}

TEST(SharedPrefixesTest, EntriesAreNamedByTheirNumbersInThePass) {
  PagePrefix one, two;
  PrefixesOfTable table = {&one, &two};
  const std::vector<PrefixUser> users = {{3, table, {0, 2 * kUnitSlots}},
                                         {8, table, {0, 2 * kUnitSlots}}};
  const std::vector<SharedPages> runs = FindSharedPages(users);
  ASSERT_THAT(runs, SizeIs(1));
  ExpectRun(runs[0], 0, 2, {3, 8});
}

TEST(SharedPrefixesTest, WhoSeesNothingOfARunIsNotInIt) {
  Entries entries;
  entries.Add({1, 2, 3}, 3 * kUnitSlots);
  entries.Add({1, 2, 3}, 3 * kUnitSlots);
  entries.Add({1, 2, 3}, 10);  // was truncated: its table is longer than its rows look
  entries.Add({1, 2, 3}, 0);
  const std::vector<SharedPages> runs = entries.Find();
  ASSERT_THAT(runs, SizeIs(2));
  ExpectRun(runs[0], 0, 1, {0, 1, 2});
  ExpectRun(runs[1], 1, 3, {0, 1});
}

}  // namespace
}  // namespace tributary::worker
