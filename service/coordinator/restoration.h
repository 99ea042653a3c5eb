// Brings pages to where they are missing after a worker was replaced: first to ranks that lack
// them, from the replicas that other ranks keep, and then to the replicas. SequenceTable knows
// which they are. Pages travel between workers, a few MiB at a time, so that steps come in between.
//
// A worker that is about to leave is let go when another one has its pages: the one that keeps them
// anyway or, in caches without replicas, one that keeps them until the successor has got them.
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
  // All of them outlive this. `confirms`: ranks are told when they lack nothing any more, for a
  // coordinator that restarts.
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

  // The group serves again.
  void OnReady() TRIBUTARY_LOCKED;
  // Whatever was under way has come to nothing.
  void OnBroken() TRIBUTARY_LOCKED;

  // GroupObserver::OnLeaving.
  bool OnLeaving(int rank) TRIBUTARY_LOCKED;

  // Goes on with what had to wait, if its time has come.
  void ActIfDue(CoordinatorLock::Clock::time_point now) TRIBUTARY_LOCKED;
  // When that is, or max().
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
    // Caches whose keeper has memory for the rank's pages, or is taking it; or has none.
    absl::flat_hash_set<const Cache*> asked;
    absl::flat_hash_set<const Cache*> given_up;
  };

  void Advance() TRIBUTARY_LOCKED;
  // Lets the rank go whose turn it is, if its pages are handed over. True: it does.
  bool HandOver() TRIBUTARY_LOCKED;
  // Whether the cache loses nothing when the rank leaves, or would lose it in any case.
  bool HandedOver(const CachePtr& cache, Leaving* leaving) TRIBUTARY_LOCKED;
  // Has the rank's keeper take memory for the rank's pages of a group of layers, and those after.
  void AskKeeper(const CachePtr& cache, int rank, int32_t group) TRIBUTARY_LOCKED;
  void OnKeeperAnswer(const CachePtr& cache, int rank, int32_t group, uint64_t epoch,
                      const Outcome& outcome) TRIBUTARY_UNLOCKED;
  // False: there is nothing to send to that place now.
  bool SendNext(PagePlace to, int64_t bytes) TRIBUTARY_LOCKED;
  void OnDone(const CachePtr& cache, const PageTransfer& transfer, uint64_t epoch,
              const absl::Status& status) TRIBUTARY_UNLOCKED;
  int64_t Missing(PagePlace place) const TRIBUTARY_LOCKED;
  // Says how far it has come, when it begins, every few seconds, and when it ends.
  void Tell() TRIBUTARY_LOCKED;

  const telemetry::Logger& log_;
  WorkerGroup& group_;
  CoordinatorLock& lock_;
  const ServingState& serving_;
  GroupCommands& commands_;
  const CacheRegistry& caches_;
  const bool confirms_;

  std::deque<Leaving> leaving_ TRIBUTARY_GUARDED_BY(kCoordinatorLock);  // the first one's turn
  // A rank is on its way out: nothing is brought any more until the group has broken.
  bool let_go_ TRIBUTARY_GUARDED_BY(kCoordinatorLock) = false;
  int under_way_ TRIBUTARY_GUARDED_BY(kCoordinatorLock) = 0;  // transfers of this epoch
  std::optional<CoordinatorLock::Clock::time_point> look_again_
      TRIBUTARY_GUARDED_BY(kCoordinatorLock);
  uint64_t bytes_[2] TRIBUTARY_GUARDED_BY(kCoordinatorLock) = {0, 0};
  // Of what is being told: the place, when it began, and when it was told last.
  std::optional<PagePlace> telling_ TRIBUTARY_GUARDED_BY(kCoordinatorLock);
  uint64_t bytes_before_ TRIBUTARY_GUARDED_BY(kCoordinatorLock) = 0;
  CoordinatorLock::Clock::time_point began_ TRIBUTARY_GUARDED_BY(kCoordinatorLock);
  CoordinatorLock::Clock::time_point told_ TRIBUTARY_GUARDED_BY(kCoordinatorLock);
};

}  // namespace tributary::service
