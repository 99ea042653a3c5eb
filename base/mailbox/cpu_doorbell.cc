#include "base/mailbox/cpu_doorbell.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <climits>
#include <optional>
#include <thread>

#include "base/sync/spin.h"

namespace tributary::mailbox {
namespace {

using Clock = std::chrono::steady_clock;

// A sleeper looks by itself this often: the other side may have died between the count and the
// call that wakes, and the status has no sleepers of its own.
constexpr std::chrono::milliseconds kLongestSleep{20};
constexpr int kLooks = 64;  // between two looks at the clock

uint32_t Look(const uint32_t* word) {
  return std::atomic_ref<uint32_t>(*const_cast<uint32_t*>(word)).load(std::memory_order_seq_cst);
}

void Write(uint32_t* word, uint32_t value) {
  std::atomic_ref<uint32_t>(*word).store(value, std::memory_order_seq_cst);
}

// Returns when the word is not `seen` any more, when woken, after `at_most`, or for no reason.
void Sleep(uint32_t* word, uint32_t seen, std::chrono::nanoseconds at_most) {
  const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(at_most);
  timespec bound{};
  bound.tv_sec = static_cast<time_t>(seconds.count());
  bound.tv_nsec = static_cast<decltype(bound.tv_nsec)>((at_most - seconds).count());
  if (syscall(SYS_futex, word, FUTEX_WAIT, seen, &bound, nullptr, 0) == 0) return;
  if (errno == EAGAIN || errno == EINTR || errno == ETIMEDOUT) return;
  // The memory is not what it was: nobody wakes us, but the bound holds.
  std::this_thread::sleep_for(std::min<std::chrono::nanoseconds>(
      at_most, std::chrono::duration_cast<std::chrono::nanoseconds>(kLongestSleep)));
}

std::optional<Awaited> LookAt(const CpuDoorbell& doorbell, uint32_t count, const uint32_t* status) {
  if (Reached(Look(doorbell.count), count)) return Awaited::kReached;
  if (Look(status) == 0) return std::nullopt;
  // What was rung before the status was set counts.
  return Reached(Look(doorbell.count), count) ? Awaited::kReached : Awaited::kEnded;
}

}  // namespace

void Ring(const CpuDoorbell& doorbell, uint32_t count) {
  Write(doorbell.count, count);
  if (Look(doorbell.sleeps) != 0) Wake(doorbell);
}

void Wake(const CpuDoorbell& doorbell) {
  syscall(SYS_futex, doorbell.count, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

void SetStatus(uint32_t* status, uint32_t code) { Write(status, code); }

uint32_t StatusOf(const uint32_t* status) { return Look(status); }

Awaited Await(const CpuDoorbell& doorbell, uint32_t count, const uint32_t* status,
              std::chrono::nanoseconds spin, Clock::time_point until) {
  const Clock::time_point spun = std::min(Clock::now() + spin, until);
  do {
    for (int i = 0; i < kLooks; ++i) {
      if (const auto awaited = LookAt(doorbell, count, status)) return *awaited;
      PauseProcessor();
    }
  } while (Clock::now() < spun);
  // Whoever rings from now on sees that we sleep, or we see that it rang.
  Write(doorbell.sleeps, 1);
  Awaited result = Awaited::kTimedOut;
  while (true) {
    const uint32_t seen = Look(doorbell.count);
    if (const auto awaited = LookAt(doorbell, count, status)) {
      result = *awaited;
      break;
    }
    const Clock::time_point now = Clock::now();
    if (now >= until) break;
    Sleep(doorbell.count, seen, std::min<std::chrono::nanoseconds>(until - now, kLongestSleep));
  }
  Write(doorbell.sleeps, 0);
  return result;
}

}  // namespace tributary::mailbox
