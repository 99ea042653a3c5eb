// Prefill by mma.sync, for sm_80 and later.
//
// A thread block keeps a query tile of one head in shared memory; each of its four warps owns 16 or
// 32 of the rows. KV tiles stream through two stages of shared memory by cp.async. S = Q K^T, its
// weights and O += P V stay in registers, after FlashAttention-2 (arXiv:2307.08691). The sizes are
// in mma_prefill_config.h.
#pragma once

#include <type_traits>

#include "kernels/cuda/prefill/hidden_values.cuh"
#include "kernels/cuda/prefill/row_results.cuh"
#include "kernels/cuda/prefill/row_softmax.cuh"
#include "kernels/cuda/prefill/sm80/mma_prefill.h"
#include "kernels/cuda/prefill/sm80/mma_prefill_config.h"
#include "kernels/cuda/ptx/ptx.cuh"

namespace tributary::cuda {

// Copies 16 bytes, or clears them.
__device__ __forceinline__ void CopyOrClear16(uint32_t shared, const void* global, bool copy) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global),
               "r"(copy ? 16 : 0)
               : "memory");
}

// The byte offset of chunk `chunk` of a row, from the begin of the tile.
template <int kRowBytes>
__device__ __forceinline__ uint32_t ChunkOffset(int row, int chunk) {
  return row * kRowBytes + (MmaPrefillChunk(row, chunk, kRowBytes / 16) << 4);
}

// Begins to copy `rows` rows of one head to shared memory; rows from `limit` on become zeros.
template <int kRowBytes, int kThreads>
__device__ __forceinline__ void CopyRows(std::byte* to, const void* from, size_t first_row,
                                         size_t row_stride, int rows, int limit) {
  constexpr int kChunks = kRowBytes / 16;
  static_assert(kChunks * 16 == kRowBytes);
  const auto shared = static_cast<uint32_t>(__cvta_generic_to_shared(to));
  const auto* base = static_cast<const std::byte*>(from);
#pragma unroll 4
  for (int i = threadIdx.x; i < rows * kChunks; i += kThreads) {
    const int row = i / kChunks;
    const int chunk = i % kChunks;
    const bool copy = row < limit;
    CopyOrClear16(shared + ChunkOffset<kRowBytes>(row, chunk),
                  base + (copy ? (first_row + row) * row_stride : 0) + chunk * 16, copy);
  }
}

// S = Q K^T of the warp's rows, the first of which is `row`.
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
  for (int step = 0; step < Traits::kKeyDim / 16; ++step) {
    uint32_t a[Traits::kTiles][4];
#pragma unroll
    for (int tile = 0; tile < Traits::kTiles; ++tile) {
      LoadMatrices(q_at + ChunkOffset<Traits::kKeyRowBytes>(row + tile * 16 + lane % 16,
                                                            step * 2 + lane / 16),
                   a[tile]);
    }
#pragma unroll
    for (int keys = 0; keys < Traits::kKeys; keys += 16) {
      uint32_t b[4];
      LoadMatrices(k_at + ChunkOffset<Traits::kKeyRowBytes>(keys + lane / 16 * 8 + lane % 8,
                                                            step * 2 + lane / 8 % 2),
                   b);
#pragma unroll
      for (int tile = 0; tile < Traits::kTiles; ++tile) {
        float* at = &s[tile][keys / 2];
        Mma16x8x16<Traits::kCompute>(reinterpret_cast<float(&)[4]>(at[0]), a[tile], b[0], b[1]);
        Mma16x8x16<Traits::kCompute>(reinterpret_cast<float(&)[4]>(at[4]), a[tile], b[2], b[3]);
      }
    }
  }
}

// O += P V of the warp's rows.
template <typename Traits>
__device__ __forceinline__ void AddValues(const uint32_t (&p)[Traits::kTiles][Traits::kKeys / 4],
                                          const std::byte* v,
                                          float (&o)[Traits::kTiles][Traits::kValueDim / 2]) {
  const int lane = threadIdx.x % 32;
  const auto v_at = static_cast<uint32_t>(__cvta_generic_to_shared(v));
#pragma unroll
  for (int keys = 0; keys < Traits::kKeys; keys += 16) {
#pragma unroll
    for (int dims = 0; dims < Traits::kValueDim; dims += 16) {
      uint32_t b[4];
      LoadMatricesTransposed(
          v_at + ChunkOffset<Traits::kValueRowBytes>(keys + lane % 16, dims / 8 + lane / 16), b);
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

// Begins to copy the item's KV tile `tile` to its stage.
template <typename Traits>
__device__ __forceinline__ void CopyTile(const PrefillKernelArgs& args, const PrefillItem& item,
                                         int kv_head, int tile, typename Traits::Stage& stage) {
  const int first = item.key_begin + tile * Traits::kKeys;
  const auto copy = [&]<int kRowBytes>(std::integral_constant<int, kRowBytes>, std::byte* to,
                                       const void* from) {
    CopyRows<kRowBytes, Traits::kThreads>(
        to, static_cast<const std::byte*>(from) + kv_head * kRowBytes, item.key_row + first,
        size_t(args.kv_heads) * kRowBytes, Traits::kKeys, item.key_limit - first);
  };
  copy(std::integral_constant<int, Traits::kKeyRowBytes>{}, stage.k, args.k);
  copy(std::integral_constant<int, Traits::kValueRowBytes>{}, stage.v, args.v);
}

// Begins to copy the item's queries.
template <typename Traits>
__device__ __forceinline__ void CopyQueries(const PrefillKernelArgs& args, const PrefillItem& item,
                                            std::byte* to) {
  constexpr int kRowBytes = Traits::kKeyRowBytes;
  CopyRows<kRowBytes, Traits::kThreads>(
      to, static_cast<const std::byte*>(args.q) + item.head * kRowBytes, item.row_begin,
      size_t(args.q_heads) * kRowBytes, Traits::kRows, item.row_count);
}

// Attends to an item. While the warps multiply a KV tile, the next one is on its way to the other
// stage. `confines`: takes values that are not finite out of tiles that are not dense
// (prefill/hidden_values.cuh). Without, it returns to all threads whether that is needed.
template <typename Traits>
__device__ __forceinline__ bool Attend(
    const PrefillKernelArgs& args, const PrefillItem& item, typename Traits::Shared& shared,
    RowSoftmax<Traits::kCompute, Traits::kKeys> (&softmax)[Traits::kTiles],
    float (&o)[Traits::kTiles][Traits::kValueDim / 2], bool confines) {
  const int warp_row = threadIdx.x / 32 * 16 * Traits::kTiles;
  const int row = warp_row + threadIdx.x % 32 / 4;  // the thread's first
  const int tiles = max(0, (item.key_end - item.key_begin + Traits::kKeys - 1) / Traits::kKeys);
  const int kv_head = args.KvHead(item.head);
#pragma unroll
  for (int i = 0; i < Traits::kTiles; ++i) {
    softmax[i].Reset(args, item, row + 16 * i);
#pragma unroll
    for (int j = 0; j < Traits::kValueDim / 2; ++j) o[i][j] = 0.0f;
  }
  if (tiles == 0) return false;
  CopyQueries<Traits>(args, item, shared.q);
  CopyTile<Traits>(args, item, kv_head, 0, shared.stages[0]);
  CommitCopies();
  for (int tile = 0; tile < tiles; ++tile) {
    if (tile + 1 < tiles) {
      CopyTile<Traits>(args, item, kv_head, tile + 1, shared.stages[(tile + 1) % Traits::kStages]);
    }
    CommitCopies();
    WaitForCopiesBut<1>();
    __syncthreads();
    typename Traits::Stage& stage = shared.stages[tile % Traits::kStages];
    const int first_key = item.key_begin + tile * Traits::kKeys;
    if (confines && !IsDense<Traits::kKeys>(item, first_key)) {
      KeepFinite<Traits::kCompute, sizeof(stage.v), Traits::kThreads>(
          stage.v, static_cast<int>(threadIdx.x));
      __syncthreads();
    }
    float s[Traits::kTiles][Traits::kKeys / 2];
    MultiplyKeys<Traits>(shared.q, warp_row, stage.k, s);
    uint32_t p[Traits::kTiles][Traits::kKeys / 4];
#pragma unroll
    for (int i = 0; i < Traits::kTiles; ++i) {
      float factor[2];
      if (softmax[i].Weigh(item, first_key, s[i], factor)) ScaleRows(factor, o[i]);
      softmax[i].PackWeights(s[i], p[i]);
    }
    AddValues<Traits>(p, stage.v, o);
    __syncthreads();  // the stage is free, and after the last tile so is the queries' place
  }
  if (confines || IsDense<Traits::kKeys>(item, item.key_begin, tiles)) return false;
  return __syncthreads_or(row < item.row_count && HasNonFinite(o[0])) != 0;
}

// Works off the items of the thread block's chain, one after the other; an item once more if a
// value that is not finite has, or may have, reached rows that do not see it.
template <typename Traits>
__global__ void __launch_bounds__(Traits::kThreads)
    MmaPrefillKernel(const __grid_constant__ PrefillKernelArgs args) {
  extern __shared__ __align__(128) std::byte shared_bytes[];
  auto& shared = *reinterpret_cast<typename Traits::Shared*>(shared_bytes);
  const int row = threadIdx.x / 32 * 16 * Traits::kTiles + threadIdx.x % 32 / 4;
  for (int index = args.item_begin + blockIdx.x; index >= 0;) {
    const PrefillItem item = args.items[index];
    RowSoftmax<Traits::kCompute, Traits::kKeys> softmax[Traits::kTiles];
    float o[Traits::kTiles][Traits::kValueDim / 2];
    bool confines = false;
    while (Attend<Traits>(args, item, shared, softmax, o, confines)) confines = true;
    if (__builtin_expect(confines, 0)) {
#pragma unroll
      for (int i = 0; i < Traits::kTiles; ++i) {
        AddHiddenValues<Traits::kCompute, Traits::kKeys, Traits::kValueDim>(
            args, item, softmax[i].keys(), o[i]);
      }
    }
#pragma unroll
    for (int i = 0; i < Traits::kTiles; ++i) {
      StoreRows<Traits::kValueDim>(args, item, row + 16 * i, softmax[i], o[i]);
    }
    index = item.next;
  }
}

}  // namespace tributary::cuda
