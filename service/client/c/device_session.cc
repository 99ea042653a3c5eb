#include "service/client/cuda/device_session.h"

#include <utility>

#include "base/status/errors.h"
#include "service/client/c/session.h"

namespace tributary::client {
namespace {

class OnDevice final : public AnySession {
 public:
  explicit OnDevice(std::unique_ptr<DeviceSession> session) : session_(std::move(session)) {}
  absl::StatusOr<uint64_t> Submit(const SessionStep& step) override {
    absl::StatusOr<uint64_t> number = session_->Submit(step);
    if (number.ok()) last_step_ = *number;
    return number;
  }
  absl::Status Attend(const SessionLayer& layer, void* stream) override {
    return session_->Attend(static_cast<cudaStream_t>(stream), layer);
  }
  absl::Status Append(const HeadRows& k, const HeadRows& v, void* stream) override {
    return session_->Append(static_cast<cudaStream_t>(stream), k, v);
  }
  absl::Status Await(uint64_t step) override { return session_->Await(step); }
  // Steps end in order: the session may go when its last one has.
  absl::Status Close() override {
    return last_step_ == 0 ? session_->status() : session_->Await(last_step_);
  }
  absl::Status status() const override { return session_->status(); }
  const v1::SessionOpened& opened() const override { return session_->opened(); }

 private:
  const std::unique_ptr<DeviceSession> session_;
  uint64_t last_step_ = 0;  // that was accepted; 0: none
};

}  // namespace

absl::StatusOr<std::unique_ptr<AnySession>> OpenDeviceSession(const ConnectOptions& connect,
                                                              const HostSessionOptions& options) {
  if (options.output_dtype != v1::DTYPE_UNSPECIFIED && options.output_dtype != options.dtype) {
    return InvalidField("options.output_dtype", "outputs in memory of a GPU have q's type");
  }
  auto session = DeviceSession::Open(connect, {.cache_id = options.cache_id,
                                               .max_rows = options.max_rows,
                                               .max_new_tokens = options.max_new_tokens,
                                               .dtype = options.dtype,
                                               .return_lse = options.return_lse,
                                               .max_steps = options.max_steps,
                                               .wait_timeout = options.wait_timeout,
                                               .endpoints = options.endpoints,
                                               .kv_replicated = options.kv_replicated});
  if (!session.ok()) return session.status();
  return std::make_unique<OnDevice>(*std::move(session));
}

absl::StatusOr<std::unique_ptr<AnySession>> JoinDeviceSession(const ConnectOptions& connect,
                                                              const EndpointOptions& endpoint) {
  auto session = DeviceSession::Join(connect, endpoint);
  if (!session.ok()) return session.status();
  return std::make_unique<OnDevice>(*std::move(session));
}

}  // namespace tributary::client
