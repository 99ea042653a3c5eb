// Long answers are sent on a thread of their own, in order; short ones at once.
#include "service/api/long_answers.h"

#include <gtest/gtest.h>

#include <future>
#include <thread>
#include <vector>

namespace tributary::service {
namespace {

TEST(LongAnswersTest, ShortAnswersAreSentAtOnceWhileALongOneIsBeingSent) {
  std::promise<void> begun;
  std::promise<void> released;
  std::thread::id of_long;
  LongAnswers answers;
  answers.Send(LongAnswers::kLongBytes, [&] {
    of_long = std::this_thread::get_id();
    begun.set_value();
    released.get_future().wait();
  });
  begun.get_future().wait();
  std::thread::id of_short;
  answers.Send(LongAnswers::kLongBytes - 1, [&] { of_short = std::this_thread::get_id(); });
  EXPECT_EQ(of_short, std::this_thread::get_id());
  EXPECT_NE(of_long, std::this_thread::get_id());
  released.set_value();
}

TEST(LongAnswersTest, LongAnswersAreSentInOrderAndAllBeforeTheEnd) {
  std::vector<int> sent;
  {
    LongAnswers answers;
    for (int i = 0; i < 100; ++i) {
      answers.Send(LongAnswers::kLongBytes + 1, [&sent, i] { sent.push_back(i); });
    }
  }
  ASSERT_EQ(sent.size(), 100u);
  for (int i = 0; i < 100; ++i) EXPECT_EQ(sent[i], i);
}

}  // namespace
}  // namespace tributary::service
