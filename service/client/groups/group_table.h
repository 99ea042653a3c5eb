// The groups of a service as a client knows them: where they are, which answer, how full they are.
#pragma once

#include <grpcpp/channel.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/sync/mutex.h"
#include "service/client/client.h"
#include "service/client/groups/calls_in_flight.h"
#include "service/client/groups/placement.h"
#include "service/client/groups/targets.h"
#include "tributary/v1/attention.grpc.pb.h"

namespace tributary::client {

struct GroupTableOptions {
  ConnectOptions connect;  // `target` names the groups
  // How often all groups are asked how full they are, and a name is resolved again.
  std::chrono::milliseconds ask_every{2'000};
  // A group that takes longer to answer does not answer.
  std::chrono::milliseconds answer_within{1'000};
  std::function<absl::StatusOr<std::vector<std::string>>(const std::string& name,
                                                         const std::string& port)>
      resolve = ResolveGroups;
};

// Thread safe. A thread of its own asks the groups now and then, all at once; no call of a host
// waits for that.
class GroupTable {
 public:
  // One address of the service. It lives as long as somebody uses it.
  struct Group {
    std::string target;
    std::shared_ptr<grpc::Channel> channel;
    std::unique_ptr<v1::AttentionService::Stub> stub;
    std::unique_ptr<Client> client;
    std::string lease;             // that `client` presents; empty: none
    std::atomic<uint32_t> tag{0};  // 0: not known yet

    // An id with the group's tag. Sequences that `client` opens and forks have such ids.
    uint64_t NewSequenceId() const;
  };
  using GroupPtr = std::shared_ptr<Group>;

  // INVALID_ARGUMENT naming a field of the options.
  static absl::StatusOr<std::unique_ptr<GroupTable>> Create(const GroupTableOptions& options);
  ~GroupTable();

  // Waits until a group answers, or (wait_for_service is false) until all have been asked once.
  // UNAVAILABLE says for every group why it does not answer.
  absl::Status Start();

  // The group that a sequence lives in. NOT_FOUND when no group has its tag; UNAVAILABLE when there
  // are groups that have not answered yet, so that one of them may. `field` named the sequence.
  absl::StatusOr<GroupPtr> Of(uint64_t sequence_id, const std::string& field) const;
  // The groups that answer, as a new sequence of the cache tries them.
  std::vector<GroupPtr> PlacementFor(const std::string& cache_id) const;
  // A sequence of the cache has just been placed there.
  void Placed(const Group& group, const std::string& cache_id);

  // Those that answered when they were last asked.
  std::vector<GroupPtr> Answering() const;

  // Groups that come later, or come back without their caches, are given this one. Until Forget.
  void Remember(const std::string& cache_id, const v1::CacheSpec& spec);
  void Forget(const std::string& cache_id);

 private:
  struct State {
    GroupPtr group;
    uint64_t id = 0;  // 0: has not answered yet
    bool answers = false;
    std::string why = "has not been asked yet";  // it does not answer
    std::map<std::string, GroupLoad> caches;
    std::set<std::string> creating;  // caches that it is being given
  };
  struct Probe;
  using Round = std::vector<std::unique_ptr<Probe>>;
  // An address that is gone. Calls may still be on their way to it until then.
  struct Retired {
    GroupPtr group;
    std::chrono::steady_clock::time_point until;
  };

  GroupTable(const GroupTableOptions& options, GroupTargets targets);

  GroupPtr MakeGroup(const std::string& target) const;
  void Run();
  // Asks all groups at once how full they are, and waits until they have answered or are late.
  Round Ask();
  void TakeAnswers(const Round& round);
  // Groups for addresses that are new; none for those that are gone and do not answer.
  void ResolveAgain();
  void AdoptTargets(const std::vector<std::string>& targets) TRIBUTARY_REQUIRES(mutex_);
  void DropRetired();
  // Gives groups the caches that they lack, without waiting.
  void CreateMissing();
  State* Find(const Group& group) TRIBUTARY_REQUIRES(mutex_);
  std::string WhyNot(const State& state) const TRIBUTARY_REQUIRES(mutex_);

  const GroupTableOptions options_;
  const GroupTargets targets_;

  mutable Mutex mutex_;
  CondVar changed_;
  std::vector<State> states_ TRIBUTARY_GUARDED_BY(mutex_);
  std::vector<Retired> retired_ TRIBUTARY_GUARDED_BY(mutex_);
  std::map<uint32_t, GroupPtr> by_tag_ TRIBUTARY_GUARDED_BY(mutex_);
  std::map<std::string, v1::CacheSpec> remembered_ TRIBUTARY_GUARDED_BY(mutex_);
  std::string why_unresolved_ TRIBUTARY_GUARDED_BY(mutex_);
  int64_t rounds_ TRIBUTARY_GUARDED_BY(mutex_) = 0;  // that are over
  bool stopping_ TRIBUTARY_GUARDED_BY(mutex_) = false;

  CallsInFlight questions_, creations_;
  std::thread thread_;
};

}  // namespace tributary::client
