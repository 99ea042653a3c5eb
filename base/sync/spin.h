// Busy waiting, for what comes within microseconds: to sleep and be woken would take longer than
// that.
#pragma once

#include <chrono>

namespace tributary {

// How long a thread that has a processor to itself spins before it sleeps.
inline constexpr std::chrono::microseconds kSpin{50};

inline void PauseProcessor() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Calls `there` until it returns true or the time is over. Returns what it returned last.
template <typename There>
bool SpinUntil(const There& there, std::chrono::nanoseconds at_most) {
  constexpr int kLooks = 64;  // between two looks at the clock
  const auto end = std::chrono::steady_clock::now() + at_most;
  do {
    for (int i = 0; i < kLooks; ++i) {
      if (there()) return true;
      PauseProcessor();
    }
  } while (std::chrono::steady_clock::now() < end);
  return there();
}

}  // namespace tributary
