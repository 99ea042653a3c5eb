// What every communicator does when all ranks come: each operation, over sizes and element counts.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <random>

#include "tests/collective/group.h"

namespace tributary::collective {
namespace {

std::vector<size_t> Counts() {
#ifdef TRIBUTARY_SHORT_GRID
  return {0, 1, 33, 5000};
#else
  return {0, 1, 33, 1000, 1 << 18};
#endif
}

// Element i of the part that goes from `from` to `to`, different in every place.
uint32_t Pattern(int from, int to, size_t i) {
  return static_cast<uint32_t>(i) * 2654435761u + static_cast<uint32_t>(from * 64 + to);
}

constexpr uint32_t kPoison = 0xdeadbeef;

// Memory of an operation with a guard behind it.
class Words {
 public:
  explicit Words(size_t n) : n_(n), words_(n + 4, kPoison) {}
  uint32_t* data() { return words_.data(); }
  uint32_t& operator[](size_t i) { return words_[i]; }

  void ExpectGuardIntact() const {
    for (size_t i = n_; i < words_.size(); ++i) EXPECT_EQ(words_[i], kPoison) << "written past end";
  }

 private:
  size_t n_;
  std::vector<uint32_t> words_;
};

class CommunicatorTest : public testing::TestWithParam<GroupParam> {
 protected:
  void SetUp() override { group_ = MakeGroup(GetParam().kind, size(), 7); }
  void TearDown() override { Destroy(group_); }

  int size() const { return GetParam().size; }

  // For every count, on every rank.
  void ForEachCount(const std::function<void(int rank, Communicator&, size_t count)>& body) {
    OnEveryRank(size(), [&](int rank) {
      for (const size_t count : Counts()) {
        SCOPED_TRACE(testing::Message() << "rank " << rank << ", " << count << " elements");
        body(rank, *group_[rank], count);
      }
    });
  }

  Group group_;
};

TEST_P(CommunicatorTest, KnowsItsPlace) {
  for (int r = 0; r < size(); ++r) {
    EXPECT_EQ(group_[r]->rank(), r);
    EXPECT_EQ(group_[r]->size(), size());
    EXPECT_EQ(group_[r]->epoch(), 7u);
  }
}

TEST_P(CommunicatorTest, AllGather) {
  ForEachCount([&](int rank, Communicator& comm, size_t count) {
    Words send(count), recv(count * size());
    for (size_t i = 0; i < count; ++i) send[i] = Pattern(rank, 0, i);
    const Status s = comm.AllGather(send.data(), recv.data(), count * sizeof(uint32_t), Far());
    ASSERT_TRUE(s.ok()) << Text(s);
    for (int from = 0; from < size(); ++from) {
      for (size_t i = 0; i < count; ++i) {
        ASSERT_EQ(recv[from * count + i], Pattern(from, 0, i)) << "from " << from << " at " << i;
      }
    }
    recv.ExpectGuardIntact();
  });
}

TEST_P(CommunicatorTest, AllToAll) {
  ForEachCount([&](int rank, Communicator& comm, size_t count) {
    Words send(count * size()), recv(count * size());
    for (int to = 0; to < size(); ++to) {
      for (size_t i = 0; i < count; ++i) send[to * count + i] = Pattern(rank, to, i);
    }
    const Status s = comm.AllToAll(send.data(), recv.data(), count * sizeof(uint32_t), Far());
    ASSERT_TRUE(s.ok()) << Text(s);
    for (int from = 0; from < size(); ++from) {
      for (size_t i = 0; i < count; ++i) {
        ASSERT_EQ(recv[from * count + i], Pattern(from, rank, i)) << "from " << from << " at " << i;
      }
    }
    recv.ExpectGuardIntact();
  });
}

// Values whose sum depends on the order in which they are added.
float Term(int from, int to, size_t i) {
  static constexpr float kScales[] = {1.0f, 3e7f, -3e7f, 1e-3f};
  return kScales[(from + i) % 4] * (1.0f + static_cast<float>(to + i % 17));
}

TEST_P(CommunicatorTest, ReduceScatterAddsInRankOrder) {
  ForEachCount([&](int rank, Communicator& comm, size_t count) {
    std::vector<float> send(count * size()), recv(count + 1, -7.0f);
    for (int to = 0; to < size(); ++to) {
      for (size_t i = 0; i < count; ++i) send[to * count + i] = Term(rank, to, i);
    }
    const Status s = comm.ReduceScatter(send.data(), recv.data(), count, Far());
    ASSERT_TRUE(s.ok()) << Text(s);
    for (size_t i = 0; i < count; ++i) {
      float sum = Term(0, rank, i);
      for (int from = 1; from < size(); ++from) sum += Term(from, rank, i);
      ASSERT_EQ(recv[i], sum) << "at " << i;
    }
    EXPECT_EQ(recv[count], -7.0f) << "written past end";
  });
}

TEST_P(CommunicatorTest, GatherToEveryRoot) {
  for (int root = 0; root < size(); ++root) {
    ForEachCount([&](int rank, Communicator& comm, size_t count) {
      Words send(count), recv(count * size());
      for (size_t i = 0; i < count; ++i) send[i] = Pattern(rank, root, i);
      const Status s = comm.Gather(send.data(), rank == root ? recv.data() : nullptr,
                                   count * sizeof(uint32_t), root, Far());
      ASSERT_TRUE(s.ok()) << Text(s);
      if (rank == root) {
        for (int from = 0; from < size(); ++from) {
          for (size_t i = 0; i < count; ++i) {
            ASSERT_EQ(recv[from * count + i], Pattern(from, root, i)) << "from " << from;
          }
        }
      }
      recv.ExpectGuardIntact();
    });
  }
}

TEST_P(CommunicatorTest, RefusesARootOutsideTheGroup) {
  for (const int root : {-1, size()}) {
    uint32_t word = 0;
    const Status s = group_[0]->Gather(&word, &word, sizeof(word), root, Far());
    EXPECT_EQ(s.code(), StatusCode::kInvalidArgument);
    EXPECT_THAT(s.message(), testing::HasSubstr("root"));
  }
  // Nothing was entered, so nothing is broken.
  OnEveryRank(size(), [&](int rank) { EXPECT_TRUE(group_[rank]->Barrier(Far()).ok()); });
}

// Nobody leaves a barrier before everybody has entered it.
TEST_P(CommunicatorTest, BarrierHoldsAllBack) {
  std::atomic<int> entered = 0;
  OnEveryRank(size(), [&](int rank) {
    for (int round = 1; round <= 20; ++round) {
      ++entered;
      ASSERT_TRUE(group_[rank]->Barrier(Far()).ok());
      EXPECT_GE(entered.load(), round * size());
      ASSERT_TRUE(group_[rank]->Barrier(Far()).ok());  // nobody runs ahead into the next round
    }
  });
}

// All ranks draw the same operations; each arrives when it arrives.
TEST_P(CommunicatorTest, MixedOperationsStayMatched) {
#ifdef TRIBUTARY_SHORT_GRID
  constexpr int kOperations = 60;
#else
  constexpr int kOperations = 400;
#endif
  OnEveryRank(size(), [&](int rank) {
    std::mt19937 shared(99), own(rank);
    Communicator& comm = *group_[rank];
    for (int op = 0; op < kOperations; ++op) {
      const size_t count = shared() % 300;
      const int root = static_cast<int>(shared() % size());
      for (uint32_t n = own() % 4; n > 0; --n) std::this_thread::yield();
      std::vector<uint32_t> send(count * size()), recv(count * size(), kPoison);
      for (int to = 0; to < size(); ++to) {
        for (size_t i = 0; i < count; ++i) send[to * count + i] = Pattern(rank, to, i + op);
      }
      const size_t bytes = count * sizeof(uint32_t);
      Status s;
      int part = 0;  // the part of each peer's `send` that comes here
      bool receives = true;
      switch (shared() % 4) {
        case 0:
          s = comm.AllGather(send.data(), recv.data(), bytes, Far());
          break;
        case 1:
          s = comm.AllToAll(send.data(), recv.data(), bytes, Far());
          part = rank;
          break;
        case 2:
          s = comm.Gather(send.data(), recv.data(), bytes, root, Far());
          receives = rank == root;
          break;
        case 3:
          s = comm.Barrier(Far());
          receives = false;
          break;
      }
      ASSERT_TRUE(s.ok()) << Text(s);
      for (int from = 0; receives && from < size(); ++from) {
        for (size_t i = 0; i < count; ++i) {
          ASSERT_EQ(recv[from * count + i], Pattern(from, part, i + op)) << "operation " << op;
        }
      }
    }
  });
}

// A rank may go as soon as its last operation is over; its peers still finish theirs.
TEST_P(CommunicatorTest, ARankMayLeaveAfterItsLastOperation) {
#ifdef TRIBUTARY_SHORT_GRID
  constexpr int kRounds = 2;
#else
  constexpr int kRounds = 5;
#endif
  for (int round = 0; round < kRounds; ++round) {
    Group group = MakeGroup(GetParam().kind, size(), 100 + round);
    OnEveryRank(size(), [&](int rank) {
      std::vector<uint32_t> send(30000, rank), recv(30000 * size());
      Status s =
          group[rank]->AllGather(send.data(), recv.data(), send.size() * sizeof(uint32_t), Far());
      EXPECT_TRUE(s.ok()) << Text(s);
      s = group[rank]->Barrier(Far());
      EXPECT_TRUE(s.ok()) << Text(s);
      group[rank].reset();
    });
  }
}

INSTANTIATE_TEST_SUITE_P(Groups, CommunicatorTest, testing::ValuesIn(AllGroups()), ParamName);

}  // namespace
}  // namespace tributary::collective
