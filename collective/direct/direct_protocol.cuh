// The protocol of a direct exchange on the device: what a thread block works on, where its data
// lies in the memory of a rank, who may write when, and how a wait ends.
//
// A thread block has worker warps, which move data, and one last warp, which does the bookkeeping.
// Every wait is bounded: it ends when the data has arrived, when the group is known to be broken,
// or when DirectArgs::bound_ns has passed.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "collective/direct/direct_kernel.h"
#include "collective/direct/peer_words.cuh"
#include "collective/exchange/head_slice.h"

namespace tributary::collective::direct {

constexpr int kMaxWorkers = 512;
constexpr int kWarp = 32;
constexpr int kWorkersBarrier = 1;
// Between two looks at a partial that is still being computed.
constexpr unsigned kNapNanoseconds = 100;
// Looks between two glances at the clock and at the group's failure.
constexpr uint32_t kLooks = 64;

// ---------------------------------------------------------------------------------------------
// Failure: the first one stays, and the peers and the host are told.

// Tells the host of a failure, unless another came first: then of that one. Returns whether it is
// the first. (Peers store to failure() whenever they like, and not every link has atomics. So what
// this rank found first is kept in a word of its own.)
inline __device__ bool Report(const DirectArgs& a, uint32_t word) {
  auto* first = reinterpret_cast<uint32_t*>(a.memory[a.rank] + a.layout.first_failure());
  const uint32_t before = atomicCAS(first, 0u, word);
  StoreWord(a.host_failure, before == 0 ? word : before);
  return before == 0;
}

// This rank found that the group is broken: the peers are told, too.
inline __device__ void Fail(const DirectArgs& a, uint32_t word) {
  std::byte* failure = a.memory[a.rank] + a.layout.failure();
  if (const uint32_t before = LoadWord(failure); before != 0) {
    Report(a, before);
    return;
  }
  if (!Report(a, word)) return;
  StoreWord(failure, word);
  const uint32_t told = DirectFailureWord(DirectFailure::kTold, 1u << a.rank);
  for (int r = 0; r < a.layout.ranks; ++r) {
    if (r != a.rank) StoreWord(a.memory[r] + a.layout.failure(), told);
  }
}

// A wait that ends: when the bound has passed, or the group is known to be broken.
class Patience {
 public:
  // `missing`: the ranks that are waited for, one bit each.
  __device__ __forceinline__ bool Ended(const DirectArgs& a, uint32_t missing) {
    if (++looks_ % kLooks != 0) return false;
    const uint32_t failure = LoadWord(a.memory[a.rank] + a.layout.failure());
    if (failure != 0) {
      Report(a, failure);
      return true;
    }
    const uint64_t now = Nanoseconds();
    if (since_ == 0) since_ = now;
    if (now - since_ <= a.bound_ns) return false;
    Fail(a, DirectFailureWord(DirectFailure::kLate, missing));
    return true;
  }

 private:
  uint32_t looks_ = 0;
  uint64_t since_ = 0;
};

// ---------------------------------------------------------------------------------------------
// What a thread block works on

struct Units {
  HeadSlice slice;  // of the rank that gets them
  int32_t first;    // of slice.count * rows
  int32_t count;    // of this block
};

__device__ __forceinline__ Units UnitsFor(const DirectArgs& a, int dest) {
  Units u;
  u.slice.begin = a.first_head[dest];
  u.slice.count = a.first_head[dest + 1] - u.slice.begin;
  u.first = static_cast<int32_t>(blockIdx.x) * a.plan.units;
  u.count = max(0, min(a.plan.units, a.rows * u.slice.count - u.first));
  return u;
}

// The index of a unit among [rows, heads], from its index among [rows, slice.count].
__device__ __forceinline__ size_t PairOf(const DirectArgs& a, HeadSlice slice, int32_t unit) {
  const int32_t row = unit / slice.count;
  return static_cast<size_t>(row) * a.heads + slice.begin + (unit - row * slice.count);
}

// Places in a stage of this channel and step.
struct Box {
  size_t at;         // bytes into the memory of whoever receives
  size_t lse_bytes;  // from there to the LSEs
};

__device__ __forceinline__ Box BoxOf(const DirectArgs& a, DirectStage stage, uint32_t step,
                                     int source) {
  const int32_t bytes = stage == DirectStage::kMerged ? a.OutBytes() : 4;
  return {a.layout.inbox(stage, step % kDirectSlots, source, static_cast<int>(blockIdx.x)),
          static_cast<size_t>(a.plan.units) * a.value_dim * static_cast<size_t>(bytes)};
}

// ---------------------------------------------------------------------------------------------
// Who may write when

__device__ __forceinline__ void SyncWorkers() {
  asm volatile("bar.sync %0, %1;" ::"n"(kWorkersBarrier), "r"(blockDim.x - kWarp) : "memory");
}

// The last warp of a block. Before the barrier: may this step write to its peers? It may once they
// have begun the step before this one, because then they are through with the step that last used
// this slot. After it: tell the peers the same of this rank.
class Bookkeeping {
 public:
  __device__ Bookkeeping(const DirectArgs& a, uint32_t step) : a_(a), step_(step) {}

  __device__ bool MayWrite() {
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    const std::byte* own = a_.memory[a_.rank];
    const bool of_peer = lane < a_.layout.ranks && lane != a_.rank;
    const std::byte* credit =
        own + a_.layout.credit(static_cast<int>(blockIdx.x), of_peer ? lane : a_.rank);
    // Both words are on their way before either is looked at.
    const uint32_t failure = LoadWord(own + a_.layout.failure());
    uint32_t begun = AcquireWord(credit);
    if (failure != 0) {
      if (lane == 0) Report(a_, failure);
      return false;
    }
    if (!of_peer) return true;
    Patience patience;
    while (static_cast<int32_t>(begun - step_) < 0) {
      if (patience.Ended(a_, 1u << lane)) return false;
      begun = AcquireWord(credit);
    }
    return true;
  }

  __device__ void TellPeers() {
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    const int channel = static_cast<int>(blockIdx.x);
    if (lane == a_.rank) StoreWord(a_.memory[lane] + a_.layout.step(channel), step_ + 1);
    if (lane >= a_.layout.ranks || lane == a_.rank) return;
    // Releases what this rank cleared in earlier steps.
    ReleaseWord(a_.memory[lane] + a_.layout.credit(channel, a_.rank), step_ + 1);
  }

 private:
  const DirectArgs& a_;
  const uint32_t step_;
};

}  // namespace tributary::collective::direct
