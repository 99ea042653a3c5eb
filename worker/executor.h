// Executes commands on one rank: owns its shards, page tables and plans.
#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "collective/communicator.h"
#include "collective/exchange.h"
#include "kernels/cpu/thread_pool.h"
#include "worker/command.h"

namespace tributary::worker {

struct ExecutorOptions {
  collective::Strategy strategy = collective::Strategy::kAuto;
  // Bytes the shards of this rank may take together; a cache that does not fit is refused.
  size_t memory_limit = 0;  // 0: no limit but the machine's
};

// Used from one thread at a time.
class Executor {
 public:
  Executor(ExecutorOptions options, std::shared_ptr<cpu::ThreadPool> pool);
  ~Executor();

  // Joins a group; shards and tables are kept, so that survivors of a lost rank keep their share.
  // The layout of existing caches is fixed: joining with another rank or size drops them.
  void Join(std::unique_ptr<collective::Communicator> comm);
  // The communicator in use, for Abort() from other threads; may be null.
  std::shared_ptr<collective::Communicator> communicator() const;

  // Never throws. An error in a step's validation happens on every rank alike (it depends on the
  // command only), so ranks never part ways before a collective.
  Reply Execute(const Command& command);

  // Bytes held by shards.
  size_t memory_used() const;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace tributary::worker
