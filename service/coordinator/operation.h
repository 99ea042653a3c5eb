// A call that waits until its sequences are free.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "service/coordinator/cache.h"
#include "service/coordinator/call_context.h"
#include "service/coordinator/critical_section.h"
#include "service/schedule/sequence_order.h"

namespace tributary::service {

// Made by StepRunner (Attend and Append) or SequenceCalls (the other calls of a sequence), and kept
// by CallOrder until it begins to take effect or fails.
class Operation : public SequenceOrder::Member {
 public:
  virtual ~Operation() = default;

  // All its sequences are free. CallOrder calls this once, unless the operation failed first.
  virtual void OnTurn() TRIBUTARY_LOCKED = 0;
  // It failed before it took effect: answers the caller. Called by CallOrder::Fail, once.
  virtual void OnFailed(const absl::Status& status) TRIBUTARY_LOCKED = 0;

  CachePtr cache;
  CallContext call;  // CallOrder caps its deadline
  // Set by CallOrder when the operation enters.
  std::chrono::steady_clock::time_point accepted;
  uint64_t serial = 0;
};

using OperationPtr = std::shared_ptr<Operation>;

}  // namespace tributary::service
