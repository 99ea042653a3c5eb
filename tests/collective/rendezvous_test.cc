// Where ranks meet: both stores, and how forming a group of processes fails.
#include "collective/rendezvous/rendezvous.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netdb.h>
#include <unistd.h>

#include <condition_variable>
#include <filesystem>
#include <fstream>
#include <mutex>

#include "collective/rendezvous/file_rendezvous.h"
#include "tests/collective/group.h"

namespace tributary::collective {
namespace {

using std::chrono::milliseconds;
using testing::HasSubstr;

class TemporaryDirectory {
 public:
  TemporaryDirectory() {
    std::string name = testing::TempDir() + "tributary-XXXXXX";
    path_ = mkdtemp(name.data());
  }
  ~TemporaryDirectory() { std::filesystem::remove_all(path_); }
  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
};

void ExpectKeepsValues(Rendezvous& store) {
  const std::string binary("a\0b\n\xff", 5);
  ASSERT_TRUE(store.Set("group/1/../rank 0%", binary).ok());
  ASSERT_TRUE(store.Set("empty", "").ok());
  std::string value = "old";
  ASSERT_TRUE(store.Get("group/1/../rank 0%", &value, Far()).ok());
  EXPECT_EQ(value, binary);
  ASSERT_TRUE(store.Get("empty", &value, Far()).ok());
  EXPECT_EQ(value, "");
  ASSERT_TRUE(store.Set("empty", "no more").ok());
  ASSERT_TRUE(store.Get("empty", &value, Far()).ok());
  EXPECT_EQ(value, "no more");

  const Status s = store.Get("missing", &value, After(milliseconds(20)));
  EXPECT_EQ(s.code(), StatusCode::kDeadlineExceeded);
  EXPECT_THAT(s.message(), HasSubstr("missing"));
}

void ExpectGetWaitsForSet(Rendezvous& store) {
  std::string value;
  std::thread getter([&] {
    const Status s = store.Get("later", &value, Far());
    EXPECT_TRUE(s.ok()) << Text(s);
  });
  ASSERT_TRUE(store.Set("later", "here").ok());
  getter.join();
  EXPECT_EQ(value, "here");
}

TEST(MemoryRendezvousTest, KeepsValues) {
  MemoryRendezvous store;
  ExpectKeepsValues(store);
}

TEST(MemoryRendezvousTest, GetWaitsForSet) {
  MemoryRendezvous store;
  ExpectGetWaitsForSet(store);
}

TEST(FileRendezvousTest, KeepsValues) {
  const TemporaryDirectory directory;
  FileRendezvous store(directory.path() / "not" / "yet" / "there");
  ExpectKeepsValues(store);
  // Another process sees the same.
  FileRendezvous other(directory.path() / "not" / "yet" / "there");
  std::string value;
  ASSERT_TRUE(other.Get("empty", &value, Far()).ok());
  EXPECT_EQ(value, "no more");
}

TEST(FileRendezvousTest, GetWaitsForSet) {
  const TemporaryDirectory directory;
  FileRendezvous store(directory.path());
  ExpectGetWaitsForSet(store);
}

TEST(FileRendezvousTest, SaysWhereItCannotWrite) {
  const TemporaryDirectory directory;
  std::ofstream(directory.path() / "file") << "in the way";
  FileRendezvous store(directory.path() / "file");
  const Status s = store.Set("key", "value");
  EXPECT_EQ(s.code(), StatusCode::kUnavailable);
  EXPECT_THAT(s.message(), HasSubstr((directory.path() / "file").string()));
}

// ---------------------------------------------------------------------------------------------

// Lets Set through, and holds every Get back until it is released.
class HeldRendezvous final : public Rendezvous {
 public:
  explicit HeldRendezvous(Rendezvous& store) : store_(store) {}

  Status Set(const std::string& key, const std::string& value) override {
    const Status s = store_.Set(key, value);
    std::lock_guard<std::mutex> lock(mutex_);
    published_ = true;
    changed_.notify_all();
    return s;
  }
  Status Get(const std::string& key, std::string* value, Deadline deadline) override {
    {
      std::unique_lock<std::mutex> lock(mutex_);
      changed_.wait(lock, [&] { return released_; });
    }
    return store_.Get(key, value, deadline);
  }
  void AwaitPublished() {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return published_; });
  }
  void Release() {
    std::lock_guard<std::mutex> lock(mutex_);
    released_ = true;
    changed_.notify_all();
  }

 private:
  Rendezvous& store_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool published_ = false;
  bool released_ = false;
};

// Of every transport between processes.
class FormingTest : public testing::TestWithParam<Kind> {
 protected:
  static Status Create(const GroupPlace& place, Rendezvous& rendezvous, Deadline deadline,
                       std::unique_ptr<Communicator>* out) {
    return CreatePeerCommunicator(TransportOf(GetParam()), place, rendezvous, deadline, out);
  }
  // In keys.
  static std::string Room() { return GetParam() == Kind::kTls ? "tls" : "gloo"; }
};

TEST_P(FormingTest, NamesTheRankThatDoesNotPublish) {
  MemoryRendezvous store;
  std::vector<Status> statuses(2);
  OnEveryRank(2, [&](int rank) {
    std::unique_ptr<Communicator> comm;
    statuses[rank] = Create({.rank = rank, .size = 3}, store, After(milliseconds(300)), &comm);
    EXPECT_EQ(comm, nullptr);
  });
  for (const Status& s : statuses) EXPECT_FALSE(s.ok());
  // One of them got as far as asking for rank 2 itself; the other may have lost that one first.
  EXPECT_THAT(statuses[0].message() + statuses[1].message(), HasSubstr("rank 2"));
  EXPECT_TRUE(statuses[0].code() == StatusCode::kDeadlineExceeded ||
              statuses[1].code() == StatusCode::kDeadlineExceeded);
}

// A rank that published its addresses and then hangs: peers on both sides of the TCP connection get
// their deadline.
TEST_P(FormingTest, ConnectingObeysTheDeadline) {
  constexpr int kSize = 4;
  MemoryRendezvous store;
  HeldRendezvous held(store);
  std::vector<Status> statuses(kSize);
  std::vector<std::unique_ptr<Communicator>> comms(kSize);
  std::thread hanging([&] {
    statuses[1] = Create({.rank = 1, .size = kSize}, held, After(milliseconds(300)), &comms[1]);
  });
  held.AwaitPublished();
  OnEveryRank(kSize, [&](int rank) {
    if (rank == 1) return;
    statuses[rank] =
        Create({.rank = rank, .size = kSize}, store, After(milliseconds(300)), &comms[rank]);
  });
  held.Release();
  hanging.join();
  for (int rank = 0; rank < kSize; ++rank) {
    EXPECT_FALSE(statuses[rank].ok()) << rank;
    EXPECT_TRUE(statuses[rank].code() == StatusCode::kDeadlineExceeded ||
                statuses[rank].code() == StatusCode::kUnavailable)
        << Text(statuses[rank]);
    EXPECT_EQ(comms[rank], nullptr);
  }
}

// What a rank published under an epoch that failed leads nowhere: an error, not a hang.
TEST_P(FormingTest, AnAddressOfTheDeadEndsInAnError) {
  MemoryRendezvous store;
  std::unique_ptr<Communicator> comm;
  Status s = Create({.rank = 1, .size = 2}, store, After(milliseconds(50)), &comm);
  EXPECT_EQ(s.code(), StatusCode::kDeadlineExceeded) << Text(s);
  s = Create({.rank = 0, .size = 2}, store, After(milliseconds(300)), &comm);
  EXPECT_TRUE(s.code() == StatusCode::kDeadlineExceeded || s.code() == StatusCode::kUnavailable)
      << Text(s);
  EXPECT_THAT(s.message(), HasSubstr("rank 1"));
  EXPECT_EQ(comm, nullptr);
}

TEST_P(FormingTest, RefusesAGroupOfAnotherSize) {
  MemoryRendezvous store;
  std::vector<Status> statuses(2);
  OnEveryRank(2, [&](int rank) {
    std::unique_ptr<Communicator> comm;
    statuses[rank] =
        Create({.rank = rank, .size = 2 + rank}, store, After(milliseconds(500)), &comm);
  });
  EXPECT_EQ(statuses[0].code(), StatusCode::kFailedPrecondition) << Text(statuses[0]);
  EXPECT_THAT(statuses[0].message(), HasSubstr("rank 1 expects a group of 3 ranks"));
  EXPECT_FALSE(statuses[1].ok());
}

TEST_P(FormingTest, RefusesWhatSomebodyElsePublished) {
  for (const std::string garbage : {"", "hello", "2\nshort", "2\n"}) {
    MemoryRendezvous store;
    ASSERT_TRUE(store.Set("tributary/" + Room() + "/5/1", garbage).ok());
    std::unique_ptr<Communicator> comm;
    const Status s =
        Create({.rank = 0, .size = 2, .epoch = 5}, store, After(milliseconds(500)), &comm);
    EXPECT_EQ(s.code(), StatusCode::kInternal) << garbage << " -> " << Text(s);
    EXPECT_THAT(s.message(), HasSubstr("rank 1"));
  }
}

TEST_P(FormingTest, RefusesBadOptions) {
  MemoryRendezvous store;
  std::unique_ptr<Communicator> comm;
  Status s = Create({.rank = 0, .size = 0}, store, Far(), &comm);
  EXPECT_EQ(s.code(), StatusCode::kInvalidArgument);
  EXPECT_THAT(s.message(), HasSubstr("size"));
  s = Create({.rank = 2, .size = 2}, store, Far(), &comm);
  EXPECT_EQ(s.code(), StatusCode::kInvalidArgument);
  EXPECT_THAT(s.message(), HasSubstr("rank 2"));
  s = Create({.rank = 0, .size = 2, .host = "no-such-host.invalid"}, store, Far(), &comm);
  EXPECT_EQ(s.code(), StatusCode::kInvalidArgument);
  EXPECT_THAT(s.message(), HasSubstr("no-such-host.invalid"));
  // TEST-NET-1 (RFC 5737) is nobody's address.
  s = Create({.rank = 0, .size = 2, .host = "192.0.2.1"}, store, Far(), &comm);
  EXPECT_EQ(s.code(), StatusCode::kInvalidArgument);
  EXPECT_THAT(s.message(), HasSubstr("192.0.2.1"));
}

TEST_P(FormingTest, ListensOnTheHostGiven) {
  for (const char* host : {"localhost", "127.0.0.2"}) {
    MemoryRendezvous store;
    OnEveryRank(2, [&](int rank) {
      std::unique_ptr<Communicator> comm;
      const Status s = Create({.rank = rank, .size = 2, .host = host}, store, Far(), &comm);
      EXPECT_TRUE(s.ok()) << "host '" << host << "': " << Text(s);
    });
  }
}

// A container's name need not resolve: then the error says which name that was.
TEST_P(FormingTest, WithoutAHostListensOnTheMachinesName) {
  char name[256] = {};
  ASSERT_EQ(gethostname(name, sizeof(name) - 1), 0);
  addrinfo hints = {};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* addresses = nullptr;
  const bool resolves = getaddrinfo(name, nullptr, &hints, &addresses) == 0;
  if (resolves) freeaddrinfo(addresses);

  MemoryRendezvous store;
  OnEveryRank(2, [&](int rank) {
    std::unique_ptr<Communicator> comm;
    const Status s = Create({.rank = rank, .size = 2, .host = ""}, store, Far(), &comm);
    if (resolves) {
      EXPECT_TRUE(s.ok()) << Text(s);
    } else {
      EXPECT_EQ(s.code(), StatusCode::kInvalidArgument) << Text(s);
      EXPECT_THAT(s.message(), HasSubstr(name));
    }
  });
}

// Two generations in one store, formed at the same time by the same ranks, stay apart.
TEST_P(FormingTest, EpochsShareAStore) {
  constexpr int kSize = 3;
  MemoryRendezvous store;
  std::vector<std::unique_ptr<Communicator>> first(kSize), second(kSize);
  OnEveryRank(2 * kSize, [&](int i) {
    const int rank = i % kSize;
    const bool is_first = i < kSize;
    const Status s = Create({.rank = rank, .size = kSize, .epoch = is_first ? 8u : 9u}, store,
                            Far(), is_first ? &first[rank] : &second[rank]);
    EXPECT_TRUE(s.ok()) << Text(s);
  });
  first[0]->Abort("epoch 8 is over");
  OnEveryRank(kSize, [&](int rank) {
    EXPECT_FALSE(first[rank]->Barrier(Far()).ok());
    std::vector<int> all(kSize);
    const Status s = second[rank]->AllGather(&rank, all.data(), sizeof(int), Far());
    EXPECT_TRUE(s.ok()) << Text(s);
    EXPECT_THAT(all, testing::ElementsAre(0, 1, 2));
  });
}

INSTANTIATE_TEST_SUITE_P(Transports, FormingTest, testing::Values(Kind::kGloo, Kind::kTls),
                         [](const auto& test) { return Name(test.param); });

TEST(TransportTest, RanksThatSpeakDifferentlyAreNamed) {
  MemoryRendezvous store;
  std::vector<Status> statuses(3);
  OnEveryRank(3, [&](int rank) {
    const Transport own = rank == 1 ? Transport::kGloo : Transport::kTls;
    statuses[rank] = AgreeOnTransport(own, {.rank = rank, .size = 3}, store, Far());
  });
  for (const Status& s : statuses) EXPECT_EQ(s.code(), StatusCode::kFailedPrecondition) << Text(s);
  EXPECT_EQ(statuses[0].message(),
            "rank 1 reaches its peers by Gloo over TCP, rank 0 by TCP under TLS 1.3");
  EXPECT_EQ(statuses[1].message(),
            "rank 0 reaches its peers by TCP under TLS 1.3, rank 1 by Gloo over TCP");
}

TEST(TransportTest, RanksThatSpeakAlikeAgree) {
  MemoryRendezvous store;
  OnEveryRank(3, [&](int rank) {
    const Status s =
        AgreeOnTransport(Transport::kTls, {.rank = rank, .size = 3, .epoch = 4}, store, Far());
    EXPECT_TRUE(s.ok()) << Text(s);
  });
  // A rank that never says anything is named.
  const Status s = AgreeOnTransport(Transport::kTls, {.rank = 0, .size = 2, .epoch = 5}, store,
                                    After(milliseconds(20)));
  EXPECT_EQ(s.code(), StatusCode::kDeadlineExceeded);
  EXPECT_THAT(s.message(), HasSubstr("rank 1"));
}

}  // namespace
}  // namespace tributary::collective
