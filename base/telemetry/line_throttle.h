// Limits how many log lines per second other processes can make this one write.
#pragma once

#include <chrono>
#include <cstdint>

namespace tributary::telemetry {

// Not thread safe.
class LineThrottle {
 public:
  using Clock = std::chrono::steady_clock;

  explicit LineThrottle(int lines_per_second) : most_(lines_per_second) {}

  // Whether a line may be written now. If so, `skipped` is how many were not since the last one.
  bool Admit(Clock::time_point now, int64_t* skipped) {
    if (now >= second_ + std::chrono::seconds(1)) {
      second_ = now;
      written_ = 0;
    }
    if (written_ >= most_) {
      ++skipped_;
      return false;
    }
    ++written_;
    *skipped = skipped_;
    skipped_ = 0;
    return true;
  }

 private:
  const int most_;
  int written_ = 0;  // since second_
  int64_t skipped_ = 0;
  Clock::time_point second_;
};

}  // namespace tributary::telemetry
