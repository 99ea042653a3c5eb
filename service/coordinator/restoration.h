// Brings pages to where they are missing after a worker was replaced: first from replicas to ranks,
// and then from ranks to replicas. SequenceTable knows which pages are missing. Pages travel
// between workers, a few MiB at a time, so that steps come in between.
//
// A worker that is about to leave is let go when another one has its pages: its keeper or, in
// caches without replicas, a worker that keeps them until the successor has them.
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <optional>

#include "absl/container/flat_hash_set.h"
#include "base/telemetry/log.h"
#include "service/coordinator/cache_registry.h"
#include "service/coordinator/critical_section.h"
#include "service/coordinator/group_commands.h"
#include "service/coordinator/serving_state.h"
#include "service/schedule/missing_pages.h"
#include "service/workers/worker_group.h"

namespace tributary::service {

class Restoration {
 public:
  // All of them outlive this. `confirms` says whether ranks are told when they lack nothing any
  // more, as a coordinator with a journal needs it when it restarts.
  Restoration(const telemetry::Logger& log, WorkerGroup& group, CoordinatorLock& lock,
              const ServingState& serving, GroupCommands& commands, const CacheRegistry& caches,
              bool confirms)
      : log_(log),
        group_(group),
        lock_(lock),
        serving_(serving),
        commands_(commands),
        caches_(caches),
        confirms_(confirms) {}

  // Called when the group serves again.
  void OnReady() TRIBUTARY_LOCKED;
  // Called when the group broke: all transfers under way have failed.
  void OnBroken() TRIBUTARY_LOCKED;

  // As GroupObserver::OnLeaving.
  bool OnLeaving(int rank) TRIBUTARY_LOCKED;

  // Goes on with work that had to wait, if its time has come.
  void ActIfDue(CoordinatorLock::Clock::time_point now) TRIBUTARY_LOCKED;
  // When ActIfDue has something to do, or max().
  CoordinatorLock::Clock::time_point NextDue() const TRIBUTARY_LOCKED {
    return look_again_.value_or(CoordinatorLock::Clock::time_point::max());
  }

  // Bytes that were brought to ranks, and to replicas.
  uint64_t bytes_restored() const TRIBUTARY_LOCKED { return bytes_[0]; }
  uint64_t bytes_replicated() const TRIBUTARY_LOCKED { return bytes_[1]; }

 private:
  // A rank that leaves, and how far its pages are handed over.
  struct Leaving {
    int rank = 0;
    CoordinatorLock::Clock::time_point began;
    uint64_t bytes_before = 0;
    // Caches whose keeper was asked to take memory for the pages, and those that it has none for.
    absl::flat_hash_set<const Cache*> asked;
    absl::flat_hash_set<const Cache*> given_up;
  };

  void Advance() TRIBUTARY_LOCKED;
  // Lets the rank go whose turn it is, if its pages are handed over. Returns whether it did.
  bool HandOver() TRIBUTARY_LOCKED;
  // Whether the rank need not wait for the cache: all its pages are elsewhere, or cannot be.
  bool HandedOver(const CachePtr& cache, Leaving* leaving) TRIBUTARY_LOCKED;
  // Has the rank's keeper take memory for the rank's pages in a group of layers and those after it.
  void AskKeeper(const CachePtr& cache, int rank, int32_t group) TRIBUTARY_LOCKED;
  void OnKeeperAnswer(const CachePtr& cache, int rank, int32_t group, uint64_t epoch,
                      const Outcome& outcome) TRIBUTARY_UNLOCKED;
  // Sends pages to that place. Returns false when there is nothing to send there now.
  bool SendNext(PagePlace to, int64_t bytes) TRIBUTARY_LOCKED;
  // How many bytes a transfer might have had, and when it was sent.
  struct Sent {
    int64_t bytes = 0;
    CoordinatorLock::Clock::time_point began;
  };
  void OnDone(const CachePtr& cache, const PageTransfer& transfer, uint64_t epoch, const Sent& sent,
              const absl::Status& status) TRIBUTARY_UNLOCKED;
  int64_t Missing(PagePlace place) const TRIBUTARY_LOCKED;
  // Logs how far the restoration has come: when it begins, every few seconds, and when it ends.
  void Tell() TRIBUTARY_LOCKED;

  const telemetry::Logger& log_;
  WorkerGroup& group_;
  CoordinatorLock& lock_;
  const ServingState& serving_;
  GroupCommands& commands_;
  const CacheRegistry& caches_;
  const bool confirms_;

  std::deque<Leaving> leaving_ TRIBUTARY_GUARDED_BY(kCoordinatorLock);  // they leave in this order
  // Whether a rank has been let go. Then nothing is brought any more until the group has broken.
  bool let_go_ TRIBUTARY_GUARDED_BY(kCoordinatorLock) = false;
  int64_t bytes_at_once_ TRIBUTARY_GUARDED_BY(kCoordinatorLock) = 0;
  int under_way_ TRIBUTARY_GUARDED_BY(kCoordinatorLock) = 0;  // transfers of this epoch
  std::optional<CoordinatorLock::Clock::time_point> look_again_
      TRIBUTARY_GUARDED_BY(kCoordinatorLock);
  uint64_t bytes_[2] TRIBUTARY_GUARDED_BY(kCoordinatorLock) = {0, 0};
  // For Tell: the place that is being filled, its bytes before, when that began, and the last log.
  std::optional<PagePlace> telling_ TRIBUTARY_GUARDED_BY(kCoordinatorLock);
  uint64_t bytes_before_ TRIBUTARY_GUARDED_BY(kCoordinatorLock) = 0;
  CoordinatorLock::Clock::time_point began_ TRIBUTARY_GUARDED_BY(kCoordinatorLock);
  CoordinatorLock::Clock::time_point told_ TRIBUTARY_GUARDED_BY(kCoordinatorLock);
};

}  // namespace tributary::service
