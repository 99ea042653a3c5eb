// The outcome of an operation on the two lowest floors (kernels, collective).
//
// It is not absl::Status because these floors must build where only CUDA, NCCL and CMake are
// installed. The codes are the subset of the canonical gRPC codes that these floors can mean, so
// that worker/status_conversion.h maps them one to one.
#pragma once

#include <string>
#include <utility>

namespace tributary {

enum class StatusCode {
  kOk = 0,
  kInvalidArgument,     // the caller broke the contract; nothing was changed
  kFailedPrecondition,  // the combination is well formed but not supported here
  kDeadlineExceeded,    // a wait ran out; a collective's group must be re-formed
  kAborted,             // the communicator was aborted, by us or by a peer
  kUnavailable,         // a peer is gone
  kInternal,            // a bug, or a library failed in a way it should not
};

class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(StatusCode code, std::string message) : code_(code), message_(std::move(message)) {}

  static Status Ok() { return {}; }

  bool ok() const { return code_ == StatusCode::kOk; }
  StatusCode code() const { return code_; }
  const std::string& message() const { return message_; }

 private:
  StatusCode code_ = StatusCode::kOk;
  std::string message_;
};

inline Status InvalidArgument(std::string message) {
  return {StatusCode::kInvalidArgument, std::move(message)};
}

}  // namespace tributary
