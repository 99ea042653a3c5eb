#include "worker/host_memory.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <map>
#include <string>

#include "worker/host_memory_ledger.h"

namespace tributary::worker {
namespace {

constexpr size_t kGiB = size_t{1} << 30;

class HostMemoryTest : public ::testing::Test {
 protected:
  size_t Available() const {
    return AvailableHostMemory([this](const std::string& path) -> std::optional<std::string> {
      const auto found = files_.find(path);
      if (found == files_.end()) return std::nullopt;
      return found->second;
    });
  }
  void Group(const std::string& directory, const std::string& limit, size_t used,
             const std::string& stat = "") {
    files_[directory + "/memory.max"] = limit + "\n";
    files_[directory + "/memory.current"] = std::to_string(used) + "\n";
    files_[directory + "/memory.stat"] = stat;
  }
  void OldGroup(const std::string& directory, size_t limit, size_t used,
                const std::string& stat = "") {
    files_[directory + "/memory.limit_in_bytes"] = std::to_string(limit) + "\n";
    files_[directory + "/memory.usage_in_bytes"] = std::to_string(used) + "\n";
    files_[directory + "/memory.stat"] = stat;
  }

  std::map<std::string, std::string> files_ = {
      {"/proc/meminfo",
       "MemTotal:       67108864 kB\nMemFree:         1048576 kB\nMemAvailable:   33554432 kB\n"}};
};

TEST_F(HostMemoryTest, NothingKnownIsNoLimit) {
  files_.clear();
  EXPECT_EQ(Available(), SIZE_MAX);
  files_["/proc/meminfo"] = "nonsense\n";
  EXPECT_EQ(Available(), SIZE_MAX);
}

TEST_F(HostMemoryTest, WithoutControlGroupsItIsTheMachines) { EXPECT_EQ(Available(), 32 * kGiB); }

TEST_F(HostMemoryTest, TheSmallerOfMachineAndContainerCounts) {
  Group("/sys/fs/cgroup", std::to_string(8 * kGiB), 3 * kGiB);
  EXPECT_EQ(Available(), 5 * kGiB);
  Group("/sys/fs/cgroup", std::to_string(80 * kGiB), 3 * kGiB);
  EXPECT_EQ(Available(), 32 * kGiB);
  Group("/sys/fs/cgroup", "max", 3 * kGiB);
  EXPECT_EQ(Available(), 32 * kGiB);
}

TEST_F(HostMemoryTest, PagesThatTheKernelDropsFirstAreFree) {
  Group("/sys/fs/cgroup", std::to_string(8 * kGiB), 7 * kGiB,
        "anon 1\ninactive_anon 5\ninactive_file " + std::to_string(4 * kGiB) + "\nactive_file 9\n");
  EXPECT_EQ(Available(), 5 * kGiB);
}

TEST_F(HostMemoryTest, AGroupThatIsFullLeavesNothing) {
  Group("/sys/fs/cgroup", std::to_string(2 * kGiB), 3 * kGiB);
  EXPECT_EQ(Available(), 0u);
}

TEST_F(HostMemoryTest, GroupsAroundItsOwnCountToo) {
  files_["/proc/self/cgroup"] = "0::/system.slice/tributary.service\n";
  Group("/sys/fs/cgroup/system.slice/tributary.service", std::to_string(9 * kGiB), kGiB);
  EXPECT_EQ(Available(), 8 * kGiB);
  Group("/sys/fs/cgroup/system.slice", std::to_string(10 * kGiB), 4 * kGiB);
  EXPECT_EQ(Available(), 6 * kGiB);
}

TEST_F(HostMemoryTest, APathOfTheHostsIsLookedForInVain) {
  files_["/proc/self/cgroup"] = "0::/kubepods/pod1/abc\n";
  Group("/sys/fs/cgroup", std::to_string(8 * kGiB), kGiB);
  EXPECT_EQ(Available(), 7 * kGiB);
}

TEST_F(HostMemoryTest, TheFirstVersionOfControlGroups) {
  files_["/proc/self/cgroup"] = "12:cpu,cpuacct:/a\n5:memory:/docker/abc\n1:name=systemd:/a\n";
  constexpr size_t kNoLimit = 9223372036854771712u;
  OldGroup("/sys/fs/cgroup/memory", kNoLimit, 20 * kGiB);
  EXPECT_EQ(Available(), 32 * kGiB);
  OldGroup("/sys/fs/cgroup/memory/docker/abc", 6 * kGiB, 4 * kGiB,
           "inactive_file 1\ntotal_inactive_file " + std::to_string(kGiB) + "\n");
  EXPECT_EQ(Available(), 3 * kGiB);
}

TEST_F(HostMemoryTest, LinesThatAreNoGroupsAreLetBe) {
  files_["/proc/self/cgroup"] = "\nnonsense\n:\n0:\n0::\n0::relative\n";
  Group("/sys/fs/cgroup", std::to_string(8 * kGiB), kGiB);
  EXPECT_EQ(Available(), 7 * kGiB);
}

TEST(HostMemory, ThisMachineHasSome) {
  EXPECT_GT(AvailableHostMemory(), size_t{1} << 20);
  EXPECT_LT(AvailableHostMemory(), SIZE_MAX) << "Linux says how much";
}

// ---- claims -------------------------------------------------------------------------------------

TEST(HostMemoryLedgerTest, LeavesAMargin) {
  EXPECT_EQ(MemoryMargin(0), size_t{64} << 20);
  EXPECT_EQ(MemoryMargin(size_t{8} << 30), size_t{256} << 20);
  EXPECT_EQ(MemoryMargin(size_t{1} << 40), size_t{1} << 30);
}

// Three ranks of a machine that has room for two, as they look at the same moment.
TEST(HostMemoryLedgerTest, WhatOthersAreTakingIsNotThereForTheNext) {
  size_t available = 24 * kGiB;
  const auto ledger = HostMemoryLedger::Create([&] { return available; });
  auto first = ledger->Take(10 * kGiB);
  ASSERT_TRUE(first.ok());
  auto second = ledger->Take(10 * kGiB);
  ASSERT_TRUE(second.ok());
  const absl::Status third = ledger->Take(10 * kGiB).status();
  EXPECT_EQ(third.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(third.message()), ::testing::HasSubstr(std::to_string(20 * kGiB)));
  // What is taken shows in the machine's memory, and is not counted twice.
  (*first)->Taken(10 * kGiB);
  available -= 10 * kGiB;
  EXPECT_EQ(ledger->Available(), 4 * kGiB - MemoryMargin(available));
  // A claim that is given up, or was never more than a claim, is room again.
  second->reset();
  EXPECT_EQ(ledger->Available(), 14 * kGiB - MemoryMargin(available));
  EXPECT_TRUE(ledger->Take(10 * kGiB).ok());
}

// A cache that follows another one finds its room, while the other's memory is being given back.
TEST(HostMemoryLedgerTest, WhatIsBeingGivenBackIsThereForTheNext) {
  size_t available = 8 * kGiB;
  const auto ledger = HostMemoryLedger::Create([&] { return available; });
  {
    HostMemoryLedger::Returning returning(ledger, 10 * kGiB);
    EXPECT_EQ(ledger->Available(), 18 * kGiB - MemoryMargin(18 * kGiB));
    available += 4 * kGiB;
    returning.Returned(4 * kGiB);
    EXPECT_EQ(ledger->Available(), 18 * kGiB - MemoryMargin(18 * kGiB)) << "nothing counts twice";
  }
  EXPECT_EQ(ledger->Available(), 12 * kGiB - MemoryMargin(available));
}

TEST(HostMemoryLedgerTest, StopsWhenOtherProcessesAreFaster) {
  size_t available = size_t{8} << 30;
  const auto ledger = HostMemoryLedger::Create([&] { return available; });
  auto claim = ledger->Take(size_t{4} << 30);
  ASSERT_TRUE(claim.ok());
  EXPECT_TRUE((*claim)->CheckRoom().ok());
  available = size_t{100} << 20;
  EXPECT_EQ((*claim)->CheckRoom().code(), absl::StatusCode::kResourceExhausted);
}

TEST(HostMemoryLedgerTest, KnowsNoBoundWhereTheMachineSaysNone) {
  const auto ledger = HostMemoryLedger::Create([] { return std::numeric_limits<size_t>::max(); });
  EXPECT_TRUE(ledger->Take(size_t{1} << 60).ok());
}

}  // namespace
}  // namespace tributary::worker
