// Which rank the others wait for, and when that cannot be told.
#include <gtest/gtest.h>

#include <vector>

#include "service/observe/metrics.h"

namespace tributary::service {
namespace {

worker::Reply Took(double plan, double append, double attend, double exchange) {
  worker::Reply reply;
  reply.times = {.plan = plan, .append = append, .attend = attend, .exchange = exchange};
  return reply;
}

TEST(RankSkew, IsOfTheTimeBeforeTheExchange) {
  const auto skew = SkewOf({Took(1, 2, 3, 90), Took(2, 3, 4, 0), Took(0, 1, 4, 50)});
  ASSERT_TRUE(skew.has_value());
  EXPECT_EQ(skew->slowest, 1);
  EXPECT_EQ(skew->seconds, 4);
}

TEST(RankSkew, IsNotToldWhereWaitingForPeersIsPartOfAttention) {
  std::vector<worker::Reply> replies = {Took(1, 0, 9, 0), Took(1, 0, 2, 0)};
  for (worker::Reply& reply : replies) reply.times.exchange_in_attend = true;
  EXPECT_FALSE(SkewOf(replies).has_value());
}

}  // namespace
}  // namespace tributary::service
