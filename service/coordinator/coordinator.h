// The coordinator: caches, sequences and steps over one group of workers.
//
// It knows nothing of gRPC: attention_service.h puts it behind the public API, and tests and
// benchmarks call it in process. Every call answers through a callback, once, on any thread, maybe
// before the call returns; the callback must not block.
//
// One lock guards all state. Under it decisions are made, none of which costs more than the request
// it is about; copying tensors, talking to workers and calling back happen outside.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/telemetry/log.h"
#include "service/coordinator/cache.h"
#include "service/observe/snapshot.h"
#include "service/data/registered_region.h"
#include "service/data/shared_memory.h"
#include "service/observe/observer.h"
#include "service/schedule/batcher.h"
#include "service/schedule/client_quota.h"
#include "service/schedule/step_request.h"
#include "service/workers/command_queue.h"
#include "service/workers/worker_group.h"
#include "tributary/v1/attention.pb.h"
#include "worker/backends.h"

namespace tributary::service {

struct CoordinatorOptions {
  BatchLimits batch;
  // Steps handed to the workers at a time: the next one is ready when they finish one.
  int pipeline_depth = 2;
  std::chrono::milliseconds step_timeout{30'000};
  // No call waits longer, whatever its own deadline.
  std::chrono::milliseconds max_call_timeout{300'000};
  std::chrono::milliseconds retry_delay{200};  // asked of callers on UNAVAILABLE and ABORTED
  size_t max_message_bytes = size_t{64} << 20;
  int32_t max_sequences = 65'536;  // of a cache
  ClientLimits client_limits;      // of what each caller may hold
  bool deterministic = false;      // asked of backends: results that do not depend on the batch
  // What a cache's backend is chosen from, in order of preference; of static life.
  std::vector<const worker::BackendCapabilities*> backends{worker::RegisteredBackends().begin(),
                                                           worker::RegisteredBackends().end()};
  // What keys of shared memory objects must begin with, any of them; empty: no rule.
  std::vector<std::string> shared_memory_prefixes;
  // Told when the service becomes able to serve and when it ceases to be.
  std::function<void(bool ready)> on_readiness;
  // Who measures, records and traces; null: nobody.
  std::shared_ptr<Observer> observer;
};

// What a call brings besides its request.
struct CallContext {
  std::string caller;  // by what name it is known (service/access/access_control.h)
  std::chrono::steady_clock::time_point deadline = std::chrono::steady_clock::time_point::max();
  // Set when the caller is no longer interested. Before the call takes effect it is dropped;
  // afterwards only its result is.
  std::shared_ptr<const std::atomic<bool>> cancelled;
  telemetry::TraceContext trace;  // its span_id: the call's own span
};

class Coordinator final : private GroupObserver {
 public:
  using Clock = std::chrono::steady_clock;
  template <typename Reply>
  using Done = std::function<void(absl::StatusOr<Reply>)>;

  Coordinator(CoordinatorOptions options, std::unique_ptr<WorkerGroup> group,
              std::shared_ptr<const telemetry::Logger> log);
  ~Coordinator() override;

  absl::Status Start();
  // From now on new calls are UNAVAILABLE; accepted ones go on.
  void StartDraining();
  // Whether every accepted call has been answered by then.
  bool WaitIdle(Clock::time_point until);
  // Answers what is left and lets the workers go.
  void Stop();
  bool ready() const;
  // Of CoordinatorOptions, or one that does nothing.
  Observer& observer() const { return *observer_; }

  void CreateCache(const v1::CreateCacheRequest& request, Done<v1::CreateCacheReply> done);
  void DeleteCache(const v1::DeleteCacheRequest& request, Done<v1::DeleteCacheReply> done);
  void OpenSequence(const v1::OpenSequenceRequest& request, const CallContext& call,
                    Done<v1::OpenSequenceReply> done);
  void ForkSequence(const v1::ForkSequenceRequest& request, const CallContext& call,
                    Done<v1::ForkSequenceReply> done);
  void TruncateSequence(const v1::TruncateSequenceRequest& request, const CallContext& call,
                        Done<v1::TruncateSequenceReply> done);
  void CloseSequence(const v1::CloseSequenceRequest& request, const CallContext& call,
                     Done<v1::CloseSequenceReply> done);
  void Append(std::shared_ptr<const v1::AppendRequest> request, const CallContext& call,
              Done<v1::AppendReply> done);
  void Attend(std::shared_ptr<const v1::AttendRequest> request, const CallContext& call,
              Done<v1::AttendReply> done);
  absl::StatusOr<v1::GetTopologyReply> GetTopology(const v1::GetTopologyRequest& request) const;
  Snapshot TakeSnapshot() const;
  void RegisterSharedMemory(const v1::RegisterSharedMemoryRequest& request,
                            Done<v1::RegisterSharedMemoryReply> done);
  void UnregisterSharedMemory(const v1::UnregisterSharedMemoryRequest& request,
                              Done<v1::UnregisterSharedMemoryReply> done);

 private:
  enum class State { kForming, kSettingUp, kReady };
  using CachePtr = std::shared_ptr<Cache>;

  // A call that waits for its turn at its sequences, or takes part in a step.
  struct Operation;
  using OperationPtr = std::shared_ptr<Operation>;
  // Operations that share a command.
  struct Step;
  using StepPtr = std::shared_ptr<Step>;
  // One hold of the lock; see coordinator_turn.h.
  class Turn;

  // GroupObserver.
  void OnFormed(uint64_t epoch, const std::vector<bool>& fresh) override;
  void OnBroken(const std::string& reason) override;

  // All below: with the lock held, by the holder of a Turn.
  absl::Status CheckServing() const;
  // Of a service that serves; errors otherwise.
  absl::StatusOr<CachePtr> FindCache(const std::string& name) const;
  void Accept(OperationPtr operation, Turn& turn);
  void Run(const OperationPtr& operation, Turn& turn);
  void Leave(Operation* operation, Turn& turn);
  void StopWaiting(const OperationPtr& operation);
  void Fail(const OperationPtr& operation, const absl::Status& status, Turn& turn);
  void FailWaiting(const absl::Status& status, const Cache* only, Turn& turn);
  void BeginSteps(Turn& turn);
  void BeginStep(const Batcher::Batch& batch, Turn& turn);
  bool JoinStep(const OperationPtr& operation, Clock::time_point now, Turn& turn);
  void Settle(Step* step, const Outcome& outcome);
  void CountStep(const Outcome& outcome);
  void SetUp(Turn& turn);
  void SendSetup(const CachePtr& cache, Turn& turn);
  void SetState(State state, Turn& turn);
  // `fill` gets a command whose number, epoch and deadline are set.
  void Send(worker::CacheId cache, std::function<void(worker::Command*)> fill,
            WorkerGroup::Done done, Turn& turn);
  // One command a group of layers; `done` gets the first failure when all have been answered.
  using Body = decltype(worker::Command::body);
  void SendToGroups(const Cache& cache, const std::function<Body(int32_t group)>& body,
                    std::function<void(const absl::Status&)> done, Turn& turn);
  void DropGroups(const Cache& cache, std::function<void(Turn&)> done, Turn& turn);
  // Memory of GPUs; see device_region.h.
  // NOT_FOUND when one is not to be used; then none counts as used.
  absl::Status UseRegions(const StepRequest& request);
  void ReleaseRegions(const StepRequest& request, Turn& turn);
  void OpenRegion(const DeviceRegionPtr& region, Turn& turn);
  // No call begins to use it; it is closed when those that do are through.
  void RetireRegion(const DeviceRegionPtr& region, Turn& turn);
  void CloseRegion(const DeviceRegionPtr& region, Turn& turn);
  static void AnswerWaiting(DeviceRegion* region, const absl::Status& status, Turn& turn);
  // Workers may still hold them: they are told again when the group next forms.
  void Undropped(const std::vector<worker::CacheId>& ids);
  Clock::time_point NextWake() const;
  void FillCache(const Cache& cache, const v1::GetTopologyRequest& request,
                 v1::CacheInfo* info) const;

  // Without the lock.
  void RunTimer();
  void AdmitStep(const std::string& cache_name, const CallContext& call,
                 const std::function<absl::StatusOr<StepRequest>(const StepContext&)>& check,
                 std::function<void(absl::StatusOr<v1::AttendReply>)> done);
  void InOrder(const std::string& cache_name, const CallContext& call,
               std::vector<worker::SequenceId> sequences, std::function<void(Cache&, Turn&)> apply,
               std::function<void(absl::Status)> fail);
  void OnCacheCreated(const CachePtr& cache, const absl::Status& status);
  void OnSetup(uint64_t epoch, const absl::Status& status);
  void RegisterDevice(const v1::RegisterSharedMemoryRequest& request,
                      Done<v1::RegisterSharedMemoryReply> done);
  void ForgetOwnerlessRegions();
  void OnRegionOpened(const DeviceRegionPtr& region, const absl::Status& status);
  void OnRegionClosed(const DeviceRegionPtr& region, uint64_t epoch, const absl::Status& status);
  void OnStepDone(const StepPtr& step, Outcome outcome);
  void AnswerStep(const Step& step, const Outcome& outcome) const;
  void TellSubmitted(Step* step, worker::Command* command) const;
  void TellEnded(Step* step, const Outcome& outcome) const;

  const CoordinatorOptions options_;
  const std::shared_ptr<const telemetry::Logger> log_;
  const std::shared_ptr<Observer> observer_;  // never null
  const Clock::time_point started_ = Clock::now();
  SharedMemoryRegistry regions_;
  std::unique_ptr<WorkerGroup> group_;
  CommandStream commands_;

  mutable std::mutex mutex_;
  std::condition_variable timer_wake_;
  std::condition_variable idle_;
  State state_ = State::kForming;
  std::string not_ready_ = "waiting for workers";
  bool draining_ = false;
  bool stopped_ = false;
  uint64_t epoch_ = 0;
  int setup_left_ = 0;
  std::optional<Clock::time_point> setup_retry_;
  std::vector<bool> fresh_;
  absl::flat_hash_map<std::string, CachePtr> caches_;
  worker::CacheId next_cache_ = 1;
  // Deleted (or never finished) caches that workers may still hold.
  std::vector<worker::CacheId> undropped_caches_;
  // Likewise regions whose closing came to nothing; maybe somebody waits for it.
  std::vector<DeviceRegionPtr> unclosed_regions_;
  ClientQuota clients_;
  Batcher batcher_;
  int steps_in_flight_ = 0;
  int64_t open_calls_ = 0;  // accepted and not yet answered
  uint64_t next_serial_ = 0;
  // Operations whose turn at all their sequences has come, and whether they are being run.
  std::deque<OperationPtr> runnable_;
  bool running_ = false;
  // Operations that no step has taken yet, by deadline.
  std::map<std::pair<Clock::time_point, uint64_t>, OperationPtr> waiting_;
  Clock::time_point timer_sleeps_until_ = Clock::time_point::min();
  v1::Statistics statistics_;
  std::thread timer_;
};

// What GetTopologyReply.version says.
const char* Version();

}  // namespace tributary::service
