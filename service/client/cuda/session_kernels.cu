#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <cstddef>
#include <thread>
#include <type_traits>
#include <vector>

#include "base/cuda/early_launch.cuh"
#include "base/cuda/stream_wait.h"
#include "base/mailbox/doorbell.cuh"
#include "service/client/cuda/session_kernels.h"

namespace tributary::client {
namespace {

using cuda::LetNextLaunchBegin;
using cuda::WaitForLaunchesAhead;

constexpr int kThreads = 512;
// Vectors of 16 bytes that a thread of a hand-over has in flight.
constexpr int kVectors = 2;
// A launch of no more blocks than this waits for its slot itself, which is seldom: when it follows
// an append-only step. What frees the slot then is small, and finds room beside so many blocks.
constexpr uint32_t kMostHandOverBlocks = 128;
// A launch of no more blocks than this waits for the result and copies it, too. A larger one would
// keep many multiprocessors from the attention that it waits for; then one warp waits, and the copy
// is a launch of its own.
constexpr int kMostWaitingBlocks = 1;
constexpr int kCopyThreads = 256;
constexpr int kElements = 8;  // that a thread of the copy takes at a time

// As it was when the launch began; read as a whole.
__device__ __forceinline__ HostCounter CounterOf(const MailboxView& session) {
  const uint4 words = *reinterpret_cast<const uint4*>(session.counter);
  return {words.x, words.y, words.z, words.w};
}

__device__ __forceinline__ uint32_t* WordOf(const MailboxView& session, size_t offset) {
  return reinterpret_cast<uint32_t*>(session.mailbox + offset);
}

// Launches are of two kinds: what HandOver and TakeBack may ask for beyond the usual (`kExtended`)
// costs the others nothing.

// By one thread: whether the first `count` layers of the session are finished.
template <bool kExtended>
__device__ bool AwaitFinished(const MailboxView& session, const HostCounter& counter,
                              uint32_t count) {
  if (counter.failure != 0) return false;
  const uint32_t* status = WordOf(session, session.layout.status);
  // The stream has waited for the layer already, or waiting is of no use.
  const uint64_t bound = session.stream_waits ? 0 : session.bound;
  const mailbox::Awaited awaited = mailbox::Await(WordOf(session, session.layout.finished), count,
                                                  status, bound, session.one_gpu);
  if (awaited == mailbox::Awaited::kReached) return true;
  if constexpr (kExtended) {
    // Other endpoints may have left since. What was finished before is good.
    const uint32_t* finished = WordOf(session, session.layout.finished);
    if (awaited == mailbox::Awaited::kEnded && mailbox::Reached(mailbox::Look(finished), count)) {
      mailbox::Fence(session.one_gpu);
      return true;
    }
  }
  const uint32_t code = mailbox::Look(status);
  session.counter->failure = code != 0 ? code : mailbox::kDeadlineExceeded;
  session.failure->status = session.counter->failure;
  return false;
}

// Whether this block is the last of its launch that comes here. What the others wrote is seen by
// it, and by whoever it rings for. By one thread, behind a barrier.
__device__ bool LastBlock(const MailboxView& session) {
  if (gridDim.x == 1) return true;
  mailbox::Fence(session.one_gpu);
  const bool last = atomicAdd(&session.counter->tickets, 1) + 1 == gridDim.x;
  if (last) session.counter->tickets = 0;
  return last;
}

// This block's part of a layer, whose parts all blocks of a launch add up to. Not of more blocks
// than a layer has parts.
__device__ __forceinline__ uint32_t PartOfLayer() {
  const uint32_t part = mailbox::kLayerParts / gridDim.x;
  return blockIdx.x == 0 ? mailbox::kLayerParts - part * (gridDim.x - 1) : part;
}

struct HandOverArgs {
  MailboxView session;
  StridedTensor tensors[3];  // q, k, v
  size_t offsets[3];         // in the slot
  uint32_t vectors[3];       // of 16 bytes
  bool no_result = false;
};
struct ExtendedHandOver : HandOverArgs {
  uint32_t ahead = 0;
  int32_t slot_heads[3] = {};  // in a row of the slot
  Timing timing;
};

struct TakeBackArgs {
  MailboxView session;
  ResultTarget target;
};
struct ExtendedTakeBack : TakeBackArgs {
  SlotHeads heads;
  Timing timing;
};

// What a launch of one warp waits for, ahead of one of many blocks.
struct AwaitArgs {
  MailboxView session;
  bool slot = false;  // that the layer's slot is free; or else its result
};
struct ExtendedAwait : AwaitArgs {
  uint32_t ahead = 0;
  Timing timing;
};

template <typename Args>
inline constexpr bool kIsExtended =
    std::is_same_v<Args, ExtendedHandOver> || std::is_same_v<Args, ExtendedTakeBack> ||
    std::is_same_v<Args, ExtendedAwait>;

// The stamps of layer number `count` while it is under way, or null.
template <typename Args>
__device__ __forceinline__ LayerStamps* StampsOf(const Args& args, uint32_t count) {
  if constexpr (kIsExtended<Args>) {
    if (args.timing.stamps != nullptr) {
      return args.timing.stamps + count % static_cast<uint32_t>(args.session.layout.slots);
    }
  }
  return nullptr;
}

__device__ __forceinline__ const uint4* VectorOf(const StridedTensor& tensor, uint32_t index) {
  const uint32_t per_head = static_cast<uint32_t>(tensor.head_bytes) / 16;
  const uint32_t head = index / per_head;
  const uint32_t row = head / static_cast<uint32_t>(tensor.heads);
  const int64_t at = row * tensor.row_stride +
                     (head - row * static_cast<uint32_t>(tensor.heads)) * tensor.head_stride +
                     (index - head * per_head) * 16;
  return reinterpret_cast<const uint4*>(tensor.data + at);
}

// Where vector `index` of a tensor goes, from the tensor's offset in the slot on.
template <typename Args>
__device__ __forceinline__ size_t PlaceInSlot(const Args& args, int tensor, uint32_t index) {
  if constexpr (kIsExtended<Args>) {
    const StridedTensor& from = args.tensors[tensor];
    const uint32_t of_row = static_cast<uint32_t>(from.heads) * from.head_bytes / 16;
    const uint32_t row = index / of_row;
    const size_t row_bytes = static_cast<size_t>(args.slot_heads[tensor]) * from.head_bytes;
    return row * row_bytes + static_cast<size_t>(index - row * of_row) * 16;
  } else {
    return static_cast<size_t>(index) * 16;
  }
}

template <typename Args>
__global__ void __launch_bounds__(kThreads) HandOverKernel(const __grid_constant__ Args args) {
  constexpr bool kExtended = kIsExtended<Args>;
  WaitForLaunchesAhead();
  LetNextLaunchBegin();
  const MailboxView& session = args.session;
  const HostCounter counter = CounterOf(session);
  uint32_t ahead = 0;
  if constexpr (kExtended) ahead = args.ahead;
  const uint32_t count = counter.count + ahead;
  if (LayerStamps* stamps = StampsOf(args, count); stamps != nullptr) {
    if (blockIdx.x == 0 && threadIdx.x == 0) stamps->begun = mailbox::Nanoseconds();
  }
  const uint32_t all = args.vectors[0] + args.vectors[1] + args.vectors[2];
  uint4 values[kVectors];
  size_t offsets[kVectors];
  const uint32_t first = blockIdx.x * kVectors * blockDim.x + threadIdx.x;
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    uint32_t index = first + i * blockDim.x;
    if (index >= all) break;
    int t = 0;
    if (index >= args.vectors[0]) index -= args.vectors[t++];
    if (t == 1 && index >= args.vectors[1]) index -= args.vectors[t++];
    values[i] = __ldcs(VectorOf(args.tensors[t], index));
    offsets[i] = args.offsets[t] + PlaceInSlot(args, t, index);
  }
  // Slots come free in the order of layers, mostly long before. What was taken back is finished.
  const auto slots = static_cast<uint32_t>(session.layout.slots);
  const bool free_already = counter.failure == 0 && counter.unfinished + ahead < slots;
  const bool in_parts = session.layout.begun != 0;
  // Otherwise the last block adds all parts.
  const bool adds_part = in_parts && gridDim.x <= mailbox::kLayerParts;
  if (adds_part && free_already && threadIdx.x == 0) {
    mailbox::Add(WordOf(session, session.layout.begun), PartOfLayer());
  }
  __shared__ bool free;
  if (threadIdx.x == 0) {
    free = free_already ||
           (counter.failure == 0 && AwaitFinished<kExtended>(session, counter, count + 1 - slots));
  }
  __syncthreads();
  if (free) {
    std::byte* slot = session.mailbox + session.layout.SlotOf(count);
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      if (first + i * blockDim.x < all) *reinterpret_cast<uint4*>(slot + offsets[i]) = values[i];
    }
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  const bool orders_one_gpu = session.one_gpu && !session.several_gpus;
  if (adds_part) {
    if (free) {
      if (!free_already) mailbox::Add(WordOf(session, session.layout.begun), PartOfLayer());
      mailbox::Fence(orders_one_gpu);
      mailbox::Add(WordOf(session, session.layout.arrived), PartOfLayer());
    }
    // Nothing is left for the last block to do.
    if (!kExtended && !session.stream_waits && !args.no_result) return;
  }
  if (!LastBlock(session)) return;
  if (free) {
    // A layer that was not handed over does not come back.
    if (session.stream_waits) atomicCAS_system(WordOf(session, session.layout.handed_back), 1u, 0u);
    if (!in_parts) {
      mailbox::Ring(WordOf(session, session.layout.arrived), count + 1, orders_one_gpu);
    } else if (!adds_part) {
      mailbox::Add(WordOf(session, session.layout.begun), mailbox::kLayerParts);
      mailbox::Fence(orders_one_gpu);
      mailbox::Add(WordOf(session, session.layout.arrived), mailbox::kLayerParts);
    }
    LayerStamps* stamps = StampsOf(args, count);
    if (stamps != nullptr) stamps->rung = mailbox::Nanoseconds();
  }
  if (session.stream_waits) {
    mailbox::Fence(session.one_gpu);
    if (free) atomicCAS_system(WordOf(session, session.layout.handed_over), 0u, 1u);
    session.failure->handed_over = count + 1;
  }
  if (!args.no_result) return;
  session.counter->count = count + 1;
  session.counter->unfinished = counter.unfinished < slots ? counter.unfinished + 1 : slots;
}

template <typename Args>
__global__ void __launch_bounds__(32) AwaitKernel(const __grid_constant__ Args args) {
  WaitForLaunchesAhead();
  const MailboxView& session = args.session;
  const HostCounter counter = CounterOf(session);
  const auto slots = static_cast<uint32_t>(session.layout.slots);
  uint32_t ahead = 0;
  if constexpr (kIsExtended<Args>) ahead = args.ahead;
  // What was taken back is finished.
  const bool free = args.slot && counter.unfinished + ahead < slots;
  if (threadIdx.x == 0 && !free) {
    AwaitFinished<kIsExtended<Args>>(session, counter,
                                     counter.count + ahead + 1 - (args.slot ? slots : 0));
    LayerStamps* stamps = args.slot ? nullptr : StampsOf(args, counter.count);
    if (stamps != nullptr) stamps->back = mailbox::Nanoseconds();
  }
  // All of the warp: what comes next may be large, and the result may need the room.
  __syncwarp();
  LetNextLaunchBegin();
}

__device__ __forceinline__ uint32_t Pair(Element element, float low, float high) {
  uint32_t pair;
  if (element == Element::kBf16) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  }
  return pair;
}

// Which head of the slot head `index` of a result is; a row of the slot has `slot_heads`.
template <bool kExtended>
__device__ __forceinline__ int64_t HeadInSlot(int64_t index, int heads, int64_t slot_heads) {
  return kExtended ? index / heads * slot_heads + index % heads : index;
}

template <bool kExtended>
__device__ __forceinline__ void CopyVector(const ResultTarget& target, const float* from,
                                           int64_t vector, int64_t slot_heads, bool good) {
  const int per_head = target.value_dim / kElements;
  const int64_t head = vector / per_head;
  const int64_t at = head / target.heads * target.row_stride +
                     head % target.heads * target.head_stride + vector % per_head * kElements;
  float4 x[2];
  int64_t in_slot = vector;
  if constexpr (kExtended) {
    in_slot = HeadInSlot<true>(head, target.heads, slot_heads) * per_head + vector % per_head;
  }
  const auto* source = reinterpret_cast<const float4*>(from + in_slot * kElements);
  const float nan = __int_as_float(0x7fffffff);
  x[0] = good ? __ldcs(source) : make_float4(nan, nan, nan, nan);
  x[1] = good ? __ldcs(source + 1) : make_float4(nan, nan, nan, nan);
  if (target.element == Element::kF32) {
    auto* to = reinterpret_cast<float4*>(static_cast<float*>(target.output) + at);
    to[0] = x[0];
    to[1] = x[1];
    return;
  }
  *reinterpret_cast<uint4*>(static_cast<uint16_t*>(target.output) + at) =
      make_uint4(Pair(target.element, x[0].x, x[0].y), Pair(target.element, x[0].z, x[0].w),
                 Pair(target.element, x[1].x, x[1].y), Pair(target.element, x[1].z, x[1].w));
}

// Keeps the stamps of a layer that has been taken back.
__device__ __forceinline__ void Record(const ExtendedTakeBack& args, uint32_t count) {
  if (args.timing.records == nullptr) return;
  const MailboxView& session = args.session;
  LayerStamps stamps = *StampsOf(args, count);
  stamps.service = *reinterpret_cast<const mailbox::SlotStamps*>(
      session.mailbox + session.layout.SlotOf(count) + session.layout.stamps);
  args.timing.records->layers[count % LayerRecords::kLayers] = stamps;
  mailbox::Ring(&args.timing.records->taken, count + 1, /*one_gpu=*/false);
}

template <bool kWaits, typename Args>
__global__ void __launch_bounds__(kThreads) TakeBackKernel(const __grid_constant__ Args args) {
  constexpr bool kExtended = kIsExtended<Args>;
  WaitForLaunchesAhead();
  const MailboxView& session = args.session;
  const ResultTarget& target = args.target;
  const HostCounter counter = CounterOf(session);
  const uint32_t count = counter.count;
  __shared__ bool good;
  if (threadIdx.x == 0) {
    good = kWaits ? AwaitFinished<kExtended>(session, counter, count + 1) : counter.failure == 0;
    LayerStamps* stamps = kWaits && blockIdx.x == 0 ? StampsOf(args, count) : nullptr;
    if (stamps != nullptr) stamps->back = mailbox::Nanoseconds();
  }
  __syncthreads();
  LetNextLaunchBegin();
  const std::byte* slot = session.mailbox + session.layout.SlotOf(count);
  const auto* o = reinterpret_cast<const float*>(slot + session.layout.output);
  const auto* lse = reinterpret_cast<const float*>(slot + session.layout.lse);
  int64_t slot_heads = target.heads;
  if constexpr (kExtended) {
    slot_heads = args.heads.all;
    o += int64_t{args.heads.first} * target.value_dim;
    lse += args.heads.first;
  }
  const int64_t row_heads = int64_t{target.rows} * target.heads;
  const int64_t step = int64_t{gridDim.x} * blockDim.x;
  const int64_t first = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (target.output != nullptr) {
    for (int64_t i = first; i < row_heads * target.value_dim / kElements; i += step) {
      CopyVector<kExtended>(target, o, i, slot_heads, good);
    }
  }
  if (target.lse != nullptr) {
    for (int64_t i = first; i < row_heads; i += step) {
      const int64_t in_slot = HeadInSlot<kExtended>(i, target.heads, slot_heads);
      target.lse[i] = good ? lse[in_slot] : __int_as_float(0x7fffffff);
    }
  }
  __syncthreads();
  if (threadIdx.x != 0 || !LastBlock(session)) return;
  if constexpr (kExtended) Record(args, count);
  session.counter->count = count + 1;
  session.counter->unfinished = 0;
  if (session.stream_waits) session.failure->taken_back = count + 1;
}

// The host's part of round trips: rings for the rounds `first` to `last`, and awaits each answer
// where the stream does not.
struct ProbeArgs {
  MailboxView session;
  uint32_t first = 0;
  uint32_t last = 0;
  bool waits = false;
};

__global__ void ProbeKernel(const __grid_constant__ ProbeArgs args) {
  const MailboxView& session = args.session;
  for (uint32_t round = args.first; round <= args.last; ++round) {
    mailbox::Ring(WordOf(session, session.layout.service_sleeps), round, session.one_gpu);
    if (args.waits && mailbox::Await(WordOf(session, session.layout.host_sleeps), round,
                                     WordOf(session, session.layout.status), session.bound,
                                     session.one_gpu) != mailbox::Awaited::kReached) {
      return;
    }
  }
}

uint32_t VectorsOf(const StridedTensor& tensor) {
  return static_cast<uint32_t>(int64_t{tensor.rows} * tensor.heads * tensor.head_bytes / 16);
}

// `early`: it may begin while the launch ahead is still running, which is to be a launch.
template <typename Args>
cudaError_t Launch(void (*kernel)(Args), const Args& args, int64_t blocks, int threads,
                   cudaStream_t stream, bool begins_early = true) {
  cudaLaunchAttribute early = {};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = begins_early ? 1 : 0;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.stream = stream;
  config.attrs = &early;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, args);
}

}  // namespace

namespace {

template <typename Args>
cudaError_t LaunchHandOverOf(const Args& args, uint32_t vectors, cudaStream_t stream) {
  constexpr uint32_t kOfBlock = kThreads * kVectors;
  const uint32_t blocks = std::max(1u, (vectors + kOfBlock - 1) / kOfBlock);
  if (args.no_result || blocks > kMostHandOverBlocks) {
    cudaError_t error = cudaSuccess;
    if constexpr (kIsExtended<Args>) {
      ExtendedAwait slot{{.session = args.session, .slot = true}, args.ahead, args.timing};
      error = Launch(AwaitKernel<ExtendedAwait>, slot, 1, 32, stream);
    } else {
      const AwaitArgs slot{.session = args.session, .slot = true};
      error = Launch(AwaitKernel<AwaitArgs>, slot, 1, 32, stream);
    }
    if (error != cudaSuccess) return error;
  }
  return Launch(HandOverKernel<Args>, args, blocks, kThreads, stream);
}

template <typename Args, typename Await>
cudaError_t LaunchTakeBackOf(const Args& args, const Await& await, cudaStream_t stream) {
  const MailboxView& session = args.session;
  const ResultTarget& target = args.target;
  const bool wanted = target.output != nullptr || target.lse != nullptr;
  const int64_t vectors =
      wanted ? int64_t{target.rows} * target.heads * target.value_dim / kElements : 0;
  const int64_t fused = (vectors + kThreads * 2 - 1) / (kThreads * 2);
  if (session.stream_waits) {
    const uint32_t* word =
        reinterpret_cast<const uint32_t*>(session.mailbox + session.layout.handed_back);
    const cudaError_t waits = cuda::EnqueueWaitAtLeast(word, 1, stream);
    if (waits != cudaSuccess) return waits;
    const int64_t blocks = std::clamp<int64_t>(vectors / kCopyThreads, 1, 1024);
    return Launch(TakeBackKernel<true, Args>, args, blocks, kCopyThreads, stream, false);
  }
  if (fused <= kMostWaitingBlocks) {
    return Launch(TakeBackKernel<true, Args>, args, std::max<int64_t>(fused, 1), kThreads, stream);
  }
  const cudaError_t awaited = Launch(AwaitKernel<Await>, await, 1, 32, stream);
  if (awaited != cudaSuccess) return awaited;
  const int64_t blocks = std::min<int64_t>((vectors + kCopyThreads - 1) / kCopyThreads, 1024);
  return Launch(TakeBackKernel<false, Args>, args, blocks, kCopyThreads, stream);
}

}  // namespace

cudaError_t LaunchHandOver(const MailboxView& session, const StridedTensor& q,
                           const StridedTensor& k, const StridedTensor& v, const HandOver& how,
                           cudaStream_t stream) {
  ExtendedHandOver args;
  static_cast<HandOverArgs&>(args) = {
      .session = session,
      .tensors = {q, k, v},
      .offsets = {session.layout.q, session.layout.k, session.layout.v},
      .vectors = {VectorsOf(q), VectorsOf(k), VectorsOf(v)},
      .no_result = how.no_result};
  const uint32_t vectors = args.vectors[0] + args.vectors[1] + args.vectors[2];
  const bool extended =
      how.ahead > 0 || how.q.all > 0 || how.kv.all > 0 || how.timing.stamps != nullptr;
  if (!extended) return LaunchHandOverOf(static_cast<HandOverArgs&>(args), vectors, stream);
  args.ahead = how.ahead;
  args.timing = how.timing;
  for (int t = 0; t < 3; ++t) {
    const SlotHeads& heads = t == 0 ? how.q : how.kv;
    const StridedTensor& tensor = args.tensors[t];
    args.slot_heads[t] = heads.all > 0 ? heads.all : tensor.heads;
    args.offsets[t] += static_cast<size_t>(heads.first) * static_cast<size_t>(tensor.head_bytes);
  }
  return LaunchHandOverOf(args, vectors, stream);
}

cudaError_t LaunchTakeBack(const MailboxView& session, const ResultTarget& target,
                           const TakeBack& how, cudaStream_t stream) {
  if (how.q.all == 0 && how.timing.stamps == nullptr) {
    return LaunchTakeBackOf(TakeBackArgs{session, target}, AwaitArgs{.session = session}, stream);
  }
  const SlotHeads heads = how.q.all > 0 ? how.q : SlotHeads{.all = target.heads};
  return LaunchTakeBackOf(ExtendedTakeBack{{session, target}, heads, how.timing},
                          ExtendedAwait{{.session = session}, 0, how.timing}, stream);
}

namespace {

constexpr std::chrono::microseconds kProbeNap{20};

// One event more than there are spans to time.
class Events {
 public:
  explicit Events(int32_t count) : events_(static_cast<size_t>(count)) {}
  ~Events() {
    for (const cudaEvent_t event : events_) {
      if (event != nullptr) cudaEventDestroy(event);
    }
  }
  Events(const Events&) = delete;
  Events& operator=(const Events&) = delete;

  cudaError_t Record(int32_t index, cudaStream_t stream) {
    cudaEvent_t& event = events_[static_cast<size_t>(index)];
    if (const cudaError_t e = cudaEventCreate(&event); e != cudaSuccess) return e;
    return cudaEventRecord(event, stream);
  }
  // The median of the spans between two neighbours, in seconds.
  double Median() const {
    std::vector<float> spans;
    for (size_t i = 1; i < events_.size(); ++i) {
      float ms = 0;
      if (cudaEventElapsedTime(&ms, events_[i - 1], events_[i]) != cudaSuccess) return 0;
      spans.push_back(ms);
    }
    std::nth_element(spans.begin(), spans.begin() + spans.size() / 2, spans.end());
    return spans[spans.size() / 2] * 1e-3;
  }

 private:
  std::vector<cudaEvent_t> events_;
};

// Rounds after `from`; all are enqueued at once, so that none is held up by this thread.
cudaError_t EnqueueRounds(const MailboxView& session, uint32_t from, int32_t rounds,
                          bool stream_waits, cudaStream_t stream, Events* events) {
  cudaError_t error = events->Record(0, stream);
  for (int32_t i = 0; i < rounds && error == cudaSuccess; ++i) {
    const uint32_t round = from + static_cast<uint32_t>(i) + 1;
    error = Launch(ProbeKernel, {session, round, round, !stream_waits}, 1, 1, stream, false);
    if (error != cudaSuccess) return error;
    if (stream_waits) {
      const uint32_t* answered =
          reinterpret_cast<const uint32_t*>(session.mailbox + session.layout.host_sleeps);
      error = cuda::EnqueueWaitAtLeast(answered, round, stream);
      if (error != cudaSuccess) return error;
    }
    error = events->Record(i + 1, stream);
  }
  return error;
}

cudaError_t AwaitStream(cudaStream_t stream, std::chrono::steady_clock::time_point until) {
  while (true) {
    const cudaError_t state = cudaStreamQuery(stream);
    if (state != cudaErrorNotReady) return state;
    if (std::chrono::steady_clock::now() >= until) return cudaErrorTimeout;
    std::this_thread::sleep_for(kProbeNap);
  }
}

}  // namespace

cudaError_t TimeRoundTrips(const MailboxView& session, int32_t rounds,
                           std::chrono::steady_clock::time_point until, cudaStream_t stream,
                           RoundTrips* out) {
  for (const bool stream_waits : {true, false}) {
    Events events(rounds + 1);
    const auto from = static_cast<uint32_t>(stream_waits ? 0 : rounds);
    const cudaError_t enqueued =
        EnqueueRounds(session, from, rounds, stream_waits, stream, &events);
    if (enqueued == cudaErrorNotSupported && stream_waits) {
      // The service waits for these rounds, too, if it can.
      const ProbeArgs skip{session, 1, from + static_cast<uint32_t>(rounds), false};
      if (const cudaError_t e = Launch(ProbeKernel, skip, 1, 1, stream, false); e != cudaSuccess) {
        return e;
      }
      continue;
    }
    if (enqueued != cudaSuccess) return enqueued;
    if (const cudaError_t e = AwaitStream(stream, until); e != cudaSuccess) return e;
    (stream_waits ? out->memory_ops : out->spinning) = events.Median();
  }
  return cudaSuccess;
}

cudaError_t LoadSessionKernels() {
  const void* kernels[] = {reinterpret_cast<const void*>(&HandOverKernel<HandOverArgs>),
                           reinterpret_cast<const void*>(&HandOverKernel<ExtendedHandOver>),
                           reinterpret_cast<const void*>(&AwaitKernel<AwaitArgs>),
                           reinterpret_cast<const void*>(&AwaitKernel<ExtendedAwait>),
                           reinterpret_cast<const void*>(&ProbeKernel),
                           reinterpret_cast<const void*>(&TakeBackKernel<true, TakeBackArgs>),
                           reinterpret_cast<const void*>(&TakeBackKernel<false, TakeBackArgs>),
                           reinterpret_cast<const void*>(&TakeBackKernel<true, ExtendedTakeBack>),
                           reinterpret_cast<const void*>(&TakeBackKernel<false, ExtendedTakeBack>)};
  for (const void* kernel : kernels) {
    cudaFuncAttributes attributes;
    const cudaError_t error = cudaFuncGetAttributes(&attributes, kernel);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace tributary::client
