#include "service/cli/health_check.h"

#include "absl/synchronization/notification.h"
#include "base/status/grpc_status.h"
#include "google/protobuf/wrappers.pb.h"
#include "grpcpp/client_context.h"
#include "grpcpp/generic/generic_stub.h"
#include "grpcpp/impl/codegen/proto_utils.h"

namespace tributary::cli {
namespace {

constexpr char kCheckMethod[] = "/grpc.health.v1.Health/Check";
constexpr int kServing = 1;  // HealthCheckResponse.ServingStatus

// Debian ships no stubs of health.proto. On the wire its two messages are these: a string and an
// enumeration, each field 1.
using HealthCheckRequest = google::protobuf::StringValue;
using HealthCheckResponse = google::protobuf::Int32Value;

}  // namespace

absl::StatusOr<bool> CheckHealth(const std::shared_ptr<grpc::Channel>& channel,
                                 const std::string& service, std::chrono::milliseconds timeout) {
  HealthCheckRequest request;
  request.set_value(service);
  HealthCheckResponse response;
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + timeout);
  grpc::TemplatedGenericStub<HealthCheckRequest, HealthCheckResponse> stub(channel);
  grpc::Status status;
  absl::Notification done;
  stub.UnaryCall(&context, kCheckMethod, grpc::StubOptions(), &request, &response,
                 [&](grpc::Status result) {
                   status = std::move(result);
                   done.Notify();
                 });
  done.WaitForNotification();  // by the deadline
  if (!status.ok()) return FromGrpcStatus(status);
  return response.value() == kServing;
}

}  // namespace tributary::cli
