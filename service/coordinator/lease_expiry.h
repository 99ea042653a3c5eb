// What happens to sequences when the lease that they belong to has ended: they are closed.
#pragma once

#include <chrono>
#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "base/telemetry/log.h"
#include "service/coordinator/cache_registry.h"
#include "service/coordinator/critical_section.h"
#include "service/coordinator/sequence_calls.h"
#include "service/schedule/leases.h"
#include "tributary/v1/attention.pb.h"

namespace tributary::service {

class LeaseExpiry {
 public:
  // All of them outlive this.
  LeaseExpiry(const telemetry::Logger& log, CoordinatorLock& lock, const CacheRegistry& caches,
              SequenceCalls& sequences, Leases& leases)
      : log_(log), lock_(lock), caches_(caches), sequences_(sequences), leases_(leases) {}

  // The call of the API.
  absl::StatusOr<v1::RenewLeaseReply> Renew(const v1::RenewLeaseRequest& request)
      TRIBUTARY_UNLOCKED;

  // When ActIfDue has something to do; max() for never.
  CoordinatorLock::Clock::time_point NextDue() const TRIBUTARY_LOCKED;
  // Closes sequences of leases that have ended, after this critical section.
  void ActIfDue(CoordinatorLock::Clock::time_point now) TRIBUTARY_LOCKED;

 private:
  // Closes what belongs to `ended`. A lease is done with when nothing of it is found: what could
  // not be closed now, because the group is forming for example, is closed at the next look.
  void CloseSequencesOf(const std::vector<LeasePtr>& ended) TRIBUTARY_UNLOCKED;

  const telemetry::Logger& log_;
  CoordinatorLock& lock_;
  const CacheRegistry& caches_;
  SequenceCalls& sequences_;
  Leases& leases_;

  // Those that may have sequences left, and when it is looked for them.
  std::vector<LeasePtr> ended_ TRIBUTARY_GUARDED_BY(kCoordinatorLock);
  CoordinatorLock::Clock::time_point next_look_ TRIBUTARY_GUARDED_BY(kCoordinatorLock) =
      CoordinatorLock::Clock::time_point::max();
};

}  // namespace tributary::service
