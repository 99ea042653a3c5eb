// What operators have the service do, over gRPC (proto/tributary/v1/operations.proto), for admins.
#pragma once

#include <grpcpp/grpcpp.h>

#include <memory>
#include <utility>

#include "service/access/access_control.h"
#include "service/coordinator/coordinator.h"
#include "tributary/v1/operations.grpc.pb.h"

namespace tributary::service {

class OperationsService final : public v1::OperationsService::CallbackService {
 public:
  // The coordinator outlives this.
  OperationsService(Coordinator* coordinator, std::shared_ptr<AccessControl> access)
      : coordinator_(*coordinator), access_(std::move(access)) {}

  grpc::ServerUnaryReactor* ChangeWorkers(grpc::CallbackServerContext* context,
                                          const v1::ChangeWorkersRequest* request,
                                          v1::ChangeWorkersReply* reply) override;

 private:
  Coordinator& coordinator_;
  const std::shared_ptr<AccessControl> access_;
};

}  // namespace tributary::service
