// absl::Status as gRPC's, details in the trailer `grpc-status-details-bin`.
#pragma once

#include "absl/status/status.h"
#include "grpcpp/support/status.h"

namespace tributary {

grpc::StatusCode ToGrpcCode(absl::StatusCode code);
grpc::Status ToGrpcStatus(const absl::Status& status);

}  // namespace tributary
