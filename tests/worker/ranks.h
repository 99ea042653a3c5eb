// The ranks of a group as a test sees them: something that executes a command on all of them.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "worker/executor.h"

namespace tributary::worker::testing {

// Pages that begin as NaN: a slot that is read before it is written shows. Parcels go in lanes,
// however small.
inline ExecutorOptions Poisoned() {
  ExecutorOptions options;
  options.least_lane_bytes = 1;
  options.page_fill = PageFill::kPoison;
  return options;
}

// The group's command number `number`, which has a minute.
inline Command CommandOf(uint64_t epoch, uint64_t number, CacheId cache,
                         decltype(Command::body) body) {
  Command command;
  command.epoch = epoch;
  command.number = number;
  command.cache = cache;
  command.deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  command.body = std::move(body);
  return command;
}

class Ranks {
 public:
  virtual ~Ranks() = default;
  virtual int size() const = 0;
  virtual uint64_t epoch() const = 0;
  // Replies by rank, of the ranks that live in this process: all of them, or one.
  virtual std::map<int, Reply> Execute(const Command& command) = 0;
};

// One executor a thread, over an in-process group.
class ThreadRanks : public Ranks {
 public:
  ThreadRanks(int size, const ExecutorOptions& options, int threads_each = 1);
  // The same over other backends: `make` makes that of a rank.
  using MakeBackend = std::function<std::unique_ptr<Backend>(int rank)>;
  ThreadRanks(int size, const ExecutorOptions& options, MakeBackend make);
  // One rank a backend.
  ThreadRanks(std::vector<std::unique_ptr<Backend>> backends, const ExecutorOptions& options);
  // All ranks leave at once.
  ~ThreadRanks() override;

  int size() const override { return static_cast<int>(executors_.size()); }
  uint64_t epoch() const override { return epoch_; }
  std::map<int, Reply> Execute(const Command& command) override;

  // A new group of the same executors under the next epoch. `shard_ranks`: as of Executor::Join.
  void Reform(int shard_ranks = 0);
  // The same, of so many: those behind them leave, and those that are missing begin with nothing.
  void Resize(int size, const ExecutorOptions& options, int shard_ranks);
  // The same, but this rank begins anew and holds nothing.
  void Replace(int rank, const ExecutorOptions& options);
  Executor& executor(int rank) { return *executors_[static_cast<size_t>(rank)]; }

 private:
  MakeBackend make_;  // null: these are all
  uint64_t epoch_ = 0;
  std::vector<std::unique_ptr<Executor>> executors_;
};

}  // namespace tributary::worker::testing
