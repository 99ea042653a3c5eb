// The lease that a client presents (attention.proto, Leases).
#pragma once

#include <grpcpp/client_context.h>

#include <chrono>
#include <memory>
#include <string>
#include <thread>

#include "base/sync/mutex.h"
#include "tributary/v1/attention.grpc.pb.h"

namespace tributary::client {

// Has a call or a stream present the lease; an empty one is not presented.
void PresentLease(const std::string& lease, grpc::ClientContext* context);

// Renews a lease for as long as it lives, so that a host that has nothing to do for a while keeps
// its sequences. It has a thread of its own.
class LeaseRenewal {
 public:
  // `stub` outlives this.
  LeaseRenewal(v1::AttentionService::StubInterface* stub, std::string lease);
  ~LeaseRenewal();
  LeaseRenewal(const LeaseRenewal&) = delete;
  LeaseRenewal& operator=(const LeaseRenewal&) = delete;

 private:
  void Run();
  // How long it is until the lease is to be renewed again.
  std::chrono::milliseconds Renew();

  v1::AttentionService::StubInterface* const stub_;
  const std::string lease_;
  Mutex mutex_;
  CondVar changed_;
  bool stopping_ TRIBUTARY_GUARDED_BY(mutex_) = false;
  // The call in flight.
  grpc::ClientContext* call_ TRIBUTARY_GUARDED_BY(mutex_) = nullptr;
  std::thread thread_;
};

}  // namespace tributary::client
