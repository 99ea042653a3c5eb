// The bound on bytes in flight, without a network.
#include "service/api/byte_budget.h"

#include <gtest/gtest.h>

#include <optional>
#include <utility>

namespace tributary::service {
namespace {

constexpr int64_t kUnit = 2 * kSmallRequest;

TEST(ByteBudget, ACallIsLetInWhileFewerBytesThanTheLimitAreInFlight) {
  int refused = 0;
  const auto budget = ByteBudget::Create({.per_caller = 100 * kUnit, .in_all = 250 * kUnit},
                                         [&](ClientLimit limit) {
                                           EXPECT_EQ(limit, ClientLimit::kBytes);
                                           ++refused;
                                         });
  auto first = budget->Take("a", 99 * kUnit);
  auto second = budget->Take("a", 100 * kUnit);
  ASSERT_TRUE(first.ok() && second.ok()) << "at most the limit and one call";
  EXPECT_EQ(budget->Take("a", 1 * kUnit).status().code(), absl::StatusCode::kResourceExhausted);
  auto other = budget->Take("b", 60 * kUnit);
  ASSERT_TRUE(other.ok()) << "another client's bytes are its own";
  EXPECT_FALSE(budget->Take("c", 1 * kUnit).ok()) << "all together have 259";
  EXPECT_EQ(refused, 2);
  *second = nullptr;
  EXPECT_TRUE(budget->Take("a", 1 * kUnit).ok());
  *first = nullptr;
  *other = nullptr;
  EXPECT_EQ(budget->in_flight(), 0);
}

TEST(ByteBudget, WhatAReplyIsGoingToHaveCountsToo) {
  const auto budget = ByteBudget::Create({.per_caller = 100 * kUnit});
  const auto call = *budget->Take("a", 150 * kUnit);
  ASSERT_TRUE(call->Add(200 * kUnit).ok()) << "no other call is in flight";
  EXPECT_EQ(budget->in_flight(), 350 * kUnit);
  EXPECT_FALSE(budget->Take("a", 1 * kUnit).ok());
  call->Reduce(80 * kUnit);
  EXPECT_EQ(budget->in_flight(), 80 * kUnit);
  const auto next = *budget->Take("a", 50 * kUnit);
  EXPECT_TRUE(next->Add(10 * kUnit).ok()) << "80 of others";
  EXPECT_TRUE(call->Add(30 * kUnit).ok()) << "60 of others";
  EXPECT_FALSE(next->Add(10 * kUnit).ok()) << "110 of others";
}

TEST(ByteBudget, WhoHasNoRoomIsToldOnceWhenItMayHaveSome) {
  const auto budget = ByteBudget::Create({.per_caller = 100 * kUnit, .in_all = 150 * kUnit});
  int told = 0;
  const auto tell = [&] { ++told; };
  EXPECT_TRUE(budget->HasRoom("a", tell));
  auto a = *budget->Take("a", 120 * kUnit);
  auto b = *budget->Take("b", 60 * kUnit);
  EXPECT_FALSE(budget->HasRoom("a", tell));
  EXPECT_FALSE(budget->HasRoom("c", tell));
  b = nullptr;
  EXPECT_EQ(told, 1) << "c has room, a has not";
  a = nullptr;
  EXPECT_EQ(told, 2);
  EXPECT_TRUE(budget->Take("a", 1 * kUnit).ok());
  EXPECT_EQ(told, 2);
}

TEST(ByteBudget, ALimitThatRisesIsToldToThoseWhoWaited) {
  const auto budget = ByteBudget::Create({.per_caller = kUnit});
  int told = 0;
  const auto call = *budget->Take("a", 10 * kUnit);
  EXPECT_FALSE(budget->HasRoom("a", [&] { ++told; }));
  budget->SetLimits({.per_caller = 5 * kUnit});
  EXPECT_EQ(told, 0);
  budget->SetLimits({.per_caller = 20 * kUnit});
  EXPECT_EQ(told, 1);
  const auto second = budget->Take("a", 15 * kUnit);
  EXPECT_TRUE(second.ok());
  budget->SetLimits({.per_caller = 20 * kUnit, .in_all = kUnit});
  EXPECT_FALSE(budget->Take("b", kUnit).ok());
  EXPECT_EQ(budget->limits().in_all, kUnit);
}

TEST(ByteBudget, ASmallRequestNeedsNoRoomAndCounts) {
  const auto budget = ByteBudget::Create({.per_caller = kUnit});
  const auto call = *budget->Take("a", kUnit);
  EXPECT_FALSE(budget->Take("a", kSmallRequest + 1).ok());
  const auto small = budget->Take("a", kSmallRequest);
  ASSERT_TRUE(small.ok());
  EXPECT_FALSE((*small)->Add(1).ok()) << "a reply with tensors does";
  EXPECT_EQ(budget->in_flight(), kUnit + kSmallRequest);
}

TEST(ByteBudget, WithoutLimitsThereIsAlwaysRoom) {
  const auto budget = ByteBudget::Create({});
  const auto call = budget->Take("a", int64_t{1} << 60);
  EXPECT_TRUE(budget->HasRoom("a", nullptr));
  EXPECT_TRUE(budget->Take("a", kUnit).ok());
}

}  // namespace
}  // namespace tributary::service
