#include "service/client/c/session.h"

namespace tributary::client {

absl::StatusOr<std::unique_ptr<AnySession>> OpenDeviceSession(
    const ConnectOptions& /*connect*/, const HostSessionOptions& /*options*/) {
  return absl::UnimplementedError("sessions on GPUs: this libtributary was built without CUDA");
}

absl::StatusOr<std::unique_ptr<AnySession>> JoinDeviceSession(const ConnectOptions& /*connect*/,
                                                              const EndpointOptions& /*endpoint*/) {
  return absl::UnimplementedError("sessions on GPUs: this libtributary was built without CUDA");
}

}  // namespace tributary::client
