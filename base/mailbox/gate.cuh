// A gate as a kernel passes it.
#pragma once

#include <type_traits>

#include "base/cuda/early_launch.cuh"
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

// The stamps of layer number `count`; called only where layers are timed.
__device__ __forceinline__ SlotStamps* StampsOf(const SharedGate& gate, uint32_t count) {
  return reinterpret_cast<SlotStamps*>(gate.stamps + (count % gate.slots) * gate.slot_bytes);
}

// What follows is for a Gate or a SharedGate.
template <typename AnyGate>
inline constexpr bool kIsShared = std::is_same_v<AnyGate, SharedGate>;

// Tells all endpoints why the session is over.
template <typename AnyGate>
__device__ __forceinline__ void SetStatus(const AnyGate& gate, uint32_t status) {
  Ring(gate.status, status, /*one_gpu=*/false);
  if constexpr (kIsShared<AnyGate>) {
    for (int32_t e = 1; e < gate.endpoints; ++e) Store(WordOf(gate.status, e), status);
  }
}

// Ends the session for this rank. Nothing is awaited and nothing is called finished any more; the
// layers from number `failed_at` on have not been carried out.
__device__ __forceinline__ void FailSession(const Gate& gate, Awaited why, uint32_t failed_at) {
  gate.counter->failure = static_cast<uint32_t>(why);
  gate.progress->failed_at = failed_at;
  Ring(&gate.progress->failure, static_cast<uint32_t>(why), /*one_gpu=*/false);
}

// Whether the results of the layer ahead of the gate may be used. Another rank may have failed
// where this one did not; then the status tells the host.
template <typename AnyGate>
__device__ __forceinline__ bool LayerAheadIsGood(const AnyGate& gate, uint32_t count) {
  if (gate.layer == 0) return true;
  if (gate.exchange_failure != nullptr && Look(gate.exchange_failure) != 0) {
    SetStatus(gate, kAborted);
    FailSession(gate, Awaited::kEnded, count - 1);
    return false;
  }
  for (int32_t peer = 1; gate.peers != nullptr && peer < gate.ranks; ++peer) {
    const Awaited awaited = Await(gate.peers + (peer - 1) * kPeerWords, count, gate.status,
                                  gate.bound, /*one_gpu=*/false);
    if (awaited == Awaited::kReached) continue;
    if (awaited == Awaited::kTimedOut) SetStatus(gate, kAborted);
    FailSession(gate, Awaited::kEnded, count - 1);
    return false;
  }
  return true;
}

// Calls the layer ahead of the gate, number `count` - 1 of the session, finished if its results may
// be used, or else ends the session. One thread of a launch calls this.
template <typename AnyGate>
__device__ __forceinline__ bool FinishLayer(const AnyGate& gate, uint32_t count) {
  if (!LayerAheadIsGood(gate, count)) return false;
  if (gate.layer == 0) return true;
  int32_t told = 1;
  if constexpr (kIsShared<AnyGate>) {
    told = gate.told;
    if (gate.stamps != nullptr) StampsOf(gate, count - 1)->finished = Nanoseconds();
  }
  Ring(gate.finished, count, gate.one_gpu);
  for (int32_t e = 1; e < told; ++e) Store(WordOf(gate.finished, e), count);
  if (gate.handed_back == nullptr) return true;
  Fence(gate.one_gpu);
  atomicCAS_system(gate.handed_back, 0u, 1u);
  for (int32_t e = 1; e < told; ++e) atomicCAS_system(WordOf(gate.handed_back, e), 0u, 1u);
  return true;
}

// Waits until the host tells that it hands the layer over, or has done so. Then the next launch may
// begin: it takes its place and reads the cache while the host still copies. All blocks of the
// hand-over are running by then, so however much room the next launch takes, it does not wait for
// something that waits for room.
__device__ __forceinline__ Awaited AwaitBeginning(const Gate& gate, uint32_t count,
                                                  uint64_t bound) {
  const uint32_t wanted = (count + 1) * gate.unit;
  const auto has_come = [&] {
    const uint32_t begun = Look(gate.begun);
    return Reached(Look(gate.arrived), wanted) || Reached(begun, wanted);
  };
  const Awaited awaited = AwaitThat(has_come, gate.status, bound, gate.one_gpu);
  if (awaited == Awaited::kReached) cuda::LetNextLaunchBegin();
  return awaited;
}

// Waits until the layer has arrived from all endpoints.
template <typename AnyGate>
__device__ __forceinline__ Awaited AwaitArrival(const AnyGate& gate, uint32_t count,
                                                uint64_t bound) {
  if (gate.begun != nullptr) {
    const Awaited awaited = AwaitBeginning(gate, count, bound);
    if (awaited != Awaited::kReached) return awaited;
    if (bound > kMostOfHandOver) bound = kMostOfHandOver;
  }
  const uint32_t wanted = (count + 1) * gate.unit;
  if constexpr (kIsShared<AnyGate>) {
    return AwaitAll(gate.arrived, gate.endpoints, wanted, gate.status, bound, gate.one_gpu);
  } else {
    return Await(gate.arrived, wanted, gate.status, bound, gate.one_gpu);
  }
}

// Notes that the layer has arrived, by one block of the launch.
template <typename AnyGate>
__device__ __forceinline__ void NoteArrival(const AnyGate& gate, uint32_t count) {
  int32_t endpoints = 1;
  if constexpr (kIsShared<AnyGate>) {
    endpoints = gate.endpoints;
    if (gate.stamps != nullptr) {
      *StampsOf(gate, count) = {.seen = Nanoseconds(), .attended = 0, .finished = 0};
    }
  }
  if (gate.handed_over == nullptr) return;
  atomicCAS_system(gate.handed_over, 1u, 0u);
  for (int32_t e = 1; e < endpoints; ++e) atomicCAS_system(WordOf(gate.handed_over, e), 1u, 0u);
  Ring(&gate.progress->passed, count + 1, /*one_gpu=*/false);
}

// Says that the gate has been passed, or waited at in vain. By one thread of one block of the
// gate's launch, where what it waited for is seen by all.
__device__ __forceinline__ void TellPassed(const Gate& gate, const SessionCounter& counter) {
  Ring(&gate.counter->passed, counter.first_count + static_cast<uint32_t>(gate.layer) + 1,
       /*one_gpu=*/true);
}

// Waits until the gate has been passed; the slot may be read then. By one thread, ahead of a
// barrier of the others. The gate's own wait has a bound, and so has this one.
__device__ __forceinline__ void AwaitPassage(const GatePassage& passage) {
  const SessionCounter* counter = passage.counter;
  const uint32_t count = Look(&counter->first_count) + static_cast<uint32_t>(passage.layer) + 1;
  while (!Reached(LookAndAcquire(&counter->passed, /*one_gpu=*/true), count)) {
  }
}

// One thread of each block calls this when all launches ahead have ended. `first` is true in one
// block, which calls the layer before finished. When the wait at a gate was in vain, later gates do
// not wait: the rest of the steps is computed on whatever the slots hold and is not called
// finished. The status tells the host so before any doorbell could tell it otherwise.
template <typename AnyGate>
__device__ __forceinline__ void PassGate(const AnyGate& gate, const SessionCounter& counter,
                                         bool first) {
  const uint32_t count = counter.first_count + static_cast<uint32_t>(gate.layer);
  const bool waits_itself = gate.handed_over == nullptr;
  const bool last = gate.layer == gate.layers;
  bool failed = counter.failure != 0;
  // Not where FinishKernel did it: a second time could come after the host's next hand-over.
  if (first && (waits_itself || last) && !failed) failed = !FinishLayer(gate, count);
  if (last) {
    gate.counter->first_count = count;
    Ring(&gate.progress->ended, count, /*one_gpu=*/false);
    return;
  }
  if (failed) return;
  // The stream has waited until the layer arrived, or until there is no use in waiting.
  const uint64_t bound = waits_itself ? gate.bound : 0;
  Awaited awaited = AwaitArrival(gate, count, bound);
  if (awaited == Awaited::kReached) {
    if (first) NoteArrival(gate, count);
    return;
  }
  // One block tells of the failure for the whole launch. Results of the others are not used.
  if (!first) return;
  // Another rank, or the session's watch on the host, saw first that the bound had passed.
  if (Look(gate.status) == kDeadlineExceeded) awaited = Awaited::kTimedOut;
  if (awaited == Awaited::kTimedOut) {
    if constexpr (kIsShared<AnyGate>) {
      const int32_t silent = FirstNotReached(gate.arrived, gate.endpoints, (count + 1) * gate.unit);
      if (gate.endpoints > 1 && silent < gate.endpoints) gate.progress->silent = 1 + silent;
    }
    SetStatus(gate, kDeadlineExceeded);
  }
  FailSession(gate, awaited, count);
}

}  // namespace tributary::mailbox
