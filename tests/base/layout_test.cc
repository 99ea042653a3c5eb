// Where things lie in a mailbox.
#include "base/mailbox/layout.h"

#include <gtest/gtest.h>

#include <set>

namespace tributary::mailbox {
namespace {

constexpr SlotRoom kRoom = {.q = 1000, .k = 200, .v = 300, .output = 4000, .lse = 50};

TEST(Layout, EndpointsHaveWordsOfTheirOwnAndShareTheSlots) {
  const Layout first = LayOut(2, kRoom, {.endpoints = 3});
  std::set<size_t> words;
  for (int32_t e = 0; e < 3; ++e) {
    const Layout layout = first.OfEndpoint(e);
    for (const size_t word : {layout.arrived, layout.finished, layout.status, layout.service_sleeps,
                              layout.host_sleeps, layout.handed_over, layout.handed_back}) {
      EXPECT_TRUE(words.insert(word).second) << "word " << word << " of endpoint " << e;
      EXPECT_EQ(word % kAlignment, 0u);
      EXPECT_LT(word, first.first_slot);
    }
    EXPECT_EQ(layout.first_slot, first.first_slot);
    EXPECT_EQ(layout.q, first.q);
    EXPECT_EQ(layout.bytes, first.bytes);
  }
  EXPECT_EQ(words.size(), 21u);
  EXPECT_EQ(first.OfEndpoint(0), first);
  EXPECT_EQ(first.first_slot, 3 * kControlBytes);
  EXPECT_EQ(LayOut(2, kRoom).first_slot, kControlBytes);
}

TEST(Layout, AWordForHandOversThatHaveBegunIsAskedFor) {
  EXPECT_EQ(LayOut(2, kRoom).begun, 0u);
  const Layout told = LayOut(2, kRoom, {.in_parts = true});
  EXPECT_GT(told.begun, told.handed_back);
  EXPECT_EQ(told.begun % kAlignment, 0u);
  EXPECT_LE(told.begun + kAlignment, told.first_slot);
}

TEST(Layout, OnlyTimedSessionsHaveStamps) {
  EXPECT_EQ(LayOut(2, kRoom).stamps, 0u);
  const Layout timed = LayOut(2, kRoom, {.timed = true});
  EXPECT_GE(timed.stamps, timed.lse + kRoom.lse);
  EXPECT_LE(timed.stamps + sizeof(SlotStamps), timed.slot_bytes);
}

}  // namespace
}  // namespace tributary::mailbox
