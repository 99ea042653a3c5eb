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

// The session is over for this rank: nothing is awaited any more, nobody is told that anything is
// finished, and layer number `failed_at` and those behind it were not carried out.
__device__ __forceinline__ void FailSession(const Gate& gate, Awaited why, uint32_t failed_at) {
  gate.counter->failure = static_cast<uint32_t>(why);
  gate.progress->failed_at = failed_at;
  Ring(&gate.progress->failure, static_cast<uint32_t>(why), /*one_gpu=*/false);
}

// Whether what lies behind the layer ahead of the gate may be used. Another rank may have failed
// where this one did not; then the host learns of it by the status.
__device__ __forceinline__ bool LayerAheadIsGood(const Gate& gate, uint32_t count) {
  if (gate.layer == 0) return true;
  if (gate.exchange_failure != nullptr && Look(gate.exchange_failure) != 0) {
    Ring(gate.status, kAborted, /*one_gpu=*/false);
    FailSession(gate, Awaited::kEnded, count - 1);
    return false;
  }
  for (int32_t peer = 1; gate.peers != nullptr && peer < gate.ranks; ++peer) {
    const Awaited awaited = Await(gate.peers + (peer - 1) * kPeerWords, count, gate.status,
                                  gate.bound, /*one_gpu=*/false);
    if (awaited == Awaited::kReached) continue;
    if (awaited == Awaited::kTimedOut) Ring(gate.status, kAborted, /*one_gpu=*/false);
    FailSession(gate, Awaited::kEnded, count - 1);
    return false;
  }
  return true;
}

// Says that the layer ahead of the gate, the session's number `count` - 1, is finished, if it is
// good; else the session is over. By one thread of a launch.
__device__ __forceinline__ bool FinishLayer(const Gate& gate, uint32_t count) {
  if (!LayerAheadIsGood(gate, count)) return false;
  if (gate.layer == 0) return true;
  Ring(gate.finished, count, gate.one_gpu);
  if (gate.handed_back == nullptr) return true;
  Fence(gate.one_gpu);
  atomicCAS_system(gate.handed_back, 0u, 1u);
  return true;
}

// By one thread of a block, when all launches ahead have ended. `first`: in one block of the
// launch, which says that the layer before is finished. A gate that was in vain ends the session's
// waits: the rest of its steps is computed on whatever the slots hold, and nobody is told that it
// is finished. The host learns of it by the status, before any doorbell tells it otherwise.
__device__ __forceinline__ void PassGate(const Gate& gate, const SessionCounter& counter,
                                         bool first) {
  const uint32_t count = counter.first_count + static_cast<uint32_t>(gate.layer);
  const bool waits_itself = gate.handed_over == nullptr;
  const bool last = gate.layer == gate.layers;
  bool failed = counter.failure != 0;
  // Said twice, it might come when the host has handed over the next layer.
  if (first && (waits_itself || last) && !failed) failed = !FinishLayer(gate, count);
  if (last) {
    gate.counter->first_count = count;
    Ring(&gate.progress->ended, count, /*one_gpu=*/false);
    return;
  }
  if (failed) return;
  // The stream has waited until the layer arrived, or until there is no use in waiting.
  const uint64_t bound = waits_itself ? gate.bound : 0;
  Awaited awaited = Await(gate.arrived, count + 1, gate.status, bound, gate.one_gpu);
  if (awaited == Awaited::kReached) {
    if (waits_itself || !first) return;
    atomicCAS_system(gate.handed_over, 1u, 0u);
    Ring(&gate.progress->passed, count + 1, /*one_gpu=*/false);
    return;
  }
  // One block says so for the whole launch. What the others do now, nobody uses.
  if (!first) return;
  // Another rank, or who looks after waits of streams, saw first that the bound had passed.
  if (Look(gate.status) == kDeadlineExceeded) awaited = Awaited::kTimedOut;
  if (awaited == Awaited::kTimedOut) Ring(gate.status, kDeadlineExceeded, /*one_gpu=*/false);
  FailSession(gate, awaited, count);
}

}  // namespace tributary::mailbox
