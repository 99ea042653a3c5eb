// Executes commands on one rank: owns its shards, page tables and plans.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "collective/communicator.h"
#include "collective/exchange/exchange.h"
#include "collective/rendezvous/rendezvous.h"
#include "kernels/cpu/thread_pool.h"
#include "worker/backend.h"
#include "worker/command.h"
#include "worker/holdings.h"

namespace tributary::worker {

// For how long a cache that is being created may keep a step of another waiting.
inline constexpr std::chrono::microseconds kMemorySlice{500};

struct ExecutorOptions {
  collective::Strategy strategy = collective::Strategy::kAuto;  // of the CPU backend
  // Bytes the shards of this rank may take together; a cache that does not fit is refused.
  size_t memory_limit = 0;  // 0: no limit but the device's
  // Query rows that attend and exchange at a time; 0 bounds their memory (worker/plan.h). The same
  // on all ranks.
  int32_t rows_per_pass = 0;
  // For how long one CreateCacheCommand takes memory. What is missing then is taken when the
  // command is repeated (Reply::more_memory), so that commands of other caches come in between.
  std::chrono::nanoseconds memory_slice = std::chrono::hours(1);
  // Whether Report says what sequences hold. Commands must then say what is settled.
  bool keeps_records = false;
  // Parcels of so many bytes between ranks of one machine go in memory that they share
  // (worker/parcel_carrier.h). The same on all ranks.
  size_t least_lane_bytes = size_t{1} << 20;
  // What new pages hold; poison is for tests.
  PageFill page_fill = PageFill::kZero;
  // Told how sessions come along (OpenSessionCommand), on a thread of the backend.
  OnSessionNews on_session_news = [](const SessionNews&) {};
};

// How often a step was planned, and how often it found the plan of an earlier layer.
struct PlanCounts {
  int64_t made = 0;
  int64_t reused = 0;
};

// Used from one thread at a time.
class Executor {
 public:
  Executor(ExecutorOptions options, std::unique_ptr<Backend> backend);
  // On the CPU.
  Executor(ExecutorOptions options, std::shared_ptr<cpu::ThreadPool> pool);
  ~Executor();

  // Joins a group; shards and tables are kept, so that survivors of a lost rank keep their share.
  // Caches are of a rank and a number of ranks: joining with others drops them. Partials are
  // exchanged over `comm`.
  void Join(std::unique_ptr<collective::Communicator> comm);
  // The same of a backend that may have another way (Backend::Join): called by all ranks at once,
  // each on a thread of its own. An error: this rank is in no group, and what it holds is as it
  // was. `shard_ranks`: the caches whose tokens are dealt over so many ranks are kept; 0: over
  // those of the group. They differ while the number of workers changes. `lanes`: whether all ranks
  // know of memory that ranks of one machine share (worker/parcel_lanes.h).
  absl::Status Join(std::unique_ptr<collective::Communicator> comm,
                    collective::Rendezvous& rendezvous, collective::Deadline deadline,
                    int shard_ranks = 0, bool lanes = true);
  // The communicator in use, for Abort() from other threads; may be null. From any thread.
  std::shared_ptr<collective::Communicator> communicator() const;

  // Never throws. An error leaves the executor usable; after an error inside a collective
  // (kAborted, kDeadlineExceeded) the communicator is broken and steps fail until the next Join. An
  // error in a step's validation happens on every rank alike (it depends on the command only), so
  // ranks never part ways before a collective. kDataLoss: the device failed and took every shard
  // along; from then on every command is answered so.
  Reply Execute(const Command& command);

  // What this rank holds, for a coordinator that has restarted. Nothing after the device failed.
  Holdings Report() const;

  // Bytes held by shards. From any thread.
  size_t memory_used() const;

  // Of all caches so far.
  PlanCounts plan_counts() const;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace tributary::worker
