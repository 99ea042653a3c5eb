// The RPCs that register this process's memory with the service, and unregister it. The registrar
// counts those under way, so that none outlives the stub.
#pragma once

#include <chrono>
#include <functional>
#include <string>

#include "absl/status/status.h"
#include "base/sync/mutex.h"
#include "tributary/v1/attention.grpc.pb.h"

namespace tributary::client {

class RegionRegistrar {
 public:
  explicit RegionRegistrar(v1::AttentionService::Stub* stub) : stub_(stub) {}
  RegionRegistrar(const RegionRegistrar&) = delete;
  RegionRegistrar& operator=(const RegionRegistrar&) = delete;

  // `done` runs once, within seconds, on a thread of gRPC.
  void Register(v1::RegisterSharedMemoryRequest request, std::function<void(absl::Status)> done);
  absl::Status RegisterNow(const v1::RegisterSharedMemoryRequest& request,
                           std::chrono::system_clock::time_point deadline);
  // Returns at once. Nothing depends on whether the service answers.
  void Unregister(const std::string& name);

  // Waits until no RPC is under way. Every RPC has a deadline, so this ends.
  void AwaitNone();

 private:
  void Begin();
  void End();

  v1::AttentionService::Stub* const stub_;
  Mutex mutex_;
  CondVar none_;
  int under_way_ TRIBUTARY_GUARDED_BY(mutex_) = 0;
};

}  // namespace tributary::client
