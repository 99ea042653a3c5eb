// The last steps and how far they came: what one wants to see when a step never ended.
//
// A fixed number of slots, allocated at the start; a step overwrites the one that came a round
// before. Each slot has a lock of its own, so that steps wait for a reader of the same slot only.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <mutex>
#include <vector>

#include "absl/status/status.h"
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
    mutable std::mutex mutex;
    uint64_t number = 0;  // 0: nothing yet
    uint64_t epoch = 0;
    worker::CacheId cache = 0;
    int32_t layer = 0;
    worker::StepKind kind = worker::StepKind::kDecode;
    int32_t calls = 0, entries = 0, query_rows = 0, new_tokens = 0;
    std::chrono::steady_clock::time_point oldest_call, begun, submitted, done, answered;
    bool ended = false;
    absl::StatusCode code = absl::StatusCode::kOk;
    std::vector<bool> replied;             // by rank
    std::vector<worker::StepTimes> times;  // by rank
  };

  static void Describe(const Slot& slot, std::chrono::steady_clock::time_point now,
                       v1::StepFlight* out);
  Slot& SlotOf(uint64_t number) { return slots_[number % kSlots]; }

  std::array<Slot, kSlots> slots_;
};

// One line about a step, for the log.
std::string Line(const v1::StepFlight& step);

}  // namespace tributary::service
