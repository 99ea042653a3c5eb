// What has come lately: something is remembered for a time at least, and for twice that at most.
//
// It is kept for two spans of that time. A value of a span stands for all that came in it, such as
// the least of them. Not thread safe.
#pragma once

#include <chrono>
#include <utility>

namespace tributary::service {

template <typename Value>
class Recent {
 public:
  using Clock = std::chrono::steady_clock;

  // 0: nothing is remembered.
  explicit Recent(Clock::duration memory) : memory_(memory) {}

  bool remembers() const { return memory_.count() > 0; }

  // The value of the span that `now` lies in. It is a Value() where that span begins now.
  Value& Now(Clock::time_point now) {
    if (!last_.begun || now - last_.begin >= memory_) {
      before_ = std::exchange(last_, {.begun = true, .begin = now, .value = Value()});
    }
    return last_.value;
  }
  // The values of the two spans; null where nothing of one is remembered at `now`.
  const Value* last(Clock::time_point now) const { return Remembered(last_, now); }
  const Value* before(Clock::time_point now) const { return Remembered(before_, now); }

 private:
  struct Span {
    bool begun = false;
    Clock::time_point begin;
    Value value = Value();
  };

  const Value* Remembered(const Span& span, Clock::time_point now) const {
    return span.begun && now - span.begin < 2 * memory_ ? &span.value : nullptr;
  }

  const Clock::duration memory_;
  Span last_;
  Span before_;  // it ended when last_ began, or earlier
};

}  // namespace tributary::service
