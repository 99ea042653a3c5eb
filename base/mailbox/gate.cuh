// A gate as a kernel passes it.
#pragma once

#include "base/mailbox/doorbell.cuh"
#include "base/mailbox/gate.h"

namespace tributary::mailbox {

// As a gate finds the session. Behind the first layer of a step it stays as it is until the last
// gate of the step, or until a wait was in vain, so it may be read while launches ahead are still
// running.
__device__ __forceinline__ SessionCounter CounterOf(const Gate& gate) {
  uint2 words;
  asm volatile("ld.relaxed.gpu.global.v2.u32 {%0, %1}, [%2];"
               : "=r"(words.x), "=r"(words.y)
               : "l"(gate.counter)
               : "memory");
  return {words.x, words.y};
}

// By one thread of a block, when all launches ahead have ended. `first`: in one block of the
// launch, which says that the layer before is finished. A gate that was in vain ends the session's
// waits: the rest of its steps is computed on whatever the slots hold, and nobody is told that it
// is finished. The host learns of it by the status, before any doorbell tells it otherwise.
__device__ __forceinline__ void PassGate(const Gate& gate, const SessionCounter& counter,
                                         bool first) {
  const uint32_t count = counter.first_count + static_cast<uint32_t>(gate.layer);
  const bool failed = counter.failure != 0;
  if (first && gate.layer > 0 && !failed) Ring(gate.finished, count, gate.one_gpu);
  if (gate.layer == gate.layers) {
    gate.counter->first_count = count;
    Ring(&gate.progress->ended, count, /*one_gpu=*/false);
    return;
  }
  if (failed) return;
  const Awaited awaited = Await(gate.arrived, count + 1, gate.status, gate.bound, gate.one_gpu);
  if (awaited == Awaited::kReached) return;
  if (awaited == Awaited::kTimedOut) Ring(gate.status, kDeadlineExceeded, /*one_gpu=*/false);
  gate.counter->failure = static_cast<uint32_t>(awaited);
  gate.progress->failed_at = count;
  Ring(&gate.progress->failure, static_cast<uint32_t>(awaited), /*one_gpu=*/false);
}

}  // namespace tributary::mailbox
