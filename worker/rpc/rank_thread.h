// The thread of a rank, and the executor, which no other thread uses.
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

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/sync/mutex.h"
#include "collective/communicator.h"
#include "collective/peers/group_place.h"
#include "collective/transport/transport.h"
#include "worker/backend.h"
#include "worker/backends.h"
#include "worker/command.h"
#include "worker/exchange_choice.h"
#include "worker/executor.h"
#include "worker/rpc/session_rendezvous.h"
#include "worker/rpc/worker_observer.h"

namespace tributary::worker {

struct RankOptions {
  int threads = 1;          // CPU threads that take part in a step's computation
  size_t memory_limit = 0;  // see ExecutorOptions
  Device device = Device::kCpu;
  // Called on the rank's thread when the device has failed with all it held (kDataLoss).
  std::function<void(const absl::Status&)> on_lost;
  std::shared_ptr<WorkerObserver> observer = std::make_shared<WorkerObserver>();  // never null
  int gpu = -1;  // CUDA's ordinal; -1: ranks are dealt out over the GPUs that this process sees
};

class RankThread {
 public:
  struct Formation {
    collective::GroupPlace place;
    collective::Transport transport = collective::Transport::kGloo;
    // The ranks say how they reach each other before they connect, and must agree.
    bool agrees_on_transport = false;
    int shard_ranks = 0;  // as of Executor::Join
    bool lanes = false;   // the same
    collective::Strategy strategy = collective::Strategy::kAuto;
    // See CudaBackendOptions: batch_invariant, exchange and on_exchange.
    bool deterministic = false;
    ExchangePlace exchange = ExchangePlace::kHost;
    std::function<void(const std::string& how)> on_exchange;
    bool fresh = false;  // the shards start empty
    std::shared_ptr<SessionRendezvous> rendezvous;
    // How sessions that are opened in this epoch come along; on a thread of the backend.
    OnSessionNews on_session_news = [](const SessionNews&) {};
    collective::Deadline deadline;
  };

  explicit RankThread(const RankOptions& options);
  ~RankThread();
  RankThread(const RankThread&) = delete;
  RankThread& operator=(const RankThread&) = delete;

  // Connects to the other ranks. What is posted is done in order; `done` runs on the rank's thread,
  // and is told how partials meet (DescribeExchange).
  void Form(Formation formation, std::function<void(absl::StatusOr<std::string>)> done);
  void Execute(Command command, std::function<void(Reply)> done);
  // Says what the shards hold.
  void Report(std::function<void(Holdings)> done);
  // Empties the shards.
  void Reset();

  // Breaks the communicator. What runs ends as soon as it notices. What has not begun is forgotten,
  // and its `done` never runs. May be called from any thread.
  void Abort(const std::string& reason);

  uint64_t memory_bytes() const { return memory_bytes_; }
  double busy_seconds() const { return busy_seconds_; }

 private:
  // What the executor's sessions tell.
  void OnNews(const SessionNews& news);
  void Post(std::function<void()> work);
  void Loop();
  absl::StatusOr<std::string> FormNow(const Formation& formation);
  absl::StatusOr<std::unique_ptr<collective::Communicator>> Connect(const Formation& formation);
  absl::StatusOr<std::unique_ptr<Backend>> MakeBackend(const Formation& formation);
  // Checks, once per process, that the device computes rightly.
  absl::Status TestDevice(const Formation& formation);

  const RankOptions options_;
  // Used by the thread only.
  std::unique_ptr<Executor> executor_;
  bool tested_ = false;          // whether the device has passed its self test
  std::string device_exchange_;  // what the backend said last of how partials meet

  Mutex mutex_;
  CondVar changed_;
  std::deque<std::function<void()>> work_ TRIBUTARY_GUARDED_BY(mutex_);
  // The rendezvous of the formation that was posted last.
  std::shared_ptr<SessionRendezvous> rendezvous_ TRIBUTARY_GUARDED_BY(mutex_);
  std::shared_ptr<collective::Communicator> communicator_ TRIBUTARY_GUARDED_BY(mutex_);
  bool stopping_ TRIBUTARY_GUARDED_BY(mutex_) = false;
  OnSessionNews on_session_news_ TRIBUTARY_GUARDED_BY(mutex_);  // of the epoch that was joined

  std::atomic<uint64_t> memory_bytes_ = 0;
  std::atomic<double> busy_seconds_ = 0;
  std::thread thread_;
};

}  // namespace tributary::worker
