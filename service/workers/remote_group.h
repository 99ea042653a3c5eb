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

#include "base/telemetry/log.h"
#include "collective/exchange/exchange.h"
#include "service/access/access_control.h"
#include "service/access/join_secret.h"
#include "service/workers/group_store.h"
#include "service/workers/worker_group.h"
#include "worker/exchange_choice.h"

namespace grpc {
class ServerBuilder;
}

namespace tributary::service {

struct RemoteGroupOptions {
  int size = 1;  // to begin with
  // What it is to have later, by Regroup; 0: as many. Workers that were told either may register.
  int wanted_size = 0;
  // Told to every worker: ranks must choose alike.
  collective::Strategy strategy = collective::Strategy::kAuto;
  worker::ExchangePlace exchange_place = worker::ExchangePlace::kHost;  // told to every worker too
  worker::Device device = worker::Device::kCpu;  // workers that compute on another are refused
  bool deterministic = false;                    // told to every worker too
  std::chrono::milliseconds heartbeat_interval{1'000};
  // A worker that says nothing for this long is taken for dead.
  std::chrono::milliseconds heartbeat_timeout{5'000};
  // The time from when all ranks are registered until all are connected to each other.
  std::chrono::milliseconds form_timeout{10'000};
  // The most bytes of one message, either way. A larger command is RESOURCE_EXHAUSTED; the group
  // goes on.
  size_t max_message_bytes = size_t{1} << 30;
  // Decides who may register (Role::kWorker). Null: whoever reaches the address may.
  std::shared_ptr<AccessControl> access;
  // What they must show besides. Null: nothing.
  std::shared_ptr<JoinSecret> join_secret;
  // How an earlier life of the coordinator left the group; group_id 0: there is none, or it is not
  // known. Then the group is a new one, and workers forget what they hold.
  GroupIdentity identity = {};
  // For how long from then on its ranks are kept for those that held them. Others that ask for no
  // rank in particular stand by meanwhile. Twice of what a worker waits at most before it dials
  // again (WorkerOptions::reconnect_max).
  std::chrono::milliseconds holders_return{10'000};
  // What a next life must know is told to it. Null: there will be none.
  std::shared_ptr<GroupStore> store;
  // Hears whom the group waits for, and whom it refused. Null: nobody does.
  std::shared_ptr<const telemetry::Logger> log = nullptr;
};

class RemoteGroup : public WorkerGroup {
 public:
  // Adds the gRPC service that workers dial, and the message limits that it needs. Workers may
  // register once the server runs; the first group forms after Start.
  virtual void AddTo(grpc::ServerBuilder& builder) = 0;
};

// A worker that leaves and comes back gets its rank again. If its process stayed alive it is not
// `fresh`, unless another instance held the rank in between.
std::unique_ptr<RemoteGroup> CreateRemoteGroup(const RemoteGroupOptions& options);

}  // namespace tributary::service
