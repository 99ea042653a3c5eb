#include "service/api/operations_service.h"

#include "absl/status/statusor.h"
#include "base/status/grpc_status.h"

namespace tributary::service {

grpc::ServerUnaryReactor* OperationsService::ChangeWorkers(grpc::CallbackServerContext* context,
                                                           const v1::ChangeWorkersRequest* request,
                                                           v1::ChangeWorkersReply* reply) {
  auto* reactor = context->DefaultReactor();
  const absl::Status allowed = access_->Authorize(*context, {Role::kAdmin}).status();
  if (!allowed.ok()) {
    reactor->Finish(ToGrpcStatus(allowed));
    return reactor;
  }
  coordinator_.ChangeWorkers(*request,
                             [reactor, reply](absl::StatusOr<v1::ChangeWorkersReply> changed) {
                               if (changed.ok()) *reply = *changed;
                               reactor->Finish(ToGrpcStatus(changed.status()));
                             });
  return reactor;
}

}  // namespace tributary::service
