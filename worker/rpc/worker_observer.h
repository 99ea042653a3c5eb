// What a worker tells whoever measures and traces it. Calls come from any thread, one at a time of
// each kind; implementations are quick and do not call back.
#pragma once

#include <chrono>
#include <cstdint>

#include "absl/status/status.h"
#include "worker/command.h"

namespace tributary::worker {

class WorkerObserver {
 public:
  using Clock = std::chrono::steady_clock;

  virtual ~WorkerObserver() = default;
  // The coordinator took this worker as a rank.
  virtual void OnWelcome(int rank, int size) {}
  // It joined the group of an epoch, or could not.
  virtual void OnJoined(uint64_t epoch, const absl::Status& status) {}
  virtual void OnReady(bool ready) {}
  virtual void OnExecuted(const Command& command, const Reply& reply, Clock::time_point begin,
                          Clock::time_point end) {}
};

}  // namespace tributary::worker
