// How many calls, or streams, each caller may have at a time, so that one cannot take the service
// from others.
#pragma once

#include <atomic>
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
  // The place of one call, or stream: its owner keeps it for as long as that is in flight.
  using Admission = std::shared_ptr<const void>;

  // `most_per_caller` 0: no limit. `on_refused`, if there is one, is told of every refusal. `what`
  // is counted: kCalls or kStreams.
  static std::shared_ptr<CallQuota> Create(int64_t most_per_caller, OnRefused on_refused = nullptr,
                                           ClientLimit what = ClientLimit::kCalls);

  // For calls from now on; those in flight stay. Calls that came while there was no limit do not
  // count.
  void SetMost(int64_t most_per_caller) { most_.store(most_per_caller); }
  int64_t most() const { return most_.load(); }

  // RESOURCE_EXHAUSTED when the caller has as many in flight as it may have.
  absl::StatusOr<Admission> Admit(const std::string& caller);

 private:
  CallQuota(int64_t most_per_caller, OnRefused on_refused, ClientLimit what)
      : most_(most_per_caller), on_refused_(std::move(on_refused)), what_(what) {}
  void Leave(const std::string& caller);

  std::atomic<int64_t> most_;
  const OnRefused on_refused_;
  const ClientLimit what_;
  Mutex mutex_;
  // Callers that have no call in flight are not in it.
  absl::flat_hash_map<std::string, int64_t> in_flight_ TRIBUTARY_GUARDED_BY(mutex_);
};

}  // namespace tributary::service
