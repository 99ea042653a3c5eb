#include <cuda_fp16.h>

#include <algorithm>
#include <string>

#include "kernels/cuda/block_attention.h"
#include "kernels/cuda/cluster.cuh"
#include "kernels/cuda/columns.cuh"
#include "kernels/cuda/dispatch.h"
#include "kernels/cuda/grid.h"
#include "kernels/cuda/ptx.cuh"
#include "kernels/lse.h"

namespace tributary::cuda {
namespace {

constexpr int kWarps = 4;
constexpr int kThreads = 32 * kWarps;
// Columns are rows times query heads of a kv head, as in attention over the context. A warp takes
// 16 of them and 16 keys at a time, by mma.sync: columns in M, keys in N.
constexpr int kWarpColumns = 16;
constexpr int kKeys = 16;

__device__ __forceinline__ float Widened(DType type, const void* data, size_t element) {
  if (type == DType::kF32) return __ldg(static_cast<const float*>(data) + element);
  const uint16_t bits = __ldg(static_cast<const uint16_t*>(data) + element);
  return type == DType::kBf16 ? __uint_as_float(uint32_t{bits} << 16)
                              : __half2float(__ushort_as_half(bits));
}

// Eight elements of a row in the type of the products; zeros when it is nobody's row.
template <DType kCompute>
__device__ __forceinline__ uint4 LoadEight(const void* data, DType type, size_t element,
                                           bool alive) {
  if (!alive) return make_uint4(0, 0, 0, 0);
  if (type == kCompute) {
    return __ldg(reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(data) + element));
  }
  float x[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) x[i] = Widened(type, data, element + i);
  return make_uint4(Pack<kCompute>(x[0], x[1]), Pack<kCompute>(x[2], x[3]),
                    Pack<kCompute>(x[4], x[5]), Pack<kCompute>(x[6], x[7]));
}

// Two elements, likewise.
template <DType kCompute>
__device__ __forceinline__ uint32_t LoadTwo(const void* data, DType type, size_t element,
                                            bool alive) {
  if (!alive) return 0;
  if (type == kCompute) {
    return __ldg(reinterpret_cast<const uint32_t*>(static_cast<const uint16_t*>(data) + element));
  }
  return Pack<kCompute>(Widened(type, data, element), Widened(type, data, element + 1));
}

// A thread's two columns: 8 apart, and shared with the three other lanes of its quad.
struct Column {
  bool alive = false;
  size_t pair = 0;  // row * q_heads + head
  int head = 0;
  RowKeys keys;
};

// What a warp has of its columns. The order of the contraction index is free as long as both
// operands agree, so a thread's share of a row is whole vectors of 8 dimensions; so is the order of
// dimensions of the output, and a thread's are 4 neighbours of every 16.
template <DType kCompute, int kHeadDim>
class WarpBlock {
 public:
  __device__ __forceinline__ WarpBlock(const BlockArgs& args, const BlockEntry& entry, int kv_head,
                                       int first_column)
      : args_(args), entry_(entry), kv_head_(kv_head) {
    const int group = args.q_heads / args.kv_heads;
    const int first_head = max(kv_head * group, args.head_begin);
    const int heads = min((kv_head + 1) * group, args.head_begin + args.head_count) - first_head;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int column = first_column + Quad() + 8 * i;
      Column& c = columns_[i];
      c.alive = column < entry.row_count * heads;
      if (!c.alive) continue;
      const int row = entry.row_begin + column / heads;
      c.head = first_head + column % heads;
      c.pair = size_t(row) * args.q_heads + c.head;
      c.keys = args.keys[row];
    }
  }

  __device__ __forceinline__ void LoadQueries() {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        q_[step][i] = LoadEight<kCompute>(args_.q, args_.q_dtype,
                                          columns_[i].pair * kHeadDim + step * 32 + Place() * 8,
                                          columns_[i].alive);
      }
    }
  }

  // All tiles of keys that some column sees.
  __device__ __forceinline__ void Attend() {
    int begin = entry_.token_count;
    int end = 0;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (columns_[i].keys.begin >= columns_[i].keys.end) continue;
      begin = min(begin, columns_[i].keys.begin);
      end = max(end, columns_[i].keys.end);
    }
    begin = __reduce_min_sync(0xffffffffu, begin) / kKeys * kKeys;
    end = __reduce_max_sync(0xffffffffu, end);
    for (int key = begin; key < end; key += kKeys) AttendTile(key);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      sum_[i] += __shfl_xor_sync(0xffffffffu, sum_[i], 1);
      sum_[i] += __shfl_xor_sync(0xffffffffu, sum_[i], 2);
    }
  }

  __device__ __forceinline__ void MergeInPlace() const {
    MergeColumn<0>();
    MergeColumn<1>();
  }

 private:
  static constexpr int kSteps = kHeadDim / 32;    // two products of 16 dimensions each
  static constexpr int kVectors = kHeadDim / 16;  // two tiles of 8 dimensions each

  static __device__ __forceinline__ int Quad() { return threadIdx.x % 32 / 4; }
  static __device__ __forceinline__ int Place() { return threadIdx.x % 4; }

  __device__ __forceinline__ size_t TokenElement(int key) const {
    return (size_t(entry_.token_begin + key) * args_.kv_heads + kv_head_) * kHeadDim;
  }

  __device__ __forceinline__ void AttendTile(int first_key) {
    // Asked for before the products, used after them.
    uint32_t v[kVectors][4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int key = first_key + Place() * 2 + i % 2 + i / 2 * 8;
#pragma unroll
      for (int vector = 0; vector < kVectors; ++vector) {
        v[vector][i] =
            LoadTwo<kCompute>(args_.v, args_.kv_dtype, TokenElement(key) + vector * 16 + Quad() * 2,
                              key < entry_.token_count);
      }
    }
    float s[2][4] = {};
    MultiplyKeys(first_key, s);
    uint32_t p[4];
    Weigh(first_key, s, p);
#pragma unroll
    for (int vector = 0; vector < kVectors; ++vector) {
      const uint32_t(&x)[4] = v[vector];
      Mma16x8x16<kCompute>(o_[vector][0], p, __byte_perm(x[0], x[1], 0x5410),
                           __byte_perm(x[2], x[3], 0x5410));
      Mma16x8x16<kCompute>(o_[vector][1], p, __byte_perm(x[0], x[1], 0x7632),
                           __byte_perm(x[2], x[3], 0x7632));
    }
  }

  __device__ __forceinline__ void MultiplyKeys(int first_key, float (&s)[2][4]) const {
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
      const int key = first_key + tile * 8 + Quad();
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        const uint4 k = LoadEight<kCompute>(args_.k, args_.kv_dtype,
                                            TokenElement(key) + step * 32 + Place() * 8,
                                            key < entry_.token_count);
        const uint4(&q)[2] = q_[step];
        const uint32_t low[4] = {q[0].x, q[1].x, q[0].y, q[1].y};
        const uint32_t high[4] = {q[0].z, q[1].z, q[0].w, q[1].w};
        Mma16x8x16<kCompute>(s[tile], low, k.x, k.y);
        Mma16x8x16<kCompute>(s[tile], high, k.z, k.w);
      }
    }
  }

  // From raw products to weights, as operand A of the second product; what was weighed before
  // follows the maximum.
  __device__ __forceinline__ void Weigh(int first_key, float (&s)[2][4], uint32_t (&p)[4]) {
    const float scale =
        args_.soft_cap > 0.0f ? args_.sm_scale / args_.soft_cap : args_.sm_scale * kLog2E;
    float largest[2] = {largest_[0], largest_[1]};
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
#pragma unroll
      for (int i = 0; i < 4; ++i) s[tile][i] *= scale;
      if (args_.soft_cap > 0.0f) CapLogits(args_.soft_cap, s[tile]);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int key = first_key + tile * 8 + Place() * 2 + i % 2;
        const RowKeys& seen = columns_[i / 2].keys;
        if (key < seen.begin || key >= seen.end) s[tile][i] = EmptyLse<float>();
        largest[i / 2] = fmaxf(largest[i / 2], s[tile][i]);
      }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      largest[i] = fmaxf(largest[i], __shfl_xor_sync(0xffffffffu, largest[i], 1));
      largest[i] = fmaxf(largest[i], __shfl_xor_sync(0xffffffffu, largest[i], 2));
      const float factor = Exp2(largest_[i] - largest[i]);
      largest_[i] = largest[i];
      sum_[i] *= factor;
#pragma unroll
      for (int vector = 0; vector < kVectors; ++vector) {
#pragma unroll
        for (int tile = 0; tile < 2; ++tile) {
          o_[vector][tile][2 * i] *= factor;
          o_[vector][tile][2 * i + 1] *= factor;
        }
      }
    }
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        s[tile][i] = Exp2(s[tile][i] - largest[i / 2]);
        sum_[i / 2] += s[tile][i];
      }
    }
    p[0] = Pack<kCompute>(s[0][0], s[0][1]);
    p[1] = Pack<kCompute>(s[0][2], s[0][3]);
    p[2] = Pack<kCompute>(s[1][0], s[1][1]);
    p[3] = Pack<kCompute>(s[1][2], s[1][3]);
  }

  template <int kColumn>
  __device__ __forceinline__ void MergeColumn() const {
    const Column& c = columns_[kColumn];
    float* const lse_at = args_.lse + c.pair;
    const float context = c.alive ? *lse_at : EmptyLse<float>();
    __syncwarp();  // the quad has read what one of it is about to write
    if (!c.alive) return;
    const float sum = sum_[kColumn];
    const float block = sum == 0.0f ? EmptyLse<float>() : largest_[kColumn] * kLn2 + logf(sum);
    const MergeWeights<float> weights = Merge(context, block);
    float of_context = weights.a;
    float of_block = sum == 0.0f ? 0.0f : weights.b / sum;
    if (args_.sinks != nullptr && weights.lse != EmptyLse<float>()) {
      const float scale = SinkScale(weights.lse, args_.sinks[c.head - args_.head_begin]);
      of_context *= scale;
      of_block *= scale;
    }
    float* const o_at = args_.o + c.pair * kHeadDim + Place() * 4;
#pragma unroll
    for (int vector = 0; vector < kVectors; ++vector) {
      auto* const at = reinterpret_cast<float4*>(o_at + vector * 16);
      const auto& x = o_[vector];
      float4 merged =
          make_float4(of_block * x[0][2 * kColumn], of_block * x[1][2 * kColumn],
                      of_block * x[0][2 * kColumn + 1], of_block * x[1][2 * kColumn + 1]);
      // A partial without keys is left out altogether: nothing is asked of its output.
      if (of_context != 0.0f) {
        const float4 o = *at;
        merged.x = fmaf(of_context, o.x, merged.x);
        merged.y = fmaf(of_context, o.y, merged.y);
        merged.z = fmaf(of_context, o.z, merged.z);
        merged.w = fmaf(of_context, o.w, merged.w);
      }
      *at = merged;
    }
    if (Place() == 0) *lse_at = weights.lse;
  }

  const BlockArgs& args_;
  const BlockEntry& entry_;
  const int kv_head_;
  Column columns_[2];
  uint4 q_[kSteps][2];
  float o_[kVectors][2][4] = {};
  float largest_[2] = {kNoReference, kNoReference};
  float sum_[2] = {};
};

template <DType kCompute, int kHeadDim>
__global__ void __launch_bounds__(kThreads) BlockKernel(const __grid_constant__ BlockArgs args) {
  LetNextLaunchBegin();
  if (!args.begins_early) WaitForLaunchesAhead();
  const BlockEntry entry = args.entries[blockIdx.z];
  const int kv_head =
      args.head_begin / (args.q_heads / args.kv_heads) + static_cast<int>(blockIdx.y);
  const int first_column =
      (static_cast<int>(blockIdx.x) * kWarps + static_cast<int>(threadIdx.x) / 32) * kWarpColumns;
  WarpBlock<kCompute, kHeadDim> block(args, entry, kv_head, first_column);
  block.LoadQueries();
  block.Attend();
  if (args.begins_early) WaitForLaunchesAhead();
  block.MergeInPlace();
}

template <DType kCompute>
Status Launch(const BlockArgs& args, cudaStream_t stream) {
  const int group = args.q_heads / args.kv_heads;
  const int first = args.head_begin / group;
  const int last = (args.head_begin + args.head_count - 1) / group;
  constexpr int kBlockColumns = kWarps * kWarpColumns;
  // A slice may hold a few heads of a group only; then some of the columns are nobody's.
  const int columns = args.most_rows * std::min(group, args.head_count);
  cudaLaunchAttribute early;
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim =
      dim3(static_cast<unsigned>((columns + kBlockColumns - 1) / kBlockColumns),
           static_cast<unsigned>(last - first + 1), static_cast<unsigned>(args.entry_count));
  config.blockDim = dim3(kThreads);
  config.stream = stream;
  config.attrs = &early;
  config.numAttrs = args.begins_early ? 1 : 0;
  return DispatchHeadDim(args.head_dim, [&](auto head_dim) {
    const cudaError_t error = cudaLaunchKernelEx(&config, BlockKernel<kCompute, head_dim()>, args);
    if (error == cudaSuccess) return Status::Ok();
    return Status(StatusCode::kInternal,
                  std::string("block attention kernel: ") + cudaGetErrorString(error));
  });
}

}  // namespace

Status LaunchBlockAttention(const BlockArgs& args, cudaStream_t stream) {
  if (IsFp8(args.q_dtype)) return InvalidArgument("q_dtype: must be f32, bf16 or f16");
  if (IsFp8(args.kv_dtype)) return InvalidArgument("kv_dtype: must be f32, bf16 or f16");
  if (args.kv_heads < 1 || args.q_heads % args.kv_heads != 0) {
    return InvalidArgument("q_heads: must be a multiple of kv_heads");
  }
  if (args.head_begin < 0 || args.head_count < 0 ||
      args.head_begin + args.head_count > args.q_heads) {
    return InvalidArgument("head_count: the heads to compute are not among q_heads");
  }
  if (args.entry_count < 0 || args.entry_count > 65535) {
    return InvalidArgument("entry_count: must be 0..65535");
  }
  if (args.entry_count == 0 || args.most_rows == 0 || args.head_count == 0) return Status::Ok();
  if (args.kv_dtype == DType::kF16) return Launch<DType::kF16>(args, stream);
  return Launch<DType::kBf16>(args, stream);
}

}  // namespace tributary::cuda
