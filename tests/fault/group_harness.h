// A remote group without a coordinator around it: what it tells is kept, and commands are waited
// for.
#pragma once

#include <grpcpp/server.h>

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "service/workers/remote_group.h"
#include "tests/support/process.h"
#include "tests/worker/ranks.h"

namespace tributary::test {

// A service::RemoteGroup behind a Unix socket.
class GroupHarness : private service::GroupObserver {
 public:
  struct Formed {
    uint64_t epoch = 0;
    std::vector<bool> fresh;
  };

  // Short heartbeats: silence shows within two seconds.
  static service::RemoteGroupOptions Options(int size);
  explicit GroupHarness(const service::RemoteGroupOptions& options);
  ~GroupHarness() override;

  service::RemoteGroup& group() { return *group_; }
  const TemporaryDirectory& directory() const { return directory_; }
  std::string address() const;

  // The formation after `count` earlier ones; an epoch of 0 when there was none in time.
  Formed WaitFormed(size_t count, std::chrono::milliseconds timeout = std::chrono::seconds(20));
  // Whether the group has broken `count` times in time.
  bool WaitBroken(size_t count, std::chrono::milliseconds timeout = std::chrono::seconds(20));
  std::vector<std::string> broken() const;

  // Submits and waits. The tensors are copied, so that they may go as soon as this returns.
  service::Outcome Execute(const worker::Command& command);

 private:
  void OnFormed(uint64_t epoch, const std::vector<bool>& fresh) override;
  void OnBroken(const std::string& reason) override;

  TemporaryDirectory directory_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Formed> formed_;
  std::vector<std::string> broken_;
  std::unique_ptr<service::RemoteGroup> group_;
  std::unique_ptr<grpc::Server> server_;
};

// The ranks of a harness, for the worker's test scenarios. The group must be formed. Drops the
// caches it made when it goes.
class RemoteRanks : public worker::testing::Ranks {
 public:
  RemoteRanks(GroupHarness& harness, uint64_t epoch) : harness_(harness), epoch_(epoch) {}
  ~RemoteRanks() override;

  int size() const override { return harness_.group().size(); }
  uint64_t epoch() const override { return epoch_; }
  std::map<int, worker::Reply> Execute(const worker::Command& command) override;

 private:
  GroupHarness& harness_;
  const uint64_t epoch_;
  std::set<worker::CacheId> caches_;
};

}  // namespace tributary::test
