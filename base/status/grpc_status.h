// Conversion between absl::Status and gRPC's status. Details travel in the trailer
// `grpc-status-details-bin`.
#pragma once

#include "absl/status/status.h"
#include "grpcpp/support/status.h"

namespace tributary {

grpc::StatusCode ToGrpcCode(absl::StatusCode code);
grpc::Status ToGrpcStatus(const absl::Status& status);

// The inverse, for what dials. Code and message are those of the call; the trailer, which the peer
// wrote, adds details only. A call that gRPC has reset because it is short of memory is
// UNAVAILABLE, as one whose connection it has closed: the same call may succeed a little later.
absl::Status FromGrpcStatus(const grpc::Status& status);

}  // namespace tributary
