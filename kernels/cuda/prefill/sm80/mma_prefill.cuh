// Prefill by mma.sync, for sm_80 and later.
//
// A block has 128 query rows of one head (64 with head dim 256) in shared memory, 32 (16) a warp:
// what is read of a tile of keys or values serves two products. Tiles stream through two stages of
// shared memory; S = Q K^T, its weights and O += P V stay in registers, after FlashAttention-2
// (arXiv:2307.08691).
#pragma once

#include "kernels/cuda/prefill/prefill_rows.cuh"
#include "kernels/cuda/prefill/sm80/mma_prefill.h"

namespace tributary::cuda {

template <DType kComputeType, int kHeadDimension>
struct MmaPrefillTraits {
  static constexpr DType kCompute = kComputeType;
  static constexpr int kHeadDim = kHeadDimension;
  static constexpr int kRows = MmaPrefillRows(kHeadDim);
  static constexpr int kWarps = 4;
  static constexpr int kTiles = kRows / (16 * kWarps);  // of 16 rows, of a warp
  static constexpr int kKeys = MmaPrefillKeys(kHeadDim);
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kRowBytes = kHeadDim * 2;
  static constexpr int kChunks = kRowBytes / 16;
  static constexpr int kStages = 2;

  struct Stage {
    std::byte k[kKeys * kRowBytes];
    std::byte v[kKeys * kRowBytes];
  };
  struct Shared {
    alignas(128) std::byte q[kRows * kRowBytes];
    Stage stages[kStages];
  };
};

// Copies 16 bytes, or clears them.
__device__ __forceinline__ void CopyOrClear16(uint32_t shared, const void* global, bool copy) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global),
               "r"(copy ? 16 : 0)
               : "memory");
}
__device__ __forceinline__ void CommitCopies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
// Waits for all but the last kPending groups of copies.
template <int kPending>
__device__ __forceinline__ void WaitForCopyGroups() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// Where chunk `chunk` of a row is, from the tile's begin: neighbouring rows use different banks.
template <typename Traits>
__device__ __forceinline__ uint32_t ChunkOffset(int row, int chunk) {
  return row * Traits::kRowBytes + ((chunk ^ (row & 7)) << 4);
}

// Asks for `rows` rows of a head; those from `limit` on are cleared.
template <typename Traits>
__device__ __forceinline__ void CopyRows(std::byte* to, const void* from, size_t first_row,
                                         size_t row_stride, int rows, int limit) {
  const auto shared = static_cast<uint32_t>(__cvta_generic_to_shared(to));
  const auto* base = static_cast<const std::byte*>(from);
#pragma unroll 4
  for (int i = threadIdx.x; i < rows * Traits::kChunks; i += Traits::kThreads) {
    const int row = i / Traits::kChunks;
    const int chunk = i % Traits::kChunks;
    const bool copy = row < limit;
    CopyOrClear16(shared + ChunkOffset<Traits>(row, chunk),
                  base + (copy ? (first_row + row) * row_stride : 0) + chunk * 16, copy);
  }
}

// S = Q K^T of a warp's rows, of which the first is `row`.
template <typename Traits>
__device__ __forceinline__ void MultiplyKeys(const std::byte* q, int row, const std::byte* k,
                                             float (&s)[Traits::kTiles][Traits::kKeys / 2]) {
  const int lane = threadIdx.x % 32;
  const auto q_at = static_cast<uint32_t>(__cvta_generic_to_shared(q));
  const auto k_at = static_cast<uint32_t>(__cvta_generic_to_shared(k));
#pragma unroll
  for (int tile = 0; tile < Traits::kTiles; ++tile) {
#pragma unroll
    for (int i = 0; i < Traits::kKeys / 2; ++i) s[tile][i] = 0.0f;
  }
#pragma unroll
  for (int step = 0; step < Traits::kHeadDim / 16; ++step) {
    uint32_t a[Traits::kTiles][4];
#pragma unroll
    for (int tile = 0; tile < Traits::kTiles; ++tile) {
      LoadMatrices(q_at + ChunkOffset<Traits>(row + tile * 16 + lane % 16, step * 2 + lane / 16),
                   a[tile]);
    }
#pragma unroll
    for (int keys = 0; keys < Traits::kKeys; keys += 16) {
      uint32_t b[4];
      LoadMatrices(
          k_at + ChunkOffset<Traits>(keys + lane / 16 * 8 + lane % 8, step * 2 + lane / 8 % 2), b);
#pragma unroll
      for (int tile = 0; tile < Traits::kTiles; ++tile) {
        float* at = &s[tile][keys / 2];
        Mma16x8x16<Traits::kCompute>(reinterpret_cast<float(&)[4]>(at[0]), a[tile], b[0], b[1]);
        Mma16x8x16<Traits::kCompute>(reinterpret_cast<float(&)[4]>(at[4]), a[tile], b[2], b[3]);
      }
    }
  }
}

// O += P V.
template <typename Traits>
__device__ __forceinline__ void AddValues(const uint32_t (&p)[Traits::kTiles][Traits::kKeys / 4],
                                          const std::byte* v,
                                          float (&o)[Traits::kTiles][Traits::kHeadDim / 2]) {
  const int lane = threadIdx.x % 32;
  const auto v_at = static_cast<uint32_t>(__cvta_generic_to_shared(v));
#pragma unroll
  for (int keys = 0; keys < Traits::kKeys; keys += 16) {
#pragma unroll
    for (int dims = 0; dims < Traits::kHeadDim; dims += 16) {
      uint32_t b[4];
      LoadMatricesTransposed(v_at + ChunkOffset<Traits>(keys + lane % 16, dims / 8 + lane / 16), b);
#pragma unroll
      for (int tile = 0; tile < Traits::kTiles; ++tile) {
        const uint32_t a[4] = {p[tile][keys / 4], p[tile][keys / 4 + 1], p[tile][keys / 4 + 2],
                               p[tile][keys / 4 + 3]};
        float* at = &o[tile][dims / 2];
        Mma16x8x16<Traits::kCompute>(reinterpret_cast<float(&)[4]>(at[0]), a, b[0], b[1]);
        Mma16x8x16<Traits::kCompute>(reinterpret_cast<float(&)[4]>(at[4]), a, b[2], b[3]);
      }
    }
  }
}

template <typename Traits>
__global__ void __launch_bounds__(Traits::kThreads)
    MmaPrefillKernel(const __grid_constant__ PrefillKernelArgs args) {
  extern __shared__ __align__(128) std::byte shared_bytes[];
  auto& shared = *reinterpret_cast<typename Traits::Shared*>(shared_bytes);
  const int warp_row = threadIdx.x / 32 * 16 * Traits::kTiles;
  const int row = warp_row + threadIdx.x % 32 / 4;  // the thread's first
  const size_t kv_stride = size_t(args.kv_heads) * Traits::kRowBytes;
  for (int index = args.item_begin + blockIdx.x; index >= 0;) {
    const PrefillItem item = args.items[index];
    const int tiles = max(0, (item.key_end - item.key_begin + Traits::kKeys - 1) / Traits::kKeys);
    const int kv_head = args.KvHead(item.head);
    const auto copy_tile = [&](int tile) {
      typename Traits::Stage& stage = shared.stages[tile % Traits::kStages];
      const int first = item.key_begin + tile * Traits::kKeys;
      const auto head_of = [&](const void* x) {
        return static_cast<const std::byte*>(x) + kv_head * Traits::kRowBytes;
      };
      CopyRows<Traits>(stage.k, head_of(args.k), item.key_row + first, kv_stride, Traits::kKeys,
                       item.key_limit - first);
      CopyRows<Traits>(stage.v, head_of(args.v), item.key_row + first, kv_stride, Traits::kKeys,
                       item.key_limit - first);
    };
    RowSoftmax<Traits::kCompute, Traits::kKeys> softmax[Traits::kTiles];
    float o[Traits::kTiles][Traits::kHeadDim / 2];
#pragma unroll
    for (int i = 0; i < Traits::kTiles; ++i) {
      softmax[i].Reset(args, item, row + 16 * i);
#pragma unroll
      for (int j = 0; j < Traits::kHeadDim / 2; ++j) o[i][j] = 0.0f;
    }
    if (tiles > 0) {
      CopyRows<Traits>(
          shared.q, static_cast<const std::byte*>(args.q) + item.head * Traits::kRowBytes,
          item.row_begin, size_t(args.q_heads) * Traits::kRowBytes, Traits::kRows, item.row_count);
      copy_tile(0);
      CommitCopies();
    }
    for (int tile = 0; tile < tiles; ++tile) {
      if (tile + 1 < tiles) copy_tile(tile + 1);
      CommitCopies();
      WaitForCopyGroups<1>();
      __syncthreads();
      const typename Traits::Stage& stage = shared.stages[tile % Traits::kStages];
      float s[Traits::kTiles][Traits::kKeys / 2];
      MultiplyKeys<Traits>(shared.q, warp_row, stage.k, s);
      uint32_t p[Traits::kTiles][Traits::kKeys / 4];
#pragma unroll
      for (int i = 0; i < Traits::kTiles; ++i) {
        float factor[2];
        if (softmax[i].Weigh(item, item.key_begin + tile * Traits::kKeys, s[i], factor)) {
          ScaleRows<Traits::kHeadDim>(factor, o[i]);
        }
        softmax[i].PackWeights(s[i], p[i]);
      }
      AddValues<Traits>(p, stage.v, o);
      __syncthreads();  // the stage, and after the last tile the queries' place, are free
    }
#pragma unroll
    for (int i = 0; i < Traits::kTiles; ++i) {
      StoreRows<Traits::kHeadDim>(args, item, row + 16 * i, softmax[i], o[i]);
    }
    index = item.next;
  }
}

}  // namespace tributary::cuda
