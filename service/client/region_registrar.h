// The RPCs by which the service gets to know memory that it shares with this process, and lets go
// of it. Counts those under way, so that none outlives the stub.
#pragma once

#include <chrono>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <string>

#include "absl/status/status.h"
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
  // Whether it succeeds changes nothing for this side.
  void Unregister(const std::string& name);

  // Every RPC has a deadline, so this ends.
  void AwaitNone();

 private:
  void Begin();
  void End();

  v1::AttentionService::Stub* const stub_;
  std::mutex mutex_;
  std::condition_variable none_;
  int under_way_ = 0;
};

}  // namespace tributary::client
