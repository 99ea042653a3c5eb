// Workers of two builds in one group, as they are while a service is upgraded: the program of this
// build, and one that speaks the protocol version before. Every answer is checked against float64
// attention.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <csignal>
#include <memory>
#include <string>

#include "tests/fault/fleet.h"
#include "worker/rpc/protocol.h"

namespace tributary::test {
namespace {

using ::testing::HasSubstr;

class MixedBuilds : public Fleet {
 protected:
  MixedBuilds() : Fleet({.workers = 2, .coordinator_flags = {"--replicas=1"}}) {}

  // The worker of a rank ends as an upgrade ends it, and one of another build takes its place.
  void Replace(int rank, Build build) {
    workers_[rank]->Signal(SIGTERM);
    ASSERT_EQ(workers_[rank]->Wait(kPatience), 0);
    workers_[rank] = Worker(rank, {}, build);
  }

  bool WaitWhole(uint64_t epoch) {
    return Eventually(kPatience, [&] {
      const v1::GetTopologyReply topology = Topology();
      return topology.state() == v1::GROUP_STATE_READY && topology.epoch() >= epoch &&
             topology.caches_size() == 1 && topology.caches(0).pages_restoring() == 0 &&
             topology.caches(0).pages_without_replica() == 0;
    });
  }
};

// Each worker in its turn becomes one of the other build, under load, and then one of this build
// again: what was held is held all along.
TEST_F(MixedBuilds, AreUpgradedOneAfterTheOther) {
  Load load(stub_, /*long_hosts=*/2, /*short_hosts=*/1);
  ASSERT_TRUE(load.WaitOk(5));
  uint64_t epoch = 1;
  for (const Build build : {Build::kPrevious, Build::kThis}) {
    for (int rank = 0; rank < 2; ++rank) {
      Replace(rank, build);
      ASSERT_TRUE(WaitWhole(++epoch));
      ASSERT_TRUE(load.WaitOk(5));
    }
  }
  load.Stop();
  for (size_t i = 0; i < load.hosts().size(); ++i) EXPECT_EQ(load.counts(i).lost, 0) << i;
  ExpectPagesAccountedFor(load.hosts());
}

TEST_F(MixedBuilds, AreShown) {
  const v1::GetTopologyReply before = Topology();
  Replace(1, Build::kPrevious);
  ASSERT_TRUE(WaitWhole(2));
  const v1::GetTopologyReply topology = Topology();
  EXPECT_EQ(topology.version(), before.version());
  EXPECT_EQ(topology.workers(0).version(), topology.version());
  EXPECT_EQ(topology.workers(0).protocol_version(), worker::kProtocolVersion);
  EXPECT_EQ(topology.workers(1).version(), "0.0.9-gprevious");
  EXPECT_EQ(topology.workers(1).protocol_version(), worker::kProtocolVersion - 1);
  EXPECT_THAT(coordinator_->Log(), HasSubstr("workers are of other builds than the coordinator"));
  EXPECT_THAT(coordinator_->Log(), HasSubstr("rank 1: 0.0.9-gprevious"));
  EXPECT_THAT(workers_[1]->Log(),
              HasSubstr("protocol version " + std::to_string(worker::kProtocolVersion - 1)));
}

}  // namespace
}  // namespace tributary::test
