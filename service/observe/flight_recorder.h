// The last steps and how far they came: what one wants to see when a step never ended.
//
// A fixed number of slots, allocated at the start; a step overwrites the one that came a round
// before. Each slot has a lock of its own, so that steps wait for a reader of the same slot only.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "service/observe/observer.h"
#include "tributary/v1/diagnostics.pb.h"

namespace tributary::service {

class FlightRecorder {
 public:
  static constexpr size_t kSlots = 256;

  explicit FlightRecorder(int ranks);

  void Submitted(const StepRecord& step);
  void Ended(const StepRecord& step, const absl::Status& status,
             const std::vector<worker::Reply>& replies);

  // Oldest first; `most` last ones, 0: all there are.
  v1::FlightRecord Read(size_t most = 0) const;

 private:
  struct Slot {
    mutable absl::Mutex mutex;
    uint64_t number ABSL_GUARDED_BY(mutex) = 0;  // 0: nothing yet
    uint64_t epoch ABSL_GUARDED_BY(mutex) = 0;
    worker::CacheId cache ABSL_GUARDED_BY(mutex) = 0;
    int32_t layer ABSL_GUARDED_BY(mutex) = 0;
    worker::StepKind kind ABSL_GUARDED_BY(mutex) = worker::StepKind::kDecode;
    int32_t calls ABSL_GUARDED_BY(mutex) = 0;
    int32_t entries ABSL_GUARDED_BY(mutex) = 0;
    int32_t query_rows ABSL_GUARDED_BY(mutex) = 0;
    int32_t new_tokens ABSL_GUARDED_BY(mutex) = 0;
    std::chrono::steady_clock::time_point oldest_call ABSL_GUARDED_BY(mutex);
    std::chrono::steady_clock::time_point begun ABSL_GUARDED_BY(mutex);
    std::chrono::steady_clock::time_point submitted ABSL_GUARDED_BY(mutex);
    std::chrono::steady_clock::time_point done ABSL_GUARDED_BY(mutex);
    std::chrono::steady_clock::time_point answered ABSL_GUARDED_BY(mutex);
    bool ended ABSL_GUARDED_BY(mutex) = false;
    absl::StatusCode code ABSL_GUARDED_BY(mutex) = absl::StatusCode::kOk;
    std::vector<bool> replied ABSL_GUARDED_BY(mutex);             // by rank
    std::vector<worker::StepTimes> times ABSL_GUARDED_BY(mutex);  // by rank
  };

  static void Describe(const Slot& slot, std::chrono::steady_clock::time_point now,
                       v1::StepFlight* out) ABSL_EXCLUSIVE_LOCKS_REQUIRED(slot.mutex);
  Slot& SlotOf(uint64_t number) { return slots_[number % kSlots]; }

  std::array<Slot, kSlots> slots_;
};

// One line about a step, for the log.
std::string Line(const v1::StepFlight& step);

}  // namespace tributary::service
