#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <cstddef>
#include <thread>
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

// By one thread: whether the first `count` layers of the session are finished.
__device__ bool AwaitFinished(const MailboxView& session, const HostCounter& counter,
                              uint32_t count) {
  if (counter.failure != 0) return false;
  const uint32_t* status = WordOf(session, session.layout.status);
  // The stream has waited for the layer already, or waiting is of no use.
  const uint64_t bound = session.stream_waits ? 0 : session.bound;
  const mailbox::Awaited awaited = mailbox::Await(WordOf(session, session.layout.finished), count,
                                                  status, bound, session.one_gpu);
  if (awaited == mailbox::Awaited::kReached) return true;
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

struct HandOverArgs {
  MailboxView session;
  StridedTensor tensors[3];  // q, k, v
  size_t offsets[3];         // in the slot
  uint32_t vectors[3];       // of 16 bytes
  bool no_result = false;
};

__device__ __forceinline__ const uint4* VectorOf(const StridedTensor& tensor, uint32_t index) {
  const uint32_t per_head = static_cast<uint32_t>(tensor.head_bytes) / 16;
  const uint32_t head = index / per_head;
  const uint32_t row = head / static_cast<uint32_t>(tensor.heads);
  const int64_t at = row * tensor.row_stride +
                     (head - row * static_cast<uint32_t>(tensor.heads)) * tensor.head_stride +
                     (index - head * per_head) * 16;
  return reinterpret_cast<const uint4*>(tensor.data + at);
}

__global__ void __launch_bounds__(kThreads)
    HandOverKernel(const __grid_constant__ HandOverArgs args) {
  WaitForLaunchesAhead();
  LetNextLaunchBegin();
  const MailboxView& session = args.session;
  const HostCounter counter = CounterOf(session);
  const uint32_t count = counter.count;
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
    offsets[i] = args.offsets[t] + static_cast<size_t>(index) * 16;
  }
  // Slots come free in the order of layers, mostly long before.
  const auto slots = static_cast<uint32_t>(session.layout.slots);
  __shared__ bool free;
  if (threadIdx.x == 0) {
    // What was taken back is finished.
    free = counter.failure == 0 &&
           (counter.unfinished < slots || AwaitFinished(session, counter, count + 1 - slots));
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
  if (threadIdx.x != 0 || !LastBlock(session)) return;
  if (free) {
    // A layer that was not handed over does not come back.
    if (session.stream_waits) atomicCAS_system(WordOf(session, session.layout.handed_back), 1u, 0u);
    mailbox::Ring(WordOf(session, session.layout.arrived), count + 1,
                  session.one_gpu && !session.several_gpus);
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

struct TakeBackArgs {
  MailboxView session;
  ResultTarget target;
};

// What a launch of one warp waits for, ahead of one of many blocks.
struct AwaitArgs {
  MailboxView session;
  bool slot = false;  // that the layer's slot is free; or else its result
};

__global__ void __launch_bounds__(32) AwaitKernel(const __grid_constant__ AwaitArgs args) {
  WaitForLaunchesAhead();
  const MailboxView& session = args.session;
  const HostCounter counter = CounterOf(session);
  const auto slots = static_cast<uint32_t>(session.layout.slots);
  const bool free = args.slot && counter.unfinished < slots;  // what was taken back is finished
  if (threadIdx.x == 0 && !free) {
    AwaitFinished(session, counter, counter.count + 1 - (args.slot ? slots : 0));
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

__device__ __forceinline__ void CopyVector(const ResultTarget& target, const float* from,
                                           int64_t vector, bool good) {
  const int per_head = target.value_dim / kElements;
  const int64_t head = vector / per_head;
  const int64_t at = head / target.heads * target.row_stride +
                     head % target.heads * target.head_stride + vector % per_head * kElements;
  float4 x[2];
  const auto* source = reinterpret_cast<const float4*>(from + vector * kElements);
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

template <bool kWaits>
__global__ void __launch_bounds__(kThreads)
    TakeBackKernel(const __grid_constant__ TakeBackArgs args) {
  WaitForLaunchesAhead();
  const MailboxView& session = args.session;
  const ResultTarget& target = args.target;
  const HostCounter counter = CounterOf(session);
  const uint32_t count = counter.count;
  __shared__ bool good;
  if (threadIdx.x == 0) {
    good = kWaits ? AwaitFinished(session, counter, count + 1) : counter.failure == 0;
  }
  __syncthreads();
  LetNextLaunchBegin();
  const std::byte* slot = session.mailbox + session.layout.SlotOf(count);
  const auto* o = reinterpret_cast<const float*>(slot + session.layout.output);
  const auto* lse = reinterpret_cast<const float*>(slot + session.layout.lse);
  const int64_t row_heads = int64_t{target.rows} * target.heads;
  const int64_t step = int64_t{gridDim.x} * blockDim.x;
  const int64_t first = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (target.output != nullptr) {
    for (int64_t i = first; i < row_heads * target.value_dim / kElements; i += step) {
      CopyVector(target, o, i, good);
    }
  }
  if (target.lse != nullptr) {
    for (int64_t i = first; i < row_heads; i += step) {
      target.lse[i] = good ? lse[i] : __int_as_float(0x7fffffff);
    }
  }
  __syncthreads();
  if (threadIdx.x != 0 || !LastBlock(session)) return;
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

cudaError_t LaunchHandOver(const MailboxView& session, const StridedTensor& q,
                           const StridedTensor& k, const StridedTensor& v, bool no_result,
                           cudaStream_t stream) {
  const HandOverArgs args{.session = session,
                          .tensors = {q, k, v},
                          .offsets = {session.layout.q, session.layout.k, session.layout.v},
                          .vectors = {VectorsOf(q), VectorsOf(k), VectorsOf(v)},
                          .no_result = no_result};
  const uint32_t vectors = args.vectors[0] + args.vectors[1] + args.vectors[2];
  constexpr uint32_t kOfBlock = kThreads * kVectors;
  const uint32_t blocks = std::max(1u, (vectors + kOfBlock - 1) / kOfBlock);
  if (no_result || blocks > kMostHandOverBlocks) {
    const AwaitArgs slot{.session = session, .slot = true};
    if (const cudaError_t e = Launch(AwaitKernel, slot, 1, 32, stream); e != cudaSuccess) return e;
  }
  return Launch(HandOverKernel, args, blocks, kThreads, stream);
}

cudaError_t LaunchTakeBack(const MailboxView& session, const ResultTarget& target,
                           cudaStream_t stream) {
  const TakeBackArgs args{session, target};
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
    return Launch(TakeBackKernel<true>, args, blocks, kCopyThreads, stream, false);
  }
  if (fused <= kMostWaitingBlocks) {
    return Launch(TakeBackKernel<true>, args, std::max<int64_t>(fused, 1), kThreads, stream);
  }
  const cudaError_t awaited = Launch(AwaitKernel, AwaitArgs{.session = session}, 1, 32, stream);
  if (awaited != cudaSuccess) return awaited;
  const int64_t blocks = std::min<int64_t>((vectors + kCopyThreads - 1) / kCopyThreads, 1024);
  return Launch(TakeBackKernel<false>, args, blocks, kCopyThreads, stream);
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
  const void* kernels[] = {reinterpret_cast<const void*>(&HandOverKernel),
                           reinterpret_cast<const void*>(&AwaitKernel),
                           reinterpret_cast<const void*>(&ProbeKernel),
                           reinterpret_cast<const void*>(&TakeBackKernel<true>),
                           reinterpret_cast<const void*>(&TakeBackKernel<false>)};
  for (const void* kernel : kernels) {
    cudaFuncAttributes attributes;
    const cudaError_t error = cudaFuncGetAttributes(&attributes, kernel);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace tributary::client
