// Doorbells of a mailbox as CPUs ring and await them, in memory that two processes share.
// session.proto says what they count. The other side may write anything into the words: every wait
// still ends by its bound.
#pragma once

#include <chrono>
#include <cstdint>

#include "base/mailbox/layout.h"

namespace tributary::mailbox {

// A doorbell, and the word that is not 0 while its other side sleeps on it.
struct CpuDoorbell {
  uint32_t* count = nullptr;
  uint32_t* sleeps = nullptr;
};

// Whoever sees the new count sees all that this thread wrote before.
void Ring(const CpuDoorbell& doorbell, uint32_t count);
// Makes whoever sleeps on it look at the status.
void Wake(const CpuDoorbell& doorbell);

// The status word of a mailbox.
void SetStatus(uint32_t* status, uint32_t code);
uint32_t StatusOf(const uint32_t* status);

// Waits until a doorbell has reached `count`, or *status is not 0, or the time has come: first with
// eyes open for `spin`, then asleep. A doorbell that has been rung counts even when the status is
// set, too.
Awaited Await(const CpuDoorbell& doorbell, uint32_t count, const uint32_t* status,
              std::chrono::nanoseconds spin, std::chrono::steady_clock::time_point until);

}  // namespace tributary::mailbox
