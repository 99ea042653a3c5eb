// Changes the number of workers of a group that holds caches: their tokens are dealt anew, by the
// workers among themselves, and no host sends any of them again.
//
// A change has a thread of its own, and goes through these stages.
//   1. As many workers as the larger group has are registered. The group serves meanwhile.
//   2. Calls are UNAVAILABLE from here on. All those workers form a group, in which each keeps its
//      shards.
//   3. Every cache is made once more, for the other number of ranks, beside what there is. Workers
//      that lack the memory refuse, and nothing has been changed.
//   4. The tokens are moved into it, as the bytes that they are, and its replicas are written, too.
//   5. The workers are told the page tables. The journal is told the number of ranks and the new
//      caches, in one commit, and from then on these count.
//   6. The group forms with the new number of ranks, and what is of another number is dropped.
// Until the end of stage 5 the old shards are as they were: whatever goes wrong, the group forms
// again with the old number of ranks.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "base/sync/mutex.h"
#include "base/telemetry/log.h"
#include "service/coordinator/cache_registry.h"
#include "service/coordinator/call_context.h"
#include "service/coordinator/call_order.h"
#include "service/coordinator/coordinator_options.h"
#include "service/coordinator/critical_section.h"
#include "service/coordinator/group_commands.h"
#include "service/coordinator/serving_state.h"
#include "service/coordinator/step_runner.h"
#include "service/workers/worker_group.h"
#include "tributary/v1/operations.pb.h"

namespace tributary::service {

class Resizing {
 public:
  using Clock = CoordinatorLock::Clock;

  // All of them outlive this.
  Resizing(const CoordinatorOptions& options, const telemetry::Logger& log, WorkerGroup& group,
           CoordinatorLock& lock, ServingState& serving, GroupCommands& commands, CallOrder& order,
           CacheRegistry& caches, const StepRunner& steps);
  // Stop() has been called: what the lock's sections do at their end may be gone by now.
  ~Resizing() = default;

  // The call of the API. `done` is called when the change is over. One change at a time; the same
  // one may be asked for again while it is under way, and all who did are answered.
  void Ask(const v1::ChangeWorkersRequest& request,
           Done<v1::ChangeWorkersReply> done) TRIBUTARY_UNLOCKED;
  // Ends a change that is under way, if it does not count yet. No other begins.
  void BeginStop() TRIBUTARY_LOCKED;
  // The same, and waits for its end.
  void Stop() TRIBUTARY_UNLOCKED;

  // Whether a group that forms is that of a change (stage 2), which nobody else is to set up.
  bool takes_group() const TRIBUTARY_LOCKED { return takes_group_; }
  // Of such a group. `fresh` is that of GroupObserver::OnFormed.
  void OnFormed(const std::vector<bool>& fresh) TRIBUTARY_LOCKED;
  void OnBroken(const std::string& reason) TRIBUTARY_LOCKED;

 private:
  // One cache of the change.
  struct Pair {
    CachePtr old;
    CachePtr made;
    SequenceTable::RedealtPages pages;
  };

  void Run(int workers, Clock::time_point patience) TRIBUTARY_UNLOCKED;
  absl::StatusOr<v1::ChangeWorkersReply> Change(int workers,
                                                Clock::time_point patience) TRIBUTARY_UNLOCKED;
  // The stages. An error says why there is no change.
  absl::Status AwaitWorkers(int workers, int places, Clock::time_point patience) TRIBUTARY_UNLOCKED;
  absl::Status Pause(int from, int to) TRIBUTARY_UNLOCKED;
  // Waits a moment. False: the change is to end.
  bool Rest() TRIBUTARY_UNLOCKED;
  // Makes every cache for ranks on these hosts, in this process alone.
  absl::Status PairUp(const std::vector<std::string>& hosts) TRIBUTARY_LOCKED;
  std::vector<std::string> HostsOf(int ranks) const TRIBUTARY_UNLOCKED;
  absl::Status FormAll(int from, int to) TRIBUTARY_UNLOCKED;
  absl::Status MakeCaches(int to) TRIBUTARY_UNLOCKED;
  absl::Status MoveTokens(int from, int to, uint64_t* bytes) TRIBUTARY_UNLOCKED;
  absl::Status TellTables() TRIBUTARY_UNLOCKED;
  absl::Status Commit(int to) TRIBUTARY_UNLOCKED;
  // Forms the group with so many ranks, after which the change is over.
  void FormWith(int ranks, int from, int to) TRIBUTARY_UNLOCKED;

  // Sends a command and waits until at most `most` are unanswered. An error: that of any of them so
  // far, or that the group broke.
  absl::Status Send(worker::CacheId cache, GroupCommands::Body body, int most) TRIBUTARY_UNLOCKED;
  absl::Status Broke(absl::string_view reason) const;
  absl::Status AwaitAnswers(int most) TRIBUTARY_UNLOCKED;
  void OnAnswer(uint64_t change, const absl::Status& status) TRIBUTARY_UNLOCKED;
  // Waits until `fulfilled` or the time has come, or the change is to end. kDeadlineExceeded.
  absl::Status Await(Clock::time_point until,
                     const std::function<bool()>& fulfilled) TRIBUTARY_LOCKED;

  const CoordinatorOptions& options_;
  const telemetry::Logger& log_;
  WorkerGroup& group_;
  CoordinatorLock& lock_;
  ServingState& serving_;
  GroupCommands& commands_;
  CallOrder& order_;
  CacheRegistry& caches_;
  const StepRunner& steps_;

  std::vector<Pair> pairs_;  // the thread's; their tables are used under the lock

  CondVar changed_;
  int asked_ TRIBUTARY_GUARDED_BY(kCoordinatorLock) = 0;  // workers; 0: no change is under way
  std::vector<Done<v1::ChangeWorkersReply>> waiting_ TRIBUTARY_GUARDED_BY(kCoordinatorLock);
  bool takes_group_ TRIBUTARY_GUARDED_BY(kCoordinatorLock) = false;
  // Since takes_group_: whether the old group has been broken for the change, and the other formed.
  bool regrouped_ TRIBUTARY_GUARDED_BY(kCoordinatorLock) = false;
  int group_before_ TRIBUTARY_GUARDED_BY(kCoordinatorLock) = 0;  // ranks
  bool formed_ TRIBUTARY_GUARDED_BY(kCoordinatorLock) = false;
  absl::Status failed_ TRIBUTARY_GUARDED_BY(kCoordinatorLock);  // of the change under way
  bool stopping_ TRIBUTARY_GUARDED_BY(kCoordinatorLock) = false;
  int unanswered_ TRIBUTARY_GUARDED_BY(kCoordinatorLock) = 0;   // commands
  uint64_t change_ TRIBUTARY_GUARDED_BY(kCoordinatorLock) = 0;  // answers to others do not count
  std::string expected_break_ TRIBUTARY_GUARDED_BY(kCoordinatorLock);

  Mutex thread_mutex_;  // taken without the lock
  std::thread thread_ TRIBUTARY_GUARDED_BY(thread_mutex_);
  bool stopped_ TRIBUTARY_GUARDED_BY(thread_mutex_) = false;  // no thread begins
};

}  // namespace tributary::service
