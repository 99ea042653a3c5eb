// The coordinator is killed and started again: workers keep their shards, and sequences go on where
// they were. Every answer is checked against float64 attention; nothing is sent again but calls
// whose outcome was unknown.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "service/client/client.h"
#include "tests/fault/fleet.h"

namespace tributary::test {
namespace {

using std::chrono::seconds;
using ::testing::HasSubstr;

// Made before the fleet that is told of it.
struct StateDirectory {
  TemporaryDirectory state;
};

class CoordinatorRestart : protected StateDirectory, public Fleet {
 protected:
  explicit CoordinatorRestart(const std::vector<std::string>& worker_flags = {})
      : Fleet({.workers = 3,
               .coordinator_flags = {"--state_dir=" + state.File(".")},
               .worker_flags = worker_flags}) {}

  void Kill() {
    coordinator_->Signal(SIGKILL);
    ASSERT_EQ(coordinator_->Wait(kPatience), -SIGKILL);
  }
  uint64_t GroupId() {
    grpc::ClientContext context;
    v1::GetLimitsReply reply;
    EXPECT_TRUE(stub_->GetLimits(&context, {}, &reply).ok());
    return reply.group_id();
  }
  std::string Journal() const { return state.File("journal.db"); }
  // A sequence of `tokens` tokens.
  std::unique_ptr<SequenceHost> Host(uint64_t id, int tokens) {
    auto host = std::make_unique<SequenceHost>(stub_, id);
    EXPECT_TRUE(host->Open().ok());
    EXPECT_TRUE(host->Step(tokens).ok());
    return host;
  }
};

TEST_F(CoordinatorRestart, SequencesGoOnUnderLoad) {
  Load load(stub_, /*long_hosts=*/4, /*short_hosts=*/2);
  for (uint64_t life = 2; life < 5; ++life) {
    ASSERT_TRUE(load.WaitOk(5));
    Kill();
    Coordinate();
    ASSERT_TRUE(WaitReady(life));
  }
  ASSERT_TRUE(load.WaitOk(10));
  load.Stop();
  for (size_t i = 0; i < load.hosts().size(); ++i) EXPECT_EQ(load.counts(i).lost, 0) << i;
  ExpectPagesAccountedFor(load.hosts());
}

TEST_F(CoordinatorRestart, ForksTruncationsAndClosesAreKept) {
  const auto parent = Host(1, 100);
  const auto closed = Host(2, 50);
  SequenceHost child(stub_, 3);
  ASSERT_TRUE(parent->Fork(&child, 70).ok());
  ASSERT_TRUE(parent->Truncate(90).ok());
  ASSERT_TRUE(closed->Close().ok());
  const int64_t pages = Topology().caches(0).pages_used();
  const uint64_t group = GroupId();
  Kill();
  Coordinate();
  ASSERT_TRUE(WaitReady(2));
  EXPECT_EQ(GroupId(), group);
  EXPECT_EQ(Topology().caches(0).sequences(), 2);
  EXPECT_EQ(Topology().caches(0).pages_used(), pages);

  SequenceHost again(stub_, 2);
  EXPECT_EQ(again.Close().error_code(), grpc::StatusCode::NOT_FOUND);
  // Both write to the page that they share, and neither sees what the other wrote.
  ASSERT_TRUE(Eventually(kPatience, [&] { return parent->Look(4).ok(); })) << "over a new channel";
  EXPECT_TRUE(parent->Step(20).ok());
  EXPECT_TRUE(child.Step(20).ok());
  EXPECT_TRUE(parent->Step(3).ok());
  EXPECT_TRUE(child.Look(4).ok());
  EXPECT_TRUE(parent->Close().ok());
  EXPECT_TRUE(child.Close().ok());
  EXPECT_EQ(Topology().caches(0).pages_used(), 0);
}

// The journal knows what belongs to which lease: a host finds its sequences again, and those of
// hosts that do not come back are closed.
TEST_F(CoordinatorRestart, LeasesAreKept) {
  const auto host_with = [&](const std::string& lease) {
    auto host = client::Client::Connect({.target = PublicAddress(directory_), .lease = lease});
    EXPECT_TRUE(host.ok()) << host.status();
    return *std::move(host);
  };
  const auto unleased = Host(1, 40);
  const uint64_t first = *host_with("a")->ForkSequence(kCacheId, unleased->id(), std::nullopt);
  const uint64_t second = *host_with("b")->ForkSequence(kCacheId, unleased->id(), std::nullopt);
  Kill();
  Coordinate();
  ASSERT_TRUE(WaitReady(2));
  for (const auto& [lease, sequence] : {std::pair{"a", first}, std::pair{"b", second}}) {
    const auto leased = host_with(lease)->LeasedSequences();
    ASSERT_TRUE(leased.ok()) << leased.status();
    ASSERT_EQ(leased->size(), 1u);
    EXPECT_EQ(leased->front().sequence_id(), sequence);
    EXPECT_EQ(leased->front().length(), 40);
  }
  Kill();
  Coordinate({"--lease_timeout=200ms"});
  ASSERT_TRUE(WaitReady(3));
  EXPECT_TRUE(Eventually(kPatience, [&] { return Topology().caches(0).sequences() == 1; }));
  ASSERT_TRUE(Eventually(kPatience, [&] { return unleased->Look(4).ok(); }));
}

TEST_F(CoordinatorRestart, AWorkerThatWentMeanwhileLosesItsShareOnly) {
  const auto everywhere = Host(1, 100);
  const auto first_rank = Host(2, 10);
  Kill();
  workers_[2]->Signal(SIGKILL);
  ASSERT_EQ(workers_[2]->Wait(kPatience), -SIGKILL);
  workers_[2] = Worker(2);
  Coordinate();
  ASSERT_TRUE(WaitReady(2));
  ASSERT_TRUE(Eventually(kPatience, [&] { return first_rank->Look(4).ok(); }));
  EXPECT_TRUE(first_rank->Step(1).ok());
  EXPECT_EQ(everywhere->Step(1).error_code(), grpc::StatusCode::DATA_LOSS);
}

TEST_F(CoordinatorRestart, AJournalOfGarbageLosesSequencesAndGivesNoWrongAnswer) {
  const auto host = Host(1, 100);
  Kill();
  for (const char* suffix : {"", "-wal"}) {
    std::ofstream(Journal() + suffix, std::ios::trunc) << std::string(50'000, 'x');
  }
  Coordinate();
  ASSERT_TRUE(WaitReady(1));
  EXPECT_THAT(coordinator_->Log(), HasSubstr("put aside"));
  ASSERT_TRUE(Eventually(kPatience, [&] {
    return host->Look(4).error_code() == grpc::StatusCode::NOT_FOUND;
  })) << "the cache is not there";
  ASSERT_TRUE(CreateCache().ok());
  EXPECT_EQ(host->Look(4).error_code(), grpc::StatusCode::NOT_FOUND);
  host->Forget();
  ASSERT_TRUE(host->Open().ok());
  EXPECT_TRUE(host->Step(40).ok());
}

TEST_F(CoordinatorRestart, AnOlderJournalIsCaughtUpWithByTheWorkers) {
  const auto host = Host(1, 100);
  const auto copy = [](const std::string& from, const std::string& to) {
    for (const char* suffix : {"", "-wal"}) {
      std::filesystem::copy_file(from + suffix, to + suffix,
                                 std::filesystem::copy_options::overwrite_existing);
    }
  };
  const std::string old = directory_.File("old");
  copy(Journal(), old);
  Kill();
  Coordinate();
  ASSERT_TRUE(WaitReady(2));
  ASSERT_TRUE(Eventually(kPatience, [&] { return host->Step(30).ok(); }));
  Kill();
  copy(old, Journal());
  Coordinate();
  ASSERT_TRUE(WaitReady(3)) << "not 2 again";
  ASSERT_TRUE(Eventually(kPatience, [&] { return host->Look(4).ok(); }));
  EXPECT_TRUE(host->Step(3).ok());
}

TEST_F(CoordinatorRestart, ASecondCoordinatorIsNotLetIn) {
  auto second = StartCoordinator(
      directory_, 3,
      {"--state_dir=" + state.File("."), "--listen=unix:" + directory_.File("second.sock"),
       "--worker_listen=unix:" + directory_.File("second_workers.sock")});
  EXPECT_EQ(second->Wait(kPatience), 1);
  EXPECT_THAT(second->Log(), HasSubstr("another coordinator uses"));
  EXPECT_TRUE(Host(1, 20)->Look(2).ok());
}

class OrphansTest : public CoordinatorRestart {
 protected:
  OrphansTest() : CoordinatorRestart({"--orphan_timeout=1s"}) {}
};

TEST_F(OrphansTest, ShardsAreDroppedWhenTheCoordinatorStaysAway) {
  const auto host = Host(1, 100);
  Kill();
  ASSERT_TRUE(Eventually(kPatience, [&] {
    for (const auto& worker : workers_) {
      if (worker->Log().find("shards are dropped") == std::string::npos) return false;
    }
    return true;
  }));
  Coordinate();
  ASSERT_TRUE(WaitReady(2));
  ASSERT_TRUE(Eventually(
      kPatience, [&] { return host->Look(4).error_code() == grpc::StatusCode::NOT_FOUND; }));
}

}  // namespace
}  // namespace tributary::test
