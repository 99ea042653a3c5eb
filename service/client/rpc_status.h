// Errors of the wire as absl::Status. Details stay with the status as payloads, serialised
// google.rpc messages under their type URLs.
#pragma once

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "google/rpc/status.pb.h"
#include "grpcpp/support/status.h"

namespace tributary::client {

absl::Status FromRpc(const google::rpc::Status& status);
absl::Status FromGrpc(const grpc::Status& status);

// INVALID_ARGUMENT of the client's own checks, in the form of the service's: FieldOf() reads it.
absl::Status InvalidField(absl::string_view field, absl::string_view message);

}  // namespace tributary::client
