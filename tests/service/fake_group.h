// A group of workers without workers: tests say when and how commands end.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "service/workers/worker_group.h"

namespace tributary::service::testing {

// Answers at once with zeros, or, while held, when told to.
class FakeGroup : public WorkerGroup {
 public:
  // Without `record`, commands() stays empty and nothing is kept alive.
  explicit FakeGroup(int size, bool record = true, worker::Device device = worker::Device::kCpu)
      : size_(size), record_(record), device_(device) {}

  uint64_t id() const override { return id_; }
  int size() const override { return size_; }
  worker::Device device() const override { return device_; }
  absl::Status CheckDeviceSessions() const override { return absl::OkStatus(); }
  absl::Status CheckRegions() const override {
    return device_ == worker::Device::kCuda ? absl::OkStatus() : NoRegions("the group is a fake");
  }
  absl::Status Start(GroupObserver* observer) override;  // forms, all ranks fresh
  void Submit(std::shared_ptr<const worker::Command> command, Done done) override;
  std::vector<Member> members() const override;
  void Stop() override;

  // Before the group is given to a coordinator.
  void SetId(uint64_t id) { id_ = id; }

  // From now on steps are kept until Release or Break. Other commands never are.
  void Hold();
  // Waits until `count` steps are kept.
  void WaitForHeld(size_t count);
  // Ends the oldest kept step; `edit` may change its outcome. Keeps holding.
  void ReleaseOne(const std::function<void(const worker::StepCommand&, Outcome*)>& edit = nullptr);
  // Ends all and holds no more.
  void Release();

  // What opening a region, or creating a cache, ends with from now on, on the last rank.
  void AnswerOpenRegion(absl::Status status);
  void AnswerCreateCache(absl::Status status);
  // The same for one cache; OK: as for all.
  void AnswerCreateCache(worker::CacheId cache, absl::Status status);
  // From now on the last rank takes the memory of a cache in so many pieces.
  void TakeMemoryInPieces(int pieces);

  // From now on the mailboxes of sessions lie on another machine.
  void LieElsewhere();
  // From now on its workers are of a build that speaks this version of worker.proto.
  void SpeakProtocol(uint32_t version);
  // What a rank says of a session on its GPU.
  void Tell(const worker::SessionNews& news);

  // Commands end with kAborted until the group is formed again.
  void Break(const std::string& reason);
  void Form(const std::vector<bool>& fresh);

  // Every command so far, in order.
  std::vector<std::shared_ptr<const worker::Command>> commands() const;

 private:
  struct Held {
    std::shared_ptr<const worker::Command> command;
    Done done;
  };
  Outcome Succeed(const worker::Command& command);

  uint64_t id_ = 1;
  const int size_;
  const bool record_;
  const worker::Device device_;
  GroupObserver* observer_ = nullptr;
  mutable std::mutex mutex_;
  std::condition_variable held_changed_;
  bool holding_ = false;
  absl::Status open_region_, create_cache_;
  std::map<worker::CacheId, absl::Status> create_caches_;
  int pieces_ = 1;
  std::map<worker::CacheId, int> taken_;  // pieces
  bool lies_elsewhere_ = false;
  uint32_t protocol_ = 0;
  bool broken_ = true;
  uint64_t epoch_ = 0;
  std::deque<Held> held_;
  std::vector<std::shared_ptr<const worker::Command>> commands_;
  std::map<worker::CacheId, worker::CacheSpec> specs_;
};

}  // namespace tributary::service::testing
