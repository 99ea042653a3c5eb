// Memory that hosts register. Memfds and POSIX shared memory are mapped here; the workers open
// memory of GPUs.
//
// Workers are told by commands, which they carry out one after the other: a region is open before
// the first step that names it, and is closed after the last one.
#pragma once

#include <chrono>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "base/telemetry/log.h"
#include "service/coordinator/call_context.h"
#include "service/coordinator/coordinator_options.h"
#include "service/coordinator/critical_section.h"
#include "service/coordinator/group_commands.h"
#include "service/coordinator/serving_state.h"
#include "service/data/memory_deposit.h"
#include "service/data/registered_region.h"
#include "service/data/shared_memory.h"
#include "service/schedule/step_request.h"
#include "service/workers/worker_group.h"
#include "tributary/v1/attention.pb.h"

namespace tributary::service {

class RegisteredRegions {
 public:
  // All of them outlive this.
  RegisteredRegions(const CoordinatorOptions& options, const telemetry::Logger& log,
                    const WorkerGroup& group, CoordinatorLock& lock, const ServingState& serving,
                    GroupCommands& commands);

  // The calls of the API.
  void Register(const v1::RegisterSharedMemoryRequest& request,
                Done<v1::RegisterSharedMemoryReply> done) TRIBUTARY_UNLOCKED;
  void Unregister(const v1::UnregisterSharedMemoryRequest& request,
                  Done<v1::UnregisterSharedMemoryReply> done) TRIBUTARY_UNLOCKED;

  // Where memfds of hosts wait to be registered. Thread safe.
  MemoryDeposit& deposit() { return deposit_; }
  // Where tensors of requests are looked up, without the lock.
  const SharedMemoryRegistry& registry() const { return registry_; }

  // A call that uses regions is accepted: they stay open until Release. NOT_FOUND when one of them
  // is not open; then none counts as used.
  absl::Status Use(const StepRequest& request) TRIBUTARY_LOCKED;
  void Release(const StepRequest& request) TRIBUTARY_LOCKED;

  // When SweepIfDue has something to do; max() when no region has an owner.
  std::chrono::steady_clock::time_point NextSweep() const TRIBUTARY_LOCKED { return next_sweep_; }
  // Forgets the regions of owners that died, after this critical section.
  void SweepIfDue(std::chrono::steady_clock::time_point now) TRIBUTARY_LOCKED;

  // Sends again what workers of an earlier epoch may not have heard of.
  void CloseAgain() TRIBUTARY_LOCKED;
  // The workers are gone, and with them what they had open: answers those who wait for that.
  void OnWorkersGone() TRIBUTARY_LOCKED;

 private:
  // Memory of GPUs.
  void RegisterDevice(const v1::RegisterSharedMemoryRequest& request,
                      Done<v1::RegisterSharedMemoryReply> done) TRIBUTARY_UNLOCKED;
  // A region may have been registered that has an owner.
  void ExpectSweep() TRIBUTARY_UNLOCKED;
  // A client that dies unregisters nothing: SharedMemoryRegistry knows who died.
  void ForgetOwnerless() TRIBUTARY_UNLOCKED;
  void Open(const RegisteredRegionPtr& region) TRIBUTARY_LOCKED;
  void OnOpened(const RegisteredRegionPtr& region, const absl::Status& status) TRIBUTARY_UNLOCKED;
  // No call begins to use it any more. It is closed when those that do are through.
  void Retire(const RegisteredRegionPtr& region) TRIBUTARY_LOCKED;
  void Close(const RegisteredRegionPtr& region) TRIBUTARY_LOCKED;
  void OnClosed(const RegisteredRegionPtr& region, uint64_t epoch,
                const absl::Status& status) TRIBUTARY_UNLOCKED;
  void AnswerWaiting(RegisteredRegion* region, const absl::Status& status) TRIBUTARY_LOCKED;

  const CoordinatorOptions& options_;
  const telemetry::Logger& log_;
  const WorkerGroup& group_;
  CoordinatorLock& lock_;
  const ServingState& serving_;
  GroupCommands& commands_;

  MemoryDeposit deposit_;
  SharedMemoryRegistry registry_;  // thread safe
  // Regions whose closing did not reach all workers. Somebody may wait for it.
  std::vector<RegisteredRegionPtr> unclosed_ TRIBUTARY_GUARDED_BY(kCoordinatorLock);
  std::chrono::steady_clock::time_point next_sweep_ TRIBUTARY_GUARDED_BY(kCoordinatorLock) =
      std::chrono::steady_clock::time_point::max();
};

}  // namespace tributary::service
