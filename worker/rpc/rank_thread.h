// Owns the executor and the one thread that uses it.
//
// The shards outlive sessions: a worker that lost its coordinator, or whose group broke, keeps what
// it holds until it is told to start empty.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "collective/communicator.h"
#include "collective/gloo/gloo.h"
#include "worker/backend.h"
#include "worker/backends.h"
#include "worker/command.h"
#include "worker/exchange_choice.h"
#include "worker/executor.h"
#include "worker/rpc/session_rendezvous.h"
#include "worker/rpc/worker_observer.h"

namespace tributary::worker {

struct RankOptions {
  int threads = 1;          // that take part in a step's computation, on the CPU
  size_t memory_limit = 0;  // as in ExecutorOptions
  Device device = Device::kCpu;
  // The device failed with all it held (kDataLoss); called on the rank's thread.
  std::function<void(const absl::Status&)> on_lost;
  std::shared_ptr<WorkerObserver> observer = std::make_shared<WorkerObserver>();  // never null
  int gpu = -1;  // CUDA's ordinal; -1: the rank, counted over the GPUs this process sees
};

class RankThread {
 public:
  struct Formation {
    collective::GlooOptions place;
    collective::Strategy strategy = collective::Strategy::kAuto;
    bool deterministic = false;                               // CudaBackendOptions::batch_invariant
    ExchangePlace exchange = ExchangePlace::kHost;            // as there
    std::function<void(const std::string& how)> on_exchange;  // as there
    bool fresh = false;                                       // start with empty shards
    std::shared_ptr<SessionRendezvous> rendezvous;
    collective::Deadline deadline;
  };

  explicit RankThread(const RankOptions& options);
  ~RankThread();
  RankThread(const RankThread&) = delete;
  RankThread& operator=(const RankThread&) = delete;

  // Connects to the other ranks. Work posted is done in order; `done` runs on the thread.
  void Form(Formation formation, std::function<void(absl::Status)> done);
  void Execute(Command command, std::function<void(Reply)> done);
  // Empties the shards.
  void Reset();

  // Breaks the communicator, ends what runs as soon as it notices, and forgets what has not begun
  // (whose `done` never runs). From any thread.
  void Abort(const std::string& reason);

  uint64_t memory_bytes() const { return memory_bytes_; }
  double busy_seconds() const { return busy_seconds_; }

 private:
  void Post(std::function<void()> work);
  void Loop();
  absl::Status FormNow(const Formation& formation);
  absl::StatusOr<std::unique_ptr<Backend>> MakeBackend(const Formation& formation) const;
  // Once a process: whether the device computes rightly.
  absl::Status TestDevice(const Formation& formation);

  const RankOptions options_;
  // Used by the thread only.
  std::unique_ptr<Executor> executor_;
  bool tested_ = false;  // whether the device has passed its self test

  absl::Mutex mutex_;
  absl::CondVar changed_;
  std::deque<std::function<void()>> work_ ABSL_GUARDED_BY(mutex_);
  std::shared_ptr<SessionRendezvous> rendezvous_
      ABSL_GUARDED_BY(mutex_);  // of the formation posted last
  std::shared_ptr<collective::Communicator> communicator_ ABSL_GUARDED_BY(mutex_);
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;

  std::atomic<uint64_t> memory_bytes_ = 0;
  std::atomic<double> busy_seconds_ = 0;
  std::thread thread_;
};

}  // namespace tributary::worker
