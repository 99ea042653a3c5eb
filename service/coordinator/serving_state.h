// Whether the service can serve: the phase of its group of workers, the group's epoch, and whether
// the service is draining. GroupSetup moves the phase; everybody else asks.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <string>

#include "absl/status/status.h"
#include "service/coordinator/critical_section.h"

namespace tributary::service {

class ServingState {
 public:
  enum class Phase : uint8_t {
    kForming,    // the workers do not form a group
    kSettingUp,  // they do, and are being told of caches, tables and regions
    kReady,
  };

  ServingState(CoordinatorLock& lock, std::chrono::milliseconds retry_delay,
               std::function<void(bool ready)> on_readiness);

  // OK when calls can be served, or else UNAVAILABLE with the reason.
  absl::Status Check() const TRIBUTARY_LOCKED;

  Phase phase() const TRIBUTARY_LOCKED { return phase_; }
  bool ready() const TRIBUTARY_LOCKED { return phase_ == Phase::kReady; }
  bool draining() const TRIBUTARY_LOCKED { return draining_; }
  // The generation of the group; 0 before the first.
  uint64_t epoch() const TRIBUTARY_LOCKED { return epoch_; }

  // From now on Check refuses calls.
  void StartDraining() TRIBUTARY_LOCKED;
  void BeginEpoch(uint64_t epoch) TRIBUTARY_LOCKED { epoch_ = epoch; }
  void SetReady() TRIBUTARY_LOCKED;
  // `phase` is kForming or kSettingUp.
  void SetNotReady(Phase phase, std::string reason) TRIBUTARY_LOCKED;

 private:
  void SetPhase(Phase phase) TRIBUTARY_LOCKED;

  CoordinatorLock& lock_;
  const std::chrono::milliseconds retry_delay_;
  const std::function<void(bool ready)> on_readiness_;

  Phase phase_ TRIBUTARY_GUARDED_BY(kCoordinatorLock) = Phase::kForming;
  std::string not_ready_ TRIBUTARY_GUARDED_BY(kCoordinatorLock) = "waiting for workers";
  bool draining_ TRIBUTARY_GUARDED_BY(kCoordinatorLock) = false;
  uint64_t epoch_ TRIBUTARY_GUARDED_BY(kCoordinatorLock) = 0;
};

}  // namespace tributary::service
