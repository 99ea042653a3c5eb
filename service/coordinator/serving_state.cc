#include "service/coordinator/serving_state.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status/rpc_errors.h"

namespace tributary::service {

ServingState::ServingState(CoordinatorLock& lock, std::chrono::milliseconds retry_delay,
                           std::function<void(bool ready)> on_readiness)
    : lock_(lock), retry_delay_(retry_delay), on_readiness_(std::move(on_readiness)) {}

absl::Status ServingState::Check() const {
  if (draining_) return Unavailable("DRAINING", "the service is shutting down", retry_delay_);
  if (phase_ != Phase::kReady) {
    return Unavailable("GROUP_FORMING",
                       absl::StrCat("the group of workers is not ready: ", not_ready_),
                       retry_delay_);
  }
  return absl::OkStatus();
}

void ServingState::StartDraining() {
  if (std::exchange(draining_, true)) return;
  lock_.Defer([this] {
    if (on_readiness_) on_readiness_(false);
  });
}

void ServingState::SetReady() { SetPhase(Phase::kReady); }

void ServingState::SetNotReady(Phase phase, std::string reason) {
  not_ready_ = std::move(reason);
  SetPhase(phase);
}

void ServingState::SetPhase(Phase phase) {
  const bool was_ready = ready();
  phase_ = phase;
  const bool is_ready = ready();
  if (was_ready == is_ready || draining_ || !on_readiness_) return;
  lock_.Defer([this, is_ready] { on_readiness_(is_ready); });
}

}  // namespace tributary::service
