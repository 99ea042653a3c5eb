// Errors as they come from the other end of a connection.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "base/status/rpc_errors.h"
#include "google/rpc/error_details.pb.h"
#include "google/rpc/status.pb.h"

namespace tributary::test {

// A status of the wire without details.
inline google::rpc::Status Rpc(int code, const std::string& message) {
  google::rpc::Status status;
  status.set_code(code);
  status.set_message(message);
  return status;
}

// UNAVAILABLE whose RetryInfo asks for this delay, as a client reads it.
inline absl::Status UnavailableAfter(int64_t seconds, int32_t nanos) {
  google::rpc::Status status = Rpc(14, "forming");
  google::rpc::RetryInfo info;
  info.mutable_retry_delay()->set_seconds(seconds);
  info.mutable_retry_delay()->set_nanos(nanos);
  status.add_details()->PackFrom(info);
  return FromRpcStatus(status);
}

}  // namespace tributary::test
