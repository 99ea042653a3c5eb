// What a call of the API brings besides its request.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <functional>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/telemetry/trace.h"
#include "service/schedule/leases.h"

namespace tributary::service {

// Takes the answer to a call: called once, on any thread, maybe before the call returns. It must
// not block.
template <typename Reply>
using Done = std::function<void(absl::StatusOr<Reply>)>;

struct CallContext {
  // The lease that the caller presents, which is held while a copy of this exists; null: none.
  Leases::HolderPtr lease;
  // The caller's name (service/access/access_control.h).
  std::string caller;
  // Whether it sees and deletes what others made.
  bool manages_all = true;
  // Whether it may name shared memory: it is on this machine, or trusted to see the same memory.
  bool shares_memory = true;
  std::chrono::steady_clock::time_point deadline = std::chrono::steady_clock::time_point::max();
  // Set when the caller is no longer interested; may be null. A call that has not taken effect is
  // then dropped; of a call that has, only the result is.
  std::shared_ptr<const std::atomic<bool>> cancelled;
  // The same, where several calls share the one above.
  std::shared_ptr<const std::atomic<bool>> cancelled_alone;
  // Whether the thread that makes the call calls Coordinator::Lend right after it, as soon as
  // others may make the next calls in their order. A short step that the call begins is then its to
  // carry out, and no other thread need be woken for it.
  bool lends = false;
  // Asks for room for the bytes that the reply's message is going to have, once they are known and
  // before the call takes effect; RESOURCE_EXHAUSTED when there is none. Empty: nobody counts.
  std::function<absl::Status(size_t bytes)> charge_reply;
  // Its span_id is the call's own span.
  telemetry::TraceContext trace;
};

inline bool Cancelled(const CallContext& call) {
  const auto set = [](const std::shared_ptr<const std::atomic<bool>>& flag) {
    return flag != nullptr && flag->load(std::memory_order_acquire);
  };
  return set(call.cancelled) || set(call.cancelled_alone);
}

}  // namespace tributary::service
