// How many calls each caller may have in flight, so that one cannot take the service from others.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "base/sync/mutex.h"
#include "service/observe/observer.h"

namespace tributary::service {

// Thread safe.
class CallQuota : public std::enable_shared_from_this<CallQuota> {
 public:
  // The place of one call: its owner keeps it for as long as the call is in flight.
  using Admission = std::shared_ptr<const void>;

  // `most_per_caller` 0: no limit. `on_refused`, if there is one, is told of every refusal.
  static std::shared_ptr<CallQuota> Create(int64_t most_per_caller, OnRefused on_refused = nullptr);

  // RESOURCE_EXHAUSTED when the caller has as many calls in flight as it may have.
  absl::StatusOr<Admission> Admit(const std::string& caller);

 private:
  CallQuota(int64_t most_per_caller, OnRefused on_refused)
      : most_(most_per_caller), on_refused_(std::move(on_refused)) {}
  void Leave(const std::string& caller);

  const int64_t most_;
  const OnRefused on_refused_;
  Mutex mutex_;
  // Callers that have no call in flight are not in it.
  absl::flat_hash_map<std::string, int64_t> in_flight_ TRIBUTARY_GUARDED_BY(mutex_);
};

}  // namespace tributary::service
