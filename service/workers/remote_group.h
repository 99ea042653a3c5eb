// A group of worker processes that register over the network.
//
//   auto group = CreateRemoteGroup({.size = 4});
//   grpc::ServerBuilder builder;
//   builder.AddListeningPort(worker_listen, credentials);
//   group->AddTo(builder);
//   auto server = builder.BuildAndStart();
//   group->Start(&observer);
//   ...
//   group->Stop();       // then
//   server->Shutdown();  // then destroy the server, then the group
//
// The protocol is proto/tributary/v1/worker.proto.
#pragma once

#include <chrono>
#include <cstddef>
#include <memory>
#include <string>

#include "collective/exchange/exchange.h"
#include "service/access/access_control.h"
#include "service/workers/worker_group.h"
#include "worker/exchange_choice.h"

namespace grpc {
class ServerBuilder;
}

namespace tributary::service {

struct RemoteGroupOptions {
  int size = 1;
  // Told to every worker: ranks must choose alike.
  collective::Strategy strategy = collective::Strategy::kAuto;
  worker::ExchangePlace exchange_place = worker::ExchangePlace::kHost;  // told to every worker too
  worker::Device device = worker::Device::kCpu;  // workers that compute on another are refused
  bool deterministic = false;                    // told to every worker too
  std::chrono::milliseconds heartbeat_interval{1'000};
  // A worker that says nothing for so long is taken for dead.
  std::chrono::milliseconds heartbeat_timeout{5'000};
  // From all ranks being there to all ranks being connected to each other.
  std::chrono::milliseconds form_timeout{10'000};
  // Of one message either way. A command that is larger is RESOURCE_EXHAUSTED and breaks nothing.
  size_t max_message_bytes = size_t{1} << 30;
  // Who may register (Role::kWorker). Null: whoever reaches the address.
  std::shared_ptr<AccessControl> access;
};

class RemoteGroup : public WorkerGroup {
 public:
  // Adds the service workers dial and the limits it needs. Workers may register from then on; the
  // first group forms after Start.
  virtual void AddTo(grpc::ServerBuilder& builder) = 0;
};

// A rank that leaves and comes back keeps its place. A worker whose process stayed alive is not
// `fresh` when it returns, unless another instance held its rank in between.
std::unique_ptr<RemoteGroup> CreateRemoteGroup(const RemoteGroupOptions& options);

}  // namespace tributary::service
