// The last steps and how far they came: what one wants to see when a step never ended.
//
// A fixed number of slots, allocated at the start; a step overwrites the one that came a round
// before. Each slot has a lock of its own, so that steps wait for a reader of the same slot only.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "base/sync/mutex.h"
#include "service/observe/observer.h"
#include "tributary/v1/diagnostics.pb.h"

namespace tributary::service {

class FlightRecorder {
 public:
  static constexpr size_t kSlots = 256;

  // `ranks`: to begin with. A step has as many as have replied.
  explicit FlightRecorder(int ranks);

  void Submitted(const StepRecord& step);
  void Ended(const StepRecord& step, const absl::Status& status,
             const std::vector<worker::Reply>& replies);

  // Oldest first; `most` last ones, 0: all there are.
  v1::FlightRecord Read(size_t most = 0) const;

 private:
  struct Slot {
    mutable Mutex mutex;
    uint64_t number TRIBUTARY_GUARDED_BY(mutex) = 0;  // 0: nothing yet
    uint64_t epoch TRIBUTARY_GUARDED_BY(mutex) = 0;
    worker::CacheId cache TRIBUTARY_GUARDED_BY(mutex) = 0;
    int32_t layer TRIBUTARY_GUARDED_BY(mutex) = 0;
    worker::StepKind kind TRIBUTARY_GUARDED_BY(mutex) = worker::StepKind::kDecode;
    int32_t calls TRIBUTARY_GUARDED_BY(mutex) = 0;
    int32_t entries TRIBUTARY_GUARDED_BY(mutex) = 0;
    int32_t query_rows TRIBUTARY_GUARDED_BY(mutex) = 0;
    int32_t new_tokens TRIBUTARY_GUARDED_BY(mutex) = 0;
    std::chrono::steady_clock::time_point oldest_call TRIBUTARY_GUARDED_BY(mutex);
    std::chrono::steady_clock::time_point begun TRIBUTARY_GUARDED_BY(mutex);
    std::chrono::steady_clock::time_point submitted TRIBUTARY_GUARDED_BY(mutex);
    std::chrono::steady_clock::time_point done TRIBUTARY_GUARDED_BY(mutex);
    std::chrono::steady_clock::time_point answered TRIBUTARY_GUARDED_BY(mutex);
    bool ended TRIBUTARY_GUARDED_BY(mutex) = false;
    absl::StatusCode code TRIBUTARY_GUARDED_BY(mutex) = absl::StatusCode::kOk;
    std::vector<bool> replied TRIBUTARY_GUARDED_BY(mutex);             // by rank
    std::vector<worker::StepTimes> times TRIBUTARY_GUARDED_BY(mutex);  // by rank
  };

  static void Describe(const Slot& slot, std::chrono::steady_clock::time_point now,
                       v1::StepFlight* out) TRIBUTARY_REQUIRES(slot.mutex);
  Slot& SlotOf(uint64_t number) { return slots_[number % kSlots]; }

  std::array<Slot, kSlots> slots_;
};

// One line about a step, for the log.
std::string Line(const v1::StepFlight& step);

}  // namespace tributary::service
