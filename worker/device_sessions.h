// The sessions of a rank whose mailbox lies in a device's memory, and their steps.
#pragma once

#include <memory>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/status/status.h"
#include "collective/communicator.h"
#include "worker/backend.h"
#include "worker/cache_shard.h"
#include "worker/command.h"
#include "worker/step_planner.h"

namespace tributary::worker {

// A session is of one epoch. Each rank's executor has one of these. Not thread safe.
class DeviceSessions {
 public:
  // All of them outlive this.
  DeviceSessions(Backend& backend, CacheShards& caches, StepPlanner& planner,
                 OnSessionNews on_news);

  // The commands. Errors are those of the reply to them.
  absl::Status Open(const OpenSessionCommand& command, collective::Communicator& comm,
                    collective::Deadline deadline, Reply* reply);
  void Close(const CloseSessionCommand& command);
  absl::Status Step(const SessionStepCommand& command, collective::Communicator& comm,
                    collective::Deadline deadline);

  // Ends all sessions, and waits until nothing of them runs.
  void EndAll() { sessions_.clear(); }
  // The same for those whose steps work on pages of the cache.
  void EndOn(CacheId cache);

 private:
  struct Opened {
    std::unique_ptr<DeviceSession> session;
    absl::flat_hash_set<CacheId> caches;  // whose pages its steps work on
  };

  // CheckStep, once per cache, with what the command changes in its pages; `step` has the kind and
  // the entries. Layers of one cache differ in nothing else that it looks at: the session gives
  // their tensors the right sizes.
  absl::Status Check(const SessionStepCommand& command, const DeviceSession& session,
                     StepCommand* step) const;

  Backend& backend_;
  CacheShards& caches_;
  StepPlanner& planner_;
  const OnSessionNews on_news_;
  absl::flat_hash_map<SessionId, Opened> sessions_;
};

}  // namespace tributary::worker
