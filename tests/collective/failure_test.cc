// What every communicator does when a rank does not come, leaves, or somebody aborts.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>

#include "tests/collective/group.h"

namespace tributary::collective {
namespace {

using std::chrono::milliseconds;
using testing::AnyOf;
using testing::Eq;
using testing::HasSubstr;
using testing::Not;

MATCHER(IsOk, "is OK") {
  *result_listener << Text(arg);
  return arg.ok();
}
MATCHER_P(HasCode, code, "has code " + testing::PrintToString(static_cast<int>(code))) {
  *result_listener << Text(arg);
  return arg.code() == code;
}

// Under TLS a rank may see that a peer was in another operation before it sees that it is gone.
auto PartedWays() { return HasCode(StatusCode::kInternal); }

class FailureTest : public testing::TestWithParam<GroupParam> {
 protected:
  void SetUp() override { group_ = MakeGroup(GetParam().kind, size()); }
  void TearDown() override { Destroy(group_); }

  int size() const { return GetParam().size; }

  // Every later operation repeats the first error, at once.
  void ExpectBroken(int rank, const Status& first) {
    std::vector<float> data(size());
    Communicator& comm = *group_[rank];
    for (const Status& s : {comm.Barrier(Far()), comm.AllGather(data.data(), data.data(), 0, Far()),
                            comm.AllToAll(data.data(), data.data(), 0, Far()),
                            comm.ReduceScatter(data.data(), data.data(), 0, Far()),
                            comm.Gather(data.data(), data.data(), 0, 0, Far())}) {
      EXPECT_EQ(s.code(), first.code());
      EXPECT_EQ(s.message(), first.message());
    }
  }

  Group group_;
};

TEST_P(FailureTest, ARankThatDoesNotComeIsNamedAtTheDeadline) {
  const int absent = size() - 1;
  std::vector<Status> statuses(size());
  OnEveryRank(absent, [&](int rank) {
    std::vector<uint32_t> send(1000, rank), recv(1000 * size());
    statuses[rank] =
        group_[rank]->AllGather(send.data(), recv.data(), 4000, After(milliseconds(200)));
  });
  int timed_out = 0;
  for (int rank = 0; rank < absent; ++rank) {
    // A peer may reach its deadline a moment earlier, and break ours.
    EXPECT_THAT(statuses[rank],
                AnyOf(HasCode(StatusCode::kDeadlineExceeded), HasCode(StatusCode::kUnavailable)));
    if (statuses[rank].code() != StatusCode::kDeadlineExceeded) continue;
    ++timed_out;
    EXPECT_THAT(statuses[rank].message(), HasSubstr("all_gather"));
    EXPECT_THAT(statuses[rank].message(),
                HasSubstr("rank " + std::to_string(absent) + " did not come"));
  }
  EXPECT_GE(timed_out, 1);
  for (int rank = 0; rank < absent; ++rank) ExpectBroken(rank, statuses[rank]);
  // The late rank learns at once that it is too late.
  const Status late = group_[absent]->Barrier(Far());
  EXPECT_THAT(late, AnyOf(HasCode(StatusCode::kDeadlineExceeded), HasCode(StatusCode::kUnavailable),
                          PartedWays()));
  ExpectBroken(absent, late);
}

TEST_P(FailureTest, ADeadlineInThePastIsNotWaitedFor) {
  const Status s = group_[0]->Barrier(After(milliseconds(-1)));
  EXPECT_THAT(s, HasCode(StatusCode::kDeadlineExceeded));
  ExpectBroken(0, s);
}

// The abort may come before rank 0 waits or while it does; both end the same way.
TEST_P(FailureTest, AbortEndsAWaitFromAnotherThread) {
  std::atomic<bool> started = false;
  Status waiting;
  std::thread rank0([&] {
    std::vector<uint32_t> send(100000), recv(100000 * size());
    started = true;
    waiting = group_[0]->AllGather(send.data(), recv.data(), 400000, Far());
  });
  while (!started) std::this_thread::yield();
  group_[0]->Abort("the step was given up");
  group_[0]->Abort("a second reason");
  rank0.join();
  EXPECT_THAT(waiting, HasCode(StatusCode::kAborted));
  EXPECT_THAT(waiting.message(), HasSubstr("the step was given up"));
  ExpectBroken(0, waiting);
  for (int rank = 1; rank < size(); ++rank) {
    const Status s = group_[rank]->Barrier(Far());
    EXPECT_THAT(
        s, AnyOf(HasCode(StatusCode::kAborted), HasCode(StatusCode::kUnavailable), PartedWays()));
    ExpectBroken(rank, s);
  }
}

TEST_P(FailureTest, AbortOfAnIdleRankEndsThePeersWaits) {
  std::vector<Status> statuses(size());
  const int idle = size() - 1;
  OnEveryRank(size(), [&](int rank) {
    if (rank == idle) {
      group_[rank]->Abort("shutting down");
    } else {
      statuses[rank] = group_[rank]->Barrier(Far());
    }
  });
  for (int rank = 0; rank < idle; ++rank) {
    EXPECT_THAT(statuses[rank],
                AnyOf(HasCode(StatusCode::kAborted), HasCode(StatusCode::kUnavailable)));
  }
  EXPECT_THAT(group_[idle]->Barrier(Far()), HasCode(StatusCode::kAborted));
}

// Abort, operations and departure meet at random moments; every wait ends, and a rank that was told
// OK has all its data.
TEST_P(FailureTest, AbortAtAnyMoment) {
#ifdef TRIBUTARY_SHORT_GRID
  constexpr int kRounds = 4;
#else
  constexpr int kRounds = 20;
#endif
  for (int round = 0; round < kRounds; ++round) {
    Group group = MakeGroup(GetParam().kind, size(), 1000 + round);
    std::atomic<int> progress = 0;
    std::thread aborter([&] {
      while (progress < round * 3) std::this_thread::yield();
      group[round % size()]->Abort("round " + std::to_string(round));
    });
    OnEveryRank(size(), [&](int rank) {
      for (uint32_t op = 0;; ++op) {
        std::vector<uint32_t> send(5000, op * 100 + rank), recv(5000 * size());
        const Status s = group[rank]->AllGather(send.data(), recv.data(), 20000, Far());
        ++progress;
        if (!s.ok()) {
          EXPECT_THAT(s, AnyOf(HasCode(StatusCode::kAborted), HasCode(StatusCode::kUnavailable)));
          break;
        }
        for (int from = 0; from < size(); ++from) {
          ASSERT_EQ(recv[from * 5000], op * 100 + from);
          ASSERT_EQ(recv[from * 5000 + 4999], op * 100 + from);
        }
      }
    });
    aborter.join();
    Destroy(group);
  }
}

TEST_P(FailureTest, ARankThatLeavesEndsThePeersWaits) {
  std::vector<Status> statuses(size());
  const int leaver = size() - 1;
  OnEveryRank(size(), [&](int rank) {
    if (rank == leaver) {
      group_[rank].reset();
    } else {
      statuses[rank] = group_[rank]->Barrier(Far());
    }
  });
  bool named = false;
  for (int rank = 0; rank < leaver; ++rank) {
    EXPECT_THAT(statuses[rank], HasCode(StatusCode::kUnavailable));
    named |= statuses[rank].message().find("rank " + std::to_string(leaver)) != std::string::npos;
    ExpectBroken(rank, statuses[rank]);
  }
  EXPECT_TRUE(named) << Text(statuses[0]);
}

// Peers in different operations are a bug above; it must end in an error, not in wrong data.
TEST_P(FailureTest, RanksThatPartWaysFail) {
  std::vector<Status> statuses(size());
  OnEveryRank(size(), [&](int rank) {
    std::vector<uint32_t> send(10 * size()), recv(20 * size());
    const size_t bytes = rank == 0 ? 40 : 44;
    statuses[rank] =
        group_[rank]->AllGather(send.data(), recv.data(), bytes, After(milliseconds(300)));
  });
  for (const Status& s : statuses) EXPECT_THAT(s, Not(IsOk()));
}

INSTANTIATE_TEST_SUITE_P(Groups, FailureTest,
                         testing::Values(GroupParam{Kind::kInProcess, 2},
                                         GroupParam{Kind::kInProcess, 4},
                                         GroupParam{Kind::kGloo, 2}, GroupParam{Kind::kGloo, 4},
                                         GroupParam{Kind::kGloo, 8}, GroupParam{Kind::kTls, 2},
                                         GroupParam{Kind::kTls, 4}, GroupParam{Kind::kTls, 8}),
                         ParamName);

}  // namespace
}  // namespace tributary::collective
