#include <cmath>
#include <string>
#include <vector>

#include "collective/direct/direct_kernel.h"
#include "kernels/cuda/launch/load_kernels.h"
#include "kernels/cuda/ptx/encode.cuh"
#include "kernels/cuda/ptx/ptx.cuh"
#include "kernels/cuda/status.h"
#include "kernels/lse.h"

namespace tributary::collective {
namespace {

constexpr int kMaxWorkers = 512;
constexpr int kWarp = 32;
constexpr int kWorkersBarrier = 1;
// Between two looks at a partial that is still being computed.
constexpr unsigned kNapNanoseconds = 100;
// Looks between two glances at the clock and at the group's failure.
constexpr uint32_t kLooks = 64;

// ---------------------------------------------------------------------------------------------
// Memory that several GPUs write. Relaxed accesses of system scope: never cached in L1, never torn
// within a word, and in no order among each other.

__device__ __forceinline__ uint32_t LoadWord(const void* at) {
  uint32_t x;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(x) : "l"(at) : "memory");
  return x;
}
__device__ __forceinline__ void StoreWord(void* at, uint32_t x) {
  asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(at), "r"(x) : "memory");
}
__device__ __forceinline__ uint4 LoadPacket(const void* at) {
  uint4 x;
  asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "l"(at)
               : "memory");
  return x;
}
__device__ __forceinline__ void StorePacket(void* at, uint4 x) {
  asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(at), "r"(x.x), "r"(x.y),
               "r"(x.z), "r"(x.w)
               : "memory");
}
__device__ __forceinline__ uint32_t AcquireWord(const void* at) {
  uint32_t x;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(x) : "l"(at) : "memory");
  return x;
}
__device__ __forceinline__ void ReleaseWord(void* at, uint32_t x) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(at), "r"(x) : "memory");
}

__device__ __forceinline__ uint64_t Nanoseconds() {
  uint64_t t;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
  return t;
}

// Where the launch overlaps the kernel before it: nothing of that kernel may be looked at earlier.
__device__ __forceinline__ void AwaitKernelBefore() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
__device__ __forceinline__ void AllowKernelAfter() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// ---------------------------------------------------------------------------------------------
// Words that say whether they are there

__device__ __forceinline__ uint32_t Sendable(uint32_t word) {
  return word == kNotArrived ? kOtherNan : word;
}
__device__ __forceinline__ uint4 Sendable(uint4 p) {
  return make_uint4(Sendable(p.x), Sendable(p.y), Sendable(p.z), Sendable(p.w));
}
__device__ __forceinline__ bool Arrived(uint4 p) {
  return p.x != kNotArrived && p.y != kNotArrived && p.z != kNotArrived && p.w != kNotArrived;
}
__device__ __forceinline__ uint4 NothingArrived() {
  return make_uint4(kNotArrived, kNotArrived, kNotArrived, kNotArrived);
}

// ---------------------------------------------------------------------------------------------
// Failure: the first one stays, peers and the host are told

__device__ void Fail(const DirectArgs& a, uint32_t word) {
  std::byte* own = a.memory[a.rank];
  auto* failure = reinterpret_cast<uint32_t*>(own + a.layout.failure());
  const uint32_t before = atomicCAS_system(failure, 0u, word);
  if (before != 0) {
    StoreWord(a.host_failure, before);
    return;
  }
  StoreWord(a.host_failure, word);
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
      Fail(a, failure);
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
// What a block does

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
  const DType type = stage == DirectStage::kMerged ? a.out_dtype : DType::kF32;
  return {a.layout.inbox(stage, step % kDirectSlots, source, static_cast<int>(blockIdx.x)),
          static_cast<size_t>(a.plan.units) * a.head_dim * SizeOf(type)};
}

template <DType kIn, DType kWire>
struct Element {
  static constexpr int kCount = kDirectPacket / static_cast<int>(SizeOf(kWire));
  static constexpr int kParts = kCount * static_cast<int>(SizeOf(kIn)) / kDirectPacket;

  // kCount elements of a partial as they lie in memory.
  struct Raw {
    uint4 part[kParts];
  };
  static __device__ __forceinline__ const std::byte* Place(const void* o, size_t element) {
    return static_cast<const std::byte*>(o) + element * SizeOf(kIn);
  }
  static __device__ __forceinline__ Raw Load(const void* o, size_t element) {
    Raw raw;
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
      raw.part[i] = reinterpret_cast<const uint4*>(Place(o, element))[i];
    }
    return raw;
  }

  // As they travel.
  static __device__ __forceinline__ uint4 Packet(const Raw& raw) {
    if constexpr (kIn == kWire) {
      return raw.part[0];
    } else {
      static_assert(kIn == DType::kF32 && kCount == 8);
      const auto pack = [](uint32_t low, uint32_t high) {
        return cuda::Pack<kWire>(__uint_as_float(low), __uint_as_float(high));
      };
      const uint4 a = raw.part[0], b = raw.part[1];
      return make_uint4(pack(a.x, a.y), pack(a.z, a.w), pack(b.x, b.y), pack(b.z, b.w));
    }
  }

  static __device__ __forceinline__ void Widen(uint4 packet, float (&x)[kCount]) {
    const uint32_t words[4] = {packet.x, packet.y, packet.z, packet.w};
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      if constexpr (kWire == DType::kF32) {
        x[w] = __uint_as_float(words[w]);
      } else if constexpr (kWire == DType::kBf16) {
        x[2 * w] = __uint_as_float(words[w] << 16);
        x[2 * w + 1] = __uint_as_float(words[w] & 0xffff0000u);
      } else {
        const float2 pair = __half22float2(*reinterpret_cast<const __half2*>(&words[w]));
        x[2 * w] = pair.x;
        x[2 * w + 1] = pair.y;
      }
    }
  }
};

// Merged elements of a thread, as words of the output's type.
template <int kCount>
struct Words {
  uint32_t word[kCount];
  int count;
};

template <int kCount>
__device__ __forceinline__ Words<kCount> EncodeOutput(const float (&x)[kCount], DType type) {
  Words<kCount> w;
  if (type == DType::kF32) {
    w.count = kCount;
#pragma unroll
    for (int i = 0; i < kCount; ++i) w.word[i] = __float_as_uint(x[i]);
    return w;
  }
  w.count = kCount / 2;
#pragma unroll
  for (int i = 0; i < kCount / 2; ++i) {
    w.word[i] = type == DType::kBf16 ? cuda::Pack<DType::kBf16>(x[2 * i], x[2 * i + 1])
                                     : cuda::Pack<DType::kF16>(x[2 * i], x[2 * i + 1]);
  }
  return w;
}

template <int kCount>
__device__ __forceinline__ void StoreLocal(void* to, const Words<kCount>& w) {
  if (w.count == 2) {
    *static_cast<uint2*>(to) = make_uint2(w.word[0], w.word[1]);
    return;
  }
#pragma unroll
  for (int i = 0; i < kCount; i += 4) {
    if (i < w.count) {
      static_cast<uint4*>(to)[i / 4] =
          make_uint4(w.word[i], w.word[i + 1], w.word[i + 2], w.word[i + 3]);
    }
  }
}

template <int kCount>
__device__ __forceinline__ void Send(std::byte* to, const Words<kCount>& w) {
  if (w.count == 2) {
    StoreWord(to, Sendable(w.word[0]));
    StoreWord(to + 4, Sendable(w.word[1]));
    return;
  }
#pragma unroll
  for (int i = 0; i < kCount; i += 4) {
    if (i < w.count) {
      StorePacket(to + 4 * i,
                  Sendable(make_uint4(w.word[i], w.word[i + 1], w.word[i + 2], w.word[i + 3])));
    }
  }
}

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
      if (lane == 0) Fail(a_, failure);
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

// Rank 0: merged heads of the other ranks into its output, a packet of each at a time. Each packet
// is read, and cleared, by one thread.
template <int kRanks>
__device__ void ReceiveMerged(const DirectArgs& a, uint32_t step) {
  const int workers = static_cast<int>(blockDim.x) - kWarp;
  const int unit_bytes = a.head_dim * static_cast<int>(SizeOf(a.out_dtype));
  const int packets = unit_bytes / kDirectPacket;
  for (int q = threadIdx.x; q < a.plan.units * packets; q += workers) {
    const int unit = q / packets;
    const int packet = q - unit * packets;
    const bool with_lse = packet == 0;
    uint32_t senders = 0;
#pragma unroll
    for (int r = 1; r < kRanks; ++r) {
      if (r < a.layout.ranks && unit < UnitsFor(a, r).count) senders |= 1u << r;
    }
    uint4 data[kRanks];
    uint32_t lse[kRanks];
    uint32_t missing = senders;
    Patience patience;
    while (missing != 0) {
#pragma unroll
      for (int r = 1; r < kRanks; ++r) {
        if ((missing >> r & 1) == 0) continue;
        const Box box = BoxOf(a, DirectStage::kMerged, step, r);
        const std::byte* inbox = a.memory[a.rank] + box.at;
        data[r] = LoadPacket(inbox + static_cast<size_t>(q) * kDirectPacket);
        lse[r] = with_lse ? LoadWord(inbox + box.lse_bytes + 4 * unit) : 0;
      }
#pragma unroll
      for (int r = 1; r < kRanks; ++r) {
        if ((missing >> r & 1) == 0) continue;
        if (Arrived(data[r]) && lse[r] != kNotArrived) missing &= ~(1u << r);
      }
      if (missing != 0 && patience.Ended(a, missing)) return;
    }
#pragma unroll
    for (int r = 1; r < kRanks; ++r) {
      if ((senders >> r & 1) == 0) continue;
      const Box box = BoxOf(a, DirectStage::kMerged, step, r);
      std::byte* const inbox = a.memory[a.rank] + box.at;
      StorePacket(inbox + static_cast<size_t>(q) * kDirectPacket, NothingArrived());
      if (with_lse) StoreWord(inbox + box.lse_bytes + 4 * unit, kNotArrived);
      const Units units = UnitsFor(a, r);
      const size_t pair = PairOf(a, units.slice, units.first + unit);
      *reinterpret_cast<uint4*>(static_cast<std::byte*>(a.out) + pair * unit_bytes +
                                packet * kDirectPacket) = data[r];
      if (with_lse && a.lse_out != nullptr) a.lse_out[pair] = __uint_as_float(lse[r]);
    }
  }
}

// ---------------------------------------------------------------------------------------------
// Partials

// kArrives: DirectArgs::partial_arrives.
template <DType kIn, DType kWire, int kRanks, bool kArrives>
class Exchange {
 public:
  using E = Element<kIn, kWire>;
  static constexpr int kCount = E::kCount;

  __device__ Exchange(const DirectArgs& a, uint32_t step)
      : a_(a),
        step_(step),
        workers_(static_cast<int>(blockDim.x) - kWarp),
        packets_(a.head_dim / kCount),
        lse_bytes_(static_cast<size_t>(a.plan.units) * packets_ * kDirectPacket) {}

  // Whether any rank gets something of this one: when rank 0 gets all in one hop, it sends nothing.
  __device__ __forceinline__ bool Sends() const {
    return a_.plan.route != DirectRoute::kOneHop || a_.rank != 0;
  }

  // What this thread sends first, fetched while the bookkeeping waits for its answer. False when it
  // did not come.
  __device__ __forceinline__ bool Fetch(int q) {
    const int unit = q / packets_;
    const int packet = q - unit * packets_;
    int32_t heads = 0;  // of the slice that `row` was found for: slices are nearly all alike
    int32_t row = 0;
#pragma unroll
    for (int i = 1; i < kRanks; ++i) {
      if (i >= a_.layout.ranks) continue;
      const Units units = UnitsFor(a_, Peer(i));
      if (unit >= units.count) continue;
      const int32_t of_slice = units.first + unit;
      if (units.slice.count != heads) {
        heads = units.slice.count;
        row = of_slice / heads;
      }
      const size_t pair =
          static_cast<size_t>(row) * a_.heads + units.slice.begin + (of_slice - row * heads);
      if (!LoadOwn(pair, packet, &fetched_[i - 1])) return false;
    }
    return true;
  }

  __device__ __forceinline__ void SendAll() {
    const int total = a_.plan.units * packets_;
    for (int q = threadIdx.x; q < total;) {
      const int unit = q / packets_;
#pragma unroll
      for (int i = 1; i < kRanks; ++i) {
        if (i >= a_.layout.ranks) continue;
        const int peer = Peer(i);
        if (unit >= UnitsFor(a_, peer).count) continue;
        StorePacket(a_.memory[peer] + Inbox(a_.rank) + static_cast<size_t>(q) * kDirectPacket,
                    Sendable(fetched_[i - 1]));
      }
      q += workers_;
      if (q < total && !Fetch(q)) return;
    }
  }

  // By the bookkeeping warp: few words, each as urgent as the data. False when some did not come.
  __device__ __forceinline__ bool SendLse() {
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    for (int r = 0; r < a_.layout.ranks; ++r) {
      if (r == a_.rank) continue;
      const Units units = UnitsFor(a_, r);
      for (int unit = lane; unit < units.count; unit += kWarp) {
        const size_t pair = PairOf(a_, units.slice, units.first + unit);
        uint32_t lse;
        if (!LoadOwnLse(pair, &lse)) return false;
        StoreWord(a_.memory[r] + Inbox(a_.rank) + lse_bytes_ + 4 * unit, Sendable(lse));
      }
    }
    return true;
  }

  __device__ __forceinline__ void ReceiveAndMerge() {
    const Units units = UnitsFor(a_, a_.rank);
    const int total = units.count * packets_;
    for (int q = threadIdx.x; q < total; q += workers_) {
      if (!ReceiveOne(units, q)) break;
    }
    // LSEs are read by all threads of a unit, so they are cleared when all are done.
    SyncWorkers();
    for (int i = threadIdx.x; i < units.count * a_.layout.ranks; i += workers_) {
      const int source = i / units.count;
      const int unit = i - source * units.count;
      if (source != a_.rank) {
        StoreWord(Memory() + Inbox(source) + lse_bytes_ + 4 * unit, kNotArrived);
      } else if (kArrives) {
        StoreWord(a_.lse + PairOf(a_, units.slice, units.first + unit), kNotArrived);
      }
    }
  }

 private:
  // The i-th rank after this one: ranks begin with different peers, so that no link is flooded.
  __device__ __forceinline__ int Peer(int i) const {
    const int r = a_.rank + i;
    return r < a_.layout.ranks ? r : r - a_.layout.ranks;
  }
  __device__ __forceinline__ std::byte* Memory() const { return a_.memory[a_.rank]; }
  __device__ __forceinline__ size_t Inbox(int source) const {
    return a_.layout.inbox(DirectStage::kPartials, step_ % kDirectSlots, source,
                           static_cast<int>(blockIdx.x));
  }

  // What is known of a packet of this rank's own partial while it arrives.
  struct Own {
    std::byte* at;
    typename E::Raw raw;
    __device__ __forceinline__ void Look() {
#pragma unroll
      for (int i = 0; i < E::kParts; ++i) raw.part[i] = LoadPacket(at + i * kDirectPacket);
    }
    __device__ __forceinline__ bool Came() const {
      bool arrived = true;
#pragma unroll
      for (int i = 0; i < E::kParts; ++i) arrived &= Arrived(raw.part[i]);
      return arrived;
    }
    __device__ __forceinline__ void Clear() const {
#pragma unroll
      for (int i = 0; i < E::kParts; ++i) StorePacket(at + i * kDirectPacket, NothingArrived());
    }
  };
  __device__ __forceinline__ Own OwnAt(size_t pair, int packet) const {
    const size_t element = pair * a_.head_dim + packet * kCount;
    return {const_cast<std::byte*>(E::Place(a_.o, element))};
  }

  // A packet to send. False when it was waited for in vain.
  __device__ __forceinline__ bool LoadOwn(size_t pair, int packet, uint4* out) const {
    if (!kArrives) {
      *out = E::Packet(E::Load(a_.o, pair * a_.head_dim + packet * kCount));
      return true;
    }
    Own own = OwnAt(pair, packet);
    Patience patience;
    for (own.Look(); !own.Came(); own.Look()) {
      if (patience.Ended(a_, 1u << a_.rank)) return false;
      __nanosleep(kNapNanoseconds);
    }
    own.Clear();
    *out = E::Packet(own.raw);
    return true;
  }

  // Its LSE, likewise.
  __device__ __forceinline__ bool LoadOwnLse(size_t pair, uint32_t* out) const {
    if (!kArrives) {
      *out = __float_as_uint(a_.lse[pair]);
      return true;
    }
    Patience patience;
    while ((*out = LoadWord(a_.lse + pair)) == kNotArrived) {
      if (patience.Ended(a_, 1u << a_.rank)) return false;
      __nanosleep(kNapNanoseconds);
    }
    StoreWord(a_.lse + pair, kNotArrived);
    return true;
  }

  // One packet of every rank.
  __device__ __forceinline__ bool ReceiveOne(const Units& units, int q) {
    const int unit = q / packets_;
    const int packet = q - unit * packets_;
    const size_t pair = PairOf(a_, units.slice, units.first + unit);
    uint4 data[kRanks];
    uint32_t lse[kRanks];
    uint32_t missing = 0;
    Own own = OwnAt(pair, packet);
    const float sink = a_.sinks == nullptr ? EmptyLse<float>() : a_.sinks[pair % a_.heads];
#pragma unroll
    for (int r = 0; r < kRanks; ++r) {
      if (r >= a_.layout.ranks) continue;
      if (r == a_.rank && !kArrives) {
        data[r] = E::Packet(E::Load(a_.o, pair * a_.head_dim + packet * kCount));
        lse[r] = __float_as_uint(a_.lse[pair]);
      } else {
        missing |= 1u << r;
      }
    }
    Patience patience;
    while (true) {
      // All that is missing is on its way before any of it is looked at.
      if (kArrives && (missing >> a_.rank & 1) != 0) own.Look();
#pragma unroll
      for (int r = 0; r < kRanks; ++r) {
        if ((missing >> r & 1) == 0) continue;
        if (r == a_.rank) {
          lse[r] = LoadWord(a_.lse + pair);
          continue;
        }
        const std::byte* inbox = Memory() + Inbox(r);
        data[r] = LoadPacket(inbox + static_cast<size_t>(q) * kDirectPacket);
        lse[r] = LoadWord(inbox + lse_bytes_ + 4 * unit);
      }
#pragma unroll
      for (int r = 0; r < kRanks; ++r) {
        if ((missing >> r & 1) == 0) continue;
        bool arrived = false;
        if (r == a_.rank) {
          arrived = own.Came();
          data[r] = E::Packet(own.raw);
        } else {
          arrived = Arrived(data[r]);
        }
        if (arrived && lse[r] != kNotArrived) missing &= ~(1u << r);
      }
      if (missing == 0) break;
      if (patience.Ended(a_, missing)) return false;
      if ((missing >> a_.rank & 1) != 0) __nanosleep(kNapNanoseconds);
    }
#pragma unroll
    for (int r = 0; r < kRanks; ++r) {
      if (r >= a_.layout.ranks || r == a_.rank) continue;
      StorePacket(Memory() + Inbox(r) + static_cast<size_t>(q) * kDirectPacket, NothingArrived());
    }
    if (kArrives) own.Clear();
    float x[kCount];
    const float merged = MergeAll(data, lse, sink, x);
    Deliver(unit, packet, units.first + unit, pair, x, merged);
    return true;
  }

  // As kernels/cuda/merge/merge.cu: in rank order, a rank without keys left out.
  __device__ __forceinline__ float MergeAll(const uint4 (&data)[kRanks],
                                            const uint32_t (&lse)[kRanks], float sink,
                                            float (&x)[kCount]) const {
    float top = EmptyLse<float>();
    bool nan = false;
#pragma unroll
    for (int r = 0; r < kRanks; ++r) {
      if (r >= a_.layout.ranks) continue;
      const float value = __uint_as_float(lse[r]);
      nan |= value != value;
      top = fmaxf(top, value);
    }
    const float base = top == EmptyLse<float>() ? 0.0f : top;
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kCount; ++i) x[i] = 0.0f;
#pragma unroll
    for (int r = 0; r < kRanks; ++r) {
      if (r >= a_.layout.ranks) continue;
      const float weight = expf(__uint_as_float(lse[r]) - base);
      if (weight == 0.0f) continue;
      float o[kCount];
      E::Widen(data[r], o);
      sum += weight;
#pragma unroll
      for (int i = 0; i < kCount; ++i) x[i] += weight * o[i];
    }
    const float merged = sum == 0.0f ? EmptyLse<float>() : (nan ? sum : top + logf(sum));
    float scale = sum == 0.0f ? 0.0f : 1.0f / sum;
    if (a_.sinks != nullptr && sum != 0.0f) scale *= SinkScale(merged, sink);
#pragma unroll
    for (int i = 0; i < kCount; ++i) x[i] *= scale;
    return merged;
  }

  // `unit` counts within the block, `slice_unit` within the rank's heads, `pair` among all heads.
  __device__ __forceinline__ void Deliver(int unit, int packet, int32_t slice_unit, size_t pair,
                                          const float (&x)[kCount], float lse) {
    const Words<kCount> words = EncodeOutput(x, a_.out_dtype);
    const size_t size = SizeOf(a_.out_dtype);
    const size_t in_unit = static_cast<size_t>(packet) * kCount * size;
    const size_t unit_bytes = a_.head_dim * size;
    if (a_.plan.route == DirectRoute::kTwoHops && a_.rank != 0) {
      const Box box = BoxOf(a_, DirectStage::kMerged, step_, a_.rank);
      std::byte* const root = a_.memory[0] + box.at;
      Send(root + unit * unit_bytes + in_unit, words);
      if (packet == 0) {
        StoreWord(root + box.lse_bytes + 4 * unit, Sendable(__float_as_uint(lse)));
      }
      return;
    }
    const size_t at = a_.plan.route == DirectRoute::kScatter ? slice_unit : pair;
    StoreLocal(static_cast<std::byte*>(a_.out) + at * unit_bytes + in_unit, words);
    if (packet == 0 && a_.lse_out != nullptr) a_.lse_out[at] = lse;
  }

  const DirectArgs& a_;
  const uint32_t step_;
  const int workers_;
  const int packets_;          // of a unit
  const size_t lse_bytes_;     // from a box's start to its LSEs
  uint4 fetched_[kRanks - 1];  // for the ranks after this one
};

template <DType kIn, DType kWire, int kRanks, bool kArrives>
__global__ void __launch_bounds__(kMaxWorkers + kWarp, 1)
    DirectKernel(const __grid_constant__ DirectArgs a) {
  if (!kArrives) AwaitKernelBefore();
  const std::byte* own = a.memory[a.rank];
  const uint32_t step = LoadWord(own + a.layout.step(static_cast<int>(blockIdx.x)));
  Exchange<kIn, kWire, kRanks, kArrives> exchange(a, step);
  Bookkeeping books(a, step);
  const bool worker = threadIdx.x < blockDim.x - kWarp;
  bool usable = true;
  if (worker) {
    if (threadIdx.x < a.plan.units * (a.head_dim / exchange.kCount)) {
      usable = exchange.Fetch(threadIdx.x);
    }
  } else {
    usable = books.MayWrite();
  }
  // Who sends nothing need not wait for being allowed to; a failure reaches its waits.
  if (exchange.Sends() && __syncthreads_and(usable) == 0) return;
  if (!worker) {
    if (usable && exchange.SendLse()) books.TellPeers();
    return;
  }
  exchange.SendAll();
  AllowKernelAfter();
  exchange.ReceiveAndMerge();
  if (a.plan.route == DirectRoute::kTwoHops && a.rank == 0) ReceiveMerged<kRanks>(a, step);
  // What comes after this launch comes after the one ahead of it, too.
  if (kArrives) AwaitKernelBefore();
}

// ---------------------------------------------------------------------------------------------
// Merged heads

// Packets [from, ...) of this rank's slice to rank 0, or into its output where this is rank 0.
__device__ void SendMerged(const DirectArgs& a, uint32_t step) {
  const int workers = static_cast<int>(blockDim.x) - kWarp;
  const int unit_bytes = a.head_dim * static_cast<int>(SizeOf(a.out_dtype));
  const int packets = unit_bytes / kDirectPacket;
  const Units units = UnitsFor(a, a.rank);
  const Box box = BoxOf(a, DirectStage::kMerged, step, a.rank);
  std::byte* const root = a.memory[0] + box.at;
  for (int q = threadIdx.x; q < units.count * packets; q += workers) {
    const int unit = q / packets;
    const int packet = q - unit * packets;
    const size_t slice_unit = units.first + unit;
    const uint4 x = *reinterpret_cast<const uint4*>(
        static_cast<const std::byte*>(a.o) + slice_unit * unit_bytes + packet * kDirectPacket);
    const float lse = packet == 0 && a.lse != nullptr ? a.lse[slice_unit] : 0.0f;
    if (a.rank != 0) {
      StorePacket(root + static_cast<size_t>(q) * kDirectPacket, Sendable(x));
      if (packet == 0) {
        StoreWord(root + box.lse_bytes + 4 * unit, Sendable(__float_as_uint(lse)));
      }
      continue;
    }
    const size_t pair = PairOf(a, units.slice, units.first + unit);
    *reinterpret_cast<uint4*>(static_cast<std::byte*>(a.out) + pair * unit_bytes +
                              packet * kDirectPacket) = x;
    if (packet == 0 && a.lse_out != nullptr) a.lse_out[pair] = lse;
  }
}

template <int kRanks>
__global__ void __launch_bounds__(kMaxWorkers + kWarp, 1)
    DirectGatherKernel(const __grid_constant__ DirectArgs a) {
  AwaitKernelBefore();
  const uint32_t step = LoadWord(a.memory[a.rank] + a.layout.step(static_cast<int>(blockIdx.x)));
  Bookkeeping books(a, step);
  const bool worker = threadIdx.x < blockDim.x - kWarp;
  const bool usable = worker || books.MayWrite();
  if (__syncthreads_and(usable) == 0) return;
  if (!worker) {
    books.TellPeers();
    return;
  }
  SendMerged(a, step);
  AllowKernelAfter();
  if (a.rank == 0) ReceiveMerged<kRanks>(a, step);
}

__global__ void StoreIfZeroKernel(const __grid_constant__ PeerWords words) {
  std::byte* at = words.at[threadIdx.x];
  if (at != nullptr && LoadWord(at) == 0) StoreWord(at, words.value[threadIdx.x]);
}

// ---------------------------------------------------------------------------------------------
// Launching

using Kernel = void (*)(DirectArgs);

template <DType kIn, DType kWire, bool kArrives = false>
Kernel KernelFor(int ranks) {
  return ranks <= 4 ? DirectKernel<kIn, kWire, 4, kArrives>
                    : DirectKernel<kIn, kWire, kMaxDirectRanks, kArrives>;
}

Kernel GatherKernelFor(int ranks) {
  return ranks <= 4 ? DirectGatherKernel<4> : DirectGatherKernel<kMaxDirectRanks>;
}

template <bool kArrives>
Kernel KernelFromF32(DType wire, int ranks) {
  if (wire == DType::kF32) return KernelFor<DType::kF32, DType::kF32, kArrives>(ranks);
  if (wire == DType::kBf16) return KernelFor<DType::kF32, DType::kBf16, kArrives>(ranks);
  return KernelFor<DType::kF32, DType::kF16, kArrives>(ranks);
}

Kernel KernelOf(DType o, DType wire, int ranks, bool arrives) {
  if (arrives) return KernelFromF32<true>(wire, ranks);
  if (o == DType::kF32) return KernelFromF32<false>(wire, ranks);
  if (wire == DType::kBf16) return KernelFor<DType::kBf16, DType::kBf16>(ranks);
  return KernelFor<DType::kF16, DType::kF16>(ranks);
}

}  // namespace

void SetHeads(DirectArgs* args) {
  const int32_t ranks = args->layout.ranks;
  for (int r = 0; r <= kMaxDirectRanks; ++r) {
    args->first_head[r] =
        r < ranks ? DirectSlice(args->plan.route, args->heads, ranks, r).begin : args->heads;
  }
}

bool DirectTypesSupported(DType o, DType wire) {
  return !IsFp8(wire) && (o == wire || o == DType::kF32);
}

Status LaunchDirect(const DirectArgs& args, DType o_dtype, DType wire, bool overlap_launch,
                    cudaStream_t stream) {
  const Kernel kernel = args.plan.route == DirectRoute::kGather
                            ? GatherKernelFor(args.layout.ranks)
                            : KernelOf(o_dtype, wire, args.layout.ranks, args.partial_arrives);
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(args.plan.blocks);
  config.blockDim = dim3(args.plan.workers + kWarp);
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = overlap_launch ? 1 : 0;
  return cuda::CudaStatus(cudaLaunchKernelEx(&config, kernel, args), "direct exchange");
}

Status LaunchStoreIfZero(const PeerWords& words, cudaStream_t stream) {
  StoreIfZeroKernel<<<1, kMaxDirectRanks, 0, stream>>>(words);
  return cuda::CudaStatus(cudaGetLastError(), "telling peers");
}

Status LoadDirectKernels() {
  std::vector<const void*> kernels = {
      reinterpret_cast<const void*>(GatherKernelFor(4)),
      reinterpret_cast<const void*>(GatherKernelFor(kMaxDirectRanks)),
      reinterpret_cast<const void*>(StoreIfZeroKernel)};
  for (const DType wire : {DType::kF32, DType::kBf16, DType::kF16}) {
    for (const int ranks : {4, kMaxDirectRanks}) {
      kernels.push_back(reinterpret_cast<const void*>(KernelOf(wire, wire, ranks, false)));
      for (const bool arrives : {false, true}) {
        kernels.push_back(
            reinterpret_cast<const void*>(KernelOf(DType::kF32, wire, ranks, arrives)));
      }
    }
  }
  return cuda::LoadKernels(kernels, "the direct exchange");
}

}  // namespace tributary::collective
