#include "service/client/region_registrar.h"

#include <memory>
#include <utility>

#include "base/status/grpc_status.h"
#include "grpcpp/client_context.h"

namespace tributary::client {
namespace {

constexpr std::chrono::seconds kRegisterTimeout{5};
constexpr std::chrono::seconds kUnregisterTimeout{1};

// What an RPC needs until it is over. Let go before the RPC counts as over: its context holds the
// channel, and a thread of gRPC must not be the last to do so.
template <typename Request, typename Reply>
struct Rpc {
  explicit Rpc(std::chrono::seconds timeout) {
    context.set_deadline(std::chrono::system_clock::now() + timeout);
  }
  grpc::ClientContext context;
  Request request;
  Reply reply;
};

}  // namespace

void RegionRegistrar::Register(v1::RegisterSharedMemoryRequest request,
                               std::function<void(absl::Status)> done) {
  auto rpc = std::make_shared<Rpc<v1::RegisterSharedMemoryRequest, v1::RegisterSharedMemoryReply>>(
      kRegisterTimeout);
  rpc->request = std::move(request);
  Begin();
  stub_->async()->RegisterSharedMemory(
      &rpc->context, &rpc->request, &rpc->reply,
      [this, rpc, done = std::move(done)](const grpc::Status& status) mutable {
        done(FromGrpcStatus(status));
        rpc.reset();
        End();
      });
}

absl::Status RegionRegistrar::RegisterNow(const v1::RegisterSharedMemoryRequest& request,
                                          std::chrono::system_clock::time_point deadline) {
  grpc::ClientContext context;
  context.set_deadline(deadline);
  v1::RegisterSharedMemoryReply reply;
  return FromGrpcStatus(stub_->RegisterSharedMemory(&context, request, &reply));
}

void RegionRegistrar::Unregister(const std::string& name) {
  auto rpc =
      std::make_shared<Rpc<v1::UnregisterSharedMemoryRequest, v1::UnregisterSharedMemoryReply>>(
          kUnregisterTimeout);
  rpc->request.set_name(name);
  Begin();
  stub_->async()->UnregisterSharedMemory(&rpc->context, &rpc->request, &rpc->reply,
                                         [this, rpc](const grpc::Status&) mutable {
                                           rpc.reset();
                                           End();
                                         });
}

void RegionRegistrar::AwaitNone() {
  const MutexLock lock(mutex_);
  while (under_way_ > 0) none_.Wait(mutex_);
}

void RegionRegistrar::Begin() {
  const MutexLock lock(mutex_);
  ++under_way_;
}

// The last touch of this object by an RPC: told under the lock, so that AwaitNone cannot return
// before it is over.
void RegionRegistrar::End() {
  const MutexLock lock(mutex_);
  if (--under_way_ == 0) none_.NotifyAll();
}

}  // namespace tributary::client
