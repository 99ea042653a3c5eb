#include "service/client/lease.h"

#include <algorithm>
#include <cstdint>
#include <utility>

namespace tributary::client {
namespace {

using std::chrono::milliseconds;

// A lease is renewed after this part of its time.
constexpr double kRenewAfter = 1.0 / 3;
constexpr milliseconds kShortestPause{20};
constexpr milliseconds kLongestPause{60'000};
// After a call that failed; the service may be restarting.
constexpr milliseconds kPauseAfterFailure{500};
constexpr std::chrono::seconds kCallTimeout{5};

}  // namespace

void PresentLease(const std::string& lease, grpc::ClientContext* context) {
  if (!lease.empty()) context->AddMetadata("tributary-lease", lease);
}

LeaseRenewal::LeaseRenewal(v1::AttentionService::StubInterface* stub, std::string lease)
    : stub_(stub), lease_(std::move(lease)), thread_([this] { Run(); }) {}

LeaseRenewal::~LeaseRenewal() {
  {
    const MutexLock lock(mutex_);
    stopping_ = true;
    if (call_ != nullptr) call_->TryCancel();
    changed_.NotifyAll();
  }
  thread_.join();
}

void LeaseRenewal::Run() {
  for (;;) {
    const auto wake = std::chrono::steady_clock::now() + Renew();
    const MutexLock lock(mutex_);
    while (!stopping_ && changed_.WaitUntil(mutex_, wake)) {
    }
    if (stopping_) return;
  }
}

milliseconds LeaseRenewal::Renew() {
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + kCallTimeout);
  {
    const MutexLock lock(mutex_);
    if (stopping_) return milliseconds(0);
    call_ = &context;
  }
  v1::RenewLeaseRequest request;
  request.set_lease(lease_);
  v1::RenewLeaseReply reply;
  const grpc::Status status = stub_->RenewLease(&context, request, &reply);
  {
    const MutexLock lock(mutex_);
    call_ = nullptr;
  }
  if (!status.ok()) return kPauseAfterFailure;
  if (reply.timeout_seconds() <= 0) return kLongestPause;  // it may be another after a restart
  const auto pause = milliseconds(static_cast<int64_t>(
      std::min(reply.timeout_seconds() * 1000 * kRenewAfter, 1.0 * kLongestPause.count())));
  return std::max(pause, kShortestPause);
}

}  // namespace tributary::client
