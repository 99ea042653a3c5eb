#include "service/client/host_session.h"

#include <utility>

#include "service/client/c/session.h"

namespace tributary::client {
namespace {

class OnHost final : public AnySession {
 public:
  explicit OnHost(std::unique_ptr<HostSession> session) : session_(std::move(session)) {}
  absl::StatusOr<uint64_t> Submit(const SessionStep& step) override {
    return session_->Submit(step);
  }
  absl::Status Attend(const SessionLayer& layer, void* /*stream*/) override {
    return session_->Attend(layer);
  }
  absl::Status Append(const HeadRows& k, const HeadRows& v, void* /*stream*/) override {
    return session_->Append(k, v);
  }
  absl::Status Await(uint64_t step) override { return session_->Await(step); }
  absl::Status Close() override { return session_->Close(); }
  absl::Status status() const override { return session_->status(); }
  const v1::SessionOpened& opened() const override { return session_->opened(); }

 private:
  const std::unique_ptr<HostSession> session_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<AnySession>> OpenHostSession(const ConnectOptions& connect,
                                                            const HostSessionOptions& options) {
  auto session = HostSession::Open(connect, options);
  if (!session.ok()) return session.status();
  return std::make_unique<OnHost>(*std::move(session));
}

absl::StatusOr<std::unique_ptr<AnySession>> JoinHostSession(const ConnectOptions& connect,
                                                            const EndpointOptions& endpoint) {
  auto session = HostSession::Join(connect, endpoint);
  if (!session.ok()) return session.status();
  return std::make_unique<OnHost>(*std::move(session));
}

}  // namespace tributary::client
