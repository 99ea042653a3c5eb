// What a call of the API brings besides its request.
#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "base/telemetry/trace.h"

namespace tributary::service {

// Takes the answer to a call: called once, on any thread, maybe before the call returns. It must
// not block.
template <typename Reply>
using Done = std::function<void(absl::StatusOr<Reply>)>;

struct CallContext {
  // The caller's name (service/access/access_control.h).
  std::string caller;
  std::chrono::steady_clock::time_point deadline = std::chrono::steady_clock::time_point::max();
  // Set when the caller is no longer interested; may be null. A call that has not taken effect is
  // then dropped; of a call that has, only the result is.
  std::shared_ptr<const std::atomic<bool>> cancelled;
  // Its span_id is the call's own span.
  telemetry::TraceContext trace;
};

inline bool Cancelled(const CallContext& call) {
  return call.cancelled != nullptr && call.cancelled->load(std::memory_order_acquire);
}

}  // namespace tributary::service
