// How many calls each caller may have in flight, so that one cannot take the service from others.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "service/observe/observer.h"

namespace tributary::service {

// Thread safe.
class CallQuota : public std::enable_shared_from_this<CallQuota> {
 public:
  // Held as long as the call is in flight.
  using Admission = std::shared_ptr<const void>;

  // 0: no limit.
  static std::shared_ptr<CallQuota> Create(int64_t most_per_caller, OnRefused on_refused = nullptr);

  // RESOURCE_EXHAUSTED when the caller has as many in flight as it may.
  absl::StatusOr<Admission> Admit(const std::string& caller);

 private:
  CallQuota(int64_t most_per_caller, OnRefused on_refused)
      : most_(most_per_caller), on_refused_(std::move(on_refused)) {}
  void Leave(const std::string& caller);

  const int64_t most_;
  const OnRefused on_refused_;
  std::mutex mutex_;
  absl::flat_hash_map<std::string, int64_t> in_flight_;  // of callers that have any
};

}  // namespace tributary::service
