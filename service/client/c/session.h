// A session of either kind, for the C interface.
#pragma once

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "service/client/client.h"
#include "service/client/host_session.h"
#include "service/client/session.h"

namespace tributary::client {

// HostSession or DeviceSession. `stream` is a cudaStream_t, which only the second looks at.
class AnySession {
 public:
  virtual ~AnySession() = default;
  virtual absl::StatusOr<uint64_t> Submit(const SessionStep& step) = 0;
  virtual absl::Status Attend(const SessionLayer& layer, void* stream) = 0;
  virtual absl::Status Append(const HeadRows& k, const HeadRows& v, void* stream) = 0;
  virtual absl::Status Await(uint64_t step) = 0;
  virtual absl::Status Close() = 0;
  virtual absl::Status status() const = 0;
  virtual const v1::SessionOpened& opened() const = 0;
};

absl::StatusOr<std::unique_ptr<AnySession>> OpenHostSession(const ConnectOptions& connect,
                                                            const HostSessionOptions& options);
absl::StatusOr<std::unique_ptr<AnySession>> JoinHostSession(const ConnectOptions& connect,
                                                            const EndpointOptions& endpoint);
// On the GPU that is current. UNIMPLEMENTED in a library that was built without CUDA. `spin` of the
// options is not looked at.
absl::StatusOr<std::unique_ptr<AnySession>> OpenDeviceSession(const ConnectOptions& connect,
                                                              const HostSessionOptions& options);
absl::StatusOr<std::unique_ptr<AnySession>> JoinDeviceSession(const ConnectOptions& connect,
                                                              const EndpointOptions& endpoint);

}  // namespace tributary::client
