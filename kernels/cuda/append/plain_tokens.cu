#include <algorithm>
#include <string>
#include <type_traits>

#include "kernels/cuda/append/load_dims.cuh"
#include "kernels/cuda/append/nvfp4_plain.cuh"
#include "kernels/cuda/append/plain_tokens.h"
#include "kernels/cuda/dispatch.h"
#include "kernels/cuda/layout/plane_address.cuh"
#include "kernels/cuda/ptx/encode.cuh"
#include "kernels/cuda/status.h"
#include "kernels/params.h"

namespace tributary::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarpSize = 32;
constexpr int kWordBytes = sizeof(uint2);
// Words that a thread of a run has in flight: with all threads, more than the bus has.
constexpr int kWordsInFlight = 4;
// At most. An append has few bytes, and the bus takes them slowly.
constexpr int64_t kAppendBlocks = 32;
constexpr int64_t kRunBlocks = 128;

// A thread takes 8 dimensions of a head's key or value.
template <DType kKv>
__global__ void __launch_bounds__(kThreads)
    AppendPlainKernel(const __grid_constant__ AppendArgs args, const PlainPages to) {
  const KvGeometry& g = args.geometry;
  const int of_key = g.key_dim / kTokenDims;
  const int of_head = of_key + g.value_dim / kTokenDims;
  const int of_token = of_head * g.kv_heads;
  const int64_t units = int64_t{args.tokens} * of_token;
  for (int64_t unit = int64_t{blockIdx.x} * kThreads + threadIdx.x; unit < units;
       unit += int64_t{gridDim.x} * kThreads) {
    const auto token = static_cast<int>(unit / of_token);
    const int64_t slot = __ldg(args.slots + token);
    if (slot < 0) continue;
    const auto in_token = static_cast<int>(unit % of_token);
    const int head = in_token / of_head;
    const int in_head = in_token % of_head;
    const bool key = in_head < of_key;
    const int dim = key ? g.key_dim : g.value_dim;
    const int d = (key ? in_head : in_head - of_key) * kTokenDims;
    float x[kTokenDims];
    LoadDims(args.input_dtype, key ? args.k : args.v, (size_t(token) * g.kv_heads + head) * dim + d,
             x);
    Unscale(key ? args.k_scale : args.v_scale, head, x);
    constexpr int kWords = kTokenDims * int(SizeOf(kKv)) / 4;
    uint32_t words[kWords];
    EncodeWords<kKv>(x, words);
    std::byte* at = to.base + size_t(slot >> (__ffs(args.page_size) - 1)) * to.page_bytes +
                    (size_t(slot) & (args.page_size - 1)) * PlainTokenBytes(g) +
                    size_t(in_token) * kTokenDims * SizeOf(kKv);
    if constexpr (kWords == 2) {
      *reinterpret_cast<uint2*>(at) = make_uint2(words[0], words[1]);
    } else {
      *reinterpret_cast<uint4*>(at) = make_uint4(words[0], words[1], words[2], words[3]);
    }
  }
}

// A token of a layer in 8-byte words: those of each head's key, with its padding, then its value.
template <DType kKv>
struct TokenWords {
  static constexpr int kElements = kWordBytes / int(SizeOf(kKv));

  const KvGeometry& geometry;

  __device__ int of_key() const {
    return KeyStride(geometry.key_dim, int(SizeOf(kKv))) / kWordBytes;
  }
  __device__ int of_head() const { return of_key() + geometry.value_dim / kElements; }
  __device__ int count() const { return of_head() * geometry.kv_heads; }
};

// One word of a token, in its page and in plain order.
template <DType kKv>
struct TokenWord {
  using Element = std::conditional_t<SizeOf(kKv) == 1, uint8_t, uint16_t>;
  static constexpr int kElements = TokenWords<kKv>::kElements;

  PlaneAddress<kKv> address;
  int64_t slot;
  int d;  // its first dimension
  bool key;
  bool padding;     // behind the last dimension: in the page alone
  size_t in_plain;  // bytes from the token's begin

  __device__ TokenWord(const AppendArgs& page, int64_t at, const TokenWords<kKv>& words, int word)
      : address{page, word / words.of_head()}, slot(at) {
    const KvGeometry& g = words.geometry;
    const int in_head = word % words.of_head();
    key = in_head < words.of_key();
    d = (key ? in_head : in_head - words.of_key()) * kElements;
    padding = key && d >= g.key_dim;
    in_plain = (size_t(address.head) * (g.key_dim + g.value_dim) + (key ? d : g.key_dim + d)) *
               SizeOf(kKv);
  }

  // Eight bytes of a key lie side by side everywhere in a page, those of a value do not.
  __device__ uint2 FromPage() const {
    if (key) return *reinterpret_cast<const uint2*>(address.Key(slot, d));
    union {
      Element elements[kElements];
      uint2 word;
    } value;
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      value.elements[i] = *reinterpret_cast<const Element*>(address.Value(slot, d + i));
    }
    return value.word;
  }
  __device__ void ToPage(uint2 word) const {
    if (key) {
      *reinterpret_cast<uint2*>(address.Key(slot, d)) = word;
      return;
    }
    const uint32_t halves[2] = {word.x, word.y};
    constexpr int kOfHalf = kElements / 2;
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      *reinterpret_cast<Element*>(address.Value(slot, d + i)) =
          static_cast<Element>(halves[i / kOfHalf] >> (i % kOfHalf * 8 * int(SizeOf(kKv))));
    }
  }
};

// A warp takes a token of a layer at a time.
template <DType kKv, bool kToPages>
__global__ void __launch_bounds__(kThreads)
    MoveRunsKernel(const __grid_constant__ PlainRunsArgs args) {
  const TokenWords<kKv> words{args.geometry};
  const int count = words.count();
  const size_t token_bytes = PlainTokenBytes(args.geometry);
  const int64_t tokens = int64_t{args.runs} * args.layers * args.slots;
  const int lane = threadIdx.x % kWarpSize;
  AppendArgs page;
  page.geometry = args.geometry;
  page.page_size = args.page_size;
  for (int64_t token = (int64_t{blockIdx.x} * kThreads + threadIdx.x) / kWarpSize; token < tokens;
       token += int64_t{gridDim.x} * kThreads / kWarpSize) {
    const auto run = static_cast<int>(token / (args.layers * args.slots));
    const auto in_run = static_cast<int>(token % (args.layers * args.slots));
    page.cache = args.cache + size_t(in_run / args.slots) * args.layer_bytes;
    const int64_t slot = __ldg(args.first + run) + in_run % args.slots;
    std::byte* plain = args.plain + size_t(run) * args.run_bytes + size_t(in_run) * token_bytes;
    for (int begin = lane; begin < count; begin += kWarpSize * kWordsInFlight) {
      uint2 held[kWordsInFlight];
#pragma unroll
      for (int i = 0; i < kWordsInFlight; ++i) {
        const int at = begin + i * kWarpSize;
        if (at >= count) continue;
        const TokenWord<kKv> word(page, slot, words, at);
        held[i] = make_uint2(0, 0);
        if (word.padding) continue;
        held[i] = kToPages ? __ldcs(reinterpret_cast<const uint2*>(plain + word.in_plain))
                           : word.FromPage();
      }
#pragma unroll
      for (int i = 0; i < kWordsInFlight; ++i) {
        const int at = begin + i * kWarpSize;
        if (at >= count) continue;
        const TokenWord<kKv> word(page, slot, words, at);
        if constexpr (kToPages) {
          word.ToPage(held[i]);
        } else {
          if (!word.padding) *reinterpret_cast<uint2*>(plain + word.in_plain) = held[i];
        }
      }
    }
  }
}

// The type of elements that stands for all of its size.
template <bool kToPages>
Status LaunchMoveRuns(const PlainRunsArgs& args, cudaStream_t stream) {
  const KvGeometry& g = args.geometry;
  if (args.runs < 0 || args.slots < 1 || args.layers < 0 || args.page_size % args.slots != 0) {
    return InvalidArgument("runs: " + std::to_string(args.runs) + " of " +
                           std::to_string(args.slots) + " slots in " + std::to_string(args.layers) +
                           " layers of pages of " + std::to_string(args.page_size));
  }
  const int64_t tokens = int64_t{args.runs} * args.layers * args.slots;
  if (tokens == 0) return Status::Ok();
  const int64_t blocks = std::min((tokens * kWarpSize + kThreads - 1) / kThreads, kRunBlocks);
  return DispatchKvType(g.dtype, [&](auto kv) {
    return DispatchHeadDims<&HeadDims::append>(g.key_dim, g.value_dim, [&](auto, auto) {
      const auto grid = static_cast<unsigned>(blocks);
      if constexpr (kv() == DType::kNvfp4) {
        MoveNvfp4RunsKernel<kThreads, kToPages><<<grid, kThreads, 0, stream>>>(args);
      } else {
        constexpr DType kSame = SizeOf(kv()) == 1 ? DType::kFp8E4M3 : DType::kBf16;
        MoveRunsKernel<kSame, kToPages><<<grid, kThreads, 0, stream>>>(args);
      }
      return CudaStatus(cudaGetLastError(), "plain runs kernel");
    });
  });
}

}  // namespace

Status LaunchAppendPlain(const AppendArgs& args, const PlainPages& to, cudaStream_t stream) {
  if (!IsUnscaled(args.input_dtype)) {
    return Unsupported(std::string("input_dtype: ") + Name(args.input_dtype) +
                       " is not f32, bf16 or f16");
  }
  if (args.tokens < 0) return InvalidArgument("tokens: must not be negative");
  if (args.tokens == 0) return Status::Ok();
  const KvGeometry& g = args.geometry;
  const int64_t units = args.tokens * ElementsPerToken(g) / kTokenDims;
  const int64_t blocks = std::min((units + kThreads - 1) / kThreads, kAppendBlocks);
  return DispatchKvType(g.dtype, [&](auto kv) {
    return DispatchHeadDims<&HeadDims::append>(g.key_dim, g.value_dim, [&](auto, auto) {
      const auto grid = static_cast<unsigned>(blocks);
      if constexpr (kv() == DType::kNvfp4) {
        AppendNvfp4PlainKernel<kThreads><<<grid, kThreads, 0, stream>>>(args, to);
      } else {
        AppendPlainKernel<kv()><<<grid, kThreads, 0, stream>>>(args, to);
      }
      return CudaStatus(cudaGetLastError(), "append_plain kernel");
    });
  });
}

Status LaunchReadRuns(const PlainRunsArgs& args, cudaStream_t stream) {
  return LaunchMoveRuns<false>(args, stream);
}

Status LaunchWriteRuns(const PlainRunsArgs& args, cudaStream_t stream) {
  return LaunchMoveRuns<true>(args, stream);
}

}  // namespace tributary::cuda
