// Waiting with open eyes: for what comes within microseconds, where to sleep and be woken would
// take longer than what is waited for.
#pragma once

#include <chrono>

namespace tributary {

// How long a thread looks before it sleeps, where it has a processor to itself.
inline constexpr std::chrono::microseconds kSpin{50};

inline void PauseProcessor() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Looks until `there()` or the time is over. Returns what it saw last.
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
