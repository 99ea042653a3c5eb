// Prefill by warpgroup products (sm_90a), after FlashAttention-3 (arXiv:2407.08608).
//
// A block has 128 query rows of one head, 64 to a warpgroup. A warp of a third warpgroup keeps
// tiles of K and V coming through a ring in shared memory, by the copy engine. A warpgroup issues
// the product of the next tile's keys before that of the last one's values, and weighs the former
// while the tensor cores work on the latter; and the two warpgroups take turns in issuing, so that
// one weighs while the other's products run.
#pragma once

#include "kernels/cuda/bulk_copy.cuh"
#include "kernels/cuda/prefill_rows.cuh"
#include "kernels/cuda/tensor_map.h"
#include "kernels/cuda/wgmma_prefill.h"
#include "kernels/cuda/wgmma_tiles.cuh"

namespace tributary::cuda {

struct PrefillTensorMaps {
  CUtensorMap q;
  CUtensorMap k;
  CUtensorMap v;
};

template <DType kComputeType, int kHeadDimension>
struct WgmmaPrefillTraits {
  static constexpr DType kCompute = kComputeType;
  static constexpr int kHeadDim = kHeadDimension;
  static constexpr int kRows = kWgmmaPrefillRows;
  static constexpr int kKeys = WgmmaPrefillKeys(kHeadDim);
  static constexpr int kWarpgroups = 2;
  static constexpr int kThreads = 128 * kWarpgroups;  // that compute
  static constexpr int kBlockThreads = kThreads + 128;
  static constexpr int kPanels = kHeadDim / kPanelElements;
  static constexpr int kQueryPanelBytes = kRows * kPanelRowBytes;
  static constexpr int kKeyPanelBytes = kKeys * kPanelRowBytes;
  static constexpr int kStages = kHeadDim == 64 ? 4 : 2;
  // Output dimensions of one product, and how many products make up the head.
  static constexpr int kDimsOfProduct = kHeadDim == 64 ? 64 : 128;
  static constexpr int kDimProducts = kHeadDim / kDimsOfProduct;

  struct Tile {
    alignas(1024) std::byte panels[kPanels][kKeyPanelBytes];
  };
  struct Shared {
    alignas(1024) std::byte q[kPanels][kQueryPanelBytes];
    Tile k[kStages];
    Tile v[kStages];
    CopyBarrier q_full;
    CopyBarrier q_empty;  // "empty" barriers count one arrival a warp that computes
    CopyBarrier k_full[kStages];
    CopyBarrier k_empty[kStages];
    CopyBarrier v_full[kStages];
    CopyBarrier v_empty[kStages];
  };
};

// Asks for a box of a tensor of rows.
__device__ __forceinline__ void CopyBox(void* shared, const CUtensorMap& map, int element, int head,
                                        int row, CopyBarrier& barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%2, %3, %4}], [%5];" ::"r"(SharedAddress(shared)),
      "l"(&map), "r"(element), "r"(head), "r"(row), "r"(SharedAddress(&barrier.state))
      : "memory");
}

template <int kPanels, int kPanelBytes>
__device__ __forceinline__ void CopyPanels(std::byte (&panels)[kPanels][kPanelBytes],
                                           const CUtensorMap& map, int head, int row,
                                           CopyBarrier& full) {
  full.ArriveAndExpect(kPanels * kPanelBytes);
#pragma unroll
  for (int i = 0; i < kPanels; ++i) {
    CopyBox(panels[i], map, i * kPanelElements, head, row, full);
  }
}

// Where the n-th tile of a block is in the ring.
template <typename Traits>
struct PrefillRingPlace {
  int stage;
  uint32_t parity;
  __device__ explicit PrefillRingPlace(int tile)
      : stage(tile % Traits::kStages), parity(tile / Traits::kStages % 2) {}
};

template <typename Traits>
__device__ __forceinline__ int TilesOf(const PrefillItem& item) {
  return max(0, (item.key_end - item.key_begin + Traits::kKeys - 1) / Traits::kKeys);
}

// The copying thread: the queries and tiles of every item of the block, in the order of their use.
template <typename Traits>
__device__ __forceinline__ void CopyItems(const PrefillKernelArgs& args,
                                          const PrefillTensorMaps& maps,
                                          typename Traits::Shared& shared) {
  int items_before = 0;
  int tiles_before = 0;
  for (int index = args.item_begin + blockIdx.x; index >= 0;) {
    const PrefillItem item = args.items[index];
    index = item.next;
    const int tiles = TilesOf<Traits>(item);
    if (tiles == 0) continue;
    const int kv_head = args.KvHead(item.head);
    const int first_row = item.key_row + item.key_begin;
    const auto copy_keys = [&](int tile) {
      const PrefillRingPlace<Traits> place(tiles_before + tile);
      shared.k_empty[place.stage].Wait(place.parity ^ 1);
      CopyPanels(shared.k[place.stage].panels, maps.k, kv_head, first_row + tile * Traits::kKeys,
                 shared.k_full[place.stage]);
    };
    const auto copy_values = [&](int tile) {
      const PrefillRingPlace<Traits> place(tiles_before + tile);
      shared.v_empty[place.stage].Wait(place.parity ^ 1);
      CopyPanels(shared.v[place.stage].panels, maps.v, kv_head, first_row + tile * Traits::kKeys,
                 shared.v_full[place.stage]);
    };
    shared.q_empty.Wait(items_before % 2 ^ 1);
    CopyPanels(shared.q, maps.q, item.head, item.row_begin, shared.q_full);
    copy_keys(0);
    for (int tile = 1; tile < tiles; ++tile) {
      copy_keys(tile);
      copy_values(tile - 1);
    }
    copy_values(tiles - 1);
    ++items_before;
    tiles_before += tiles;
  }
}

// The warpgroups take turns in issuing products, by two barriers of both.
class Turns {
 public:
  __device__ explicit Turns(int warpgroup) : warpgroup_(warpgroup) {
    if (warpgroup_ == 1) Pass();
  }
  __device__ void Take() const {
    asm volatile("bar.sync %0, 256;" ::"r"(2 + warpgroup_) : "memory");
  }
  __device__ void Pass() const {
    asm volatile("bar.arrive %0, 256;" ::"r"(3 - warpgroup_) : "memory");
  }

 private:
  const int warpgroup_;
};

template <typename Traits>
class PrefillWarpgroup {
 public:
  using Shared = typename Traits::Shared;

  __device__ PrefillWarpgroup(const PrefillKernelArgs& args, Shared& shared)
      : args_(args), shared_(shared), warpgroup_(threadIdx.x / 128), turns_(warpgroup_) {}

  __device__ void Run() {
    for (int index = args_.item_begin + blockIdx.x; index >= 0;) {
      const PrefillItem item = args_.items[index];
      index = item.next;
      const int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;
      softmax_.Reset(args_, item, row);
#pragma unroll
      for (int i = 0; i < Traits::kDimProducts; ++i) {
#pragma unroll
        for (int j = 0; j < kOutputs; ++j) o_[i][j] = 0.0f;
      }
      const int tiles = TilesOf<Traits>(item);
      if (tiles > 0) Attend(item, tiles);
      StoreRows<Traits::kHeadDim>(args_, item, row, softmax_,
                                  reinterpret_cast<const float(&)[Traits::kHeadDim / 2]>(o_));
    }
  }

 private:
  static constexpr int kOutputs = Traits::kDimsOfProduct / 2;  // of a product, a thread's

  __device__ void Attend(const PrefillItem& item, int tiles) {
    float factor[2];
    shared_.q_full.Wait(items_before_ % 2);
    const PrefillRingPlace<Traits> first(tiles_before_);
    shared_.k_full[first.stage].Wait(first.parity);
    WgmmaFence();
    MultiplyKeys(first.stage);
    WgmmaCommit();
    WgmmaWaitFor<0>();
    HoldRegisters(s_);
    Release(shared_.k_empty[first.stage]);
    if (tiles == 1) Release(shared_.q_empty);
    softmax_.Weigh(item, item.key_begin, s_, factor);
    softmax_.PackWeights(s_, p_);
    for (int tile = 1; tile < tiles; ++tile) {
      const PrefillRingPlace<Traits> keys(tiles_before_ + tile);
      const PrefillRingPlace<Traits> values(tiles_before_ + tile - 1);
      shared_.k_full[keys.stage].Wait(keys.parity);
      turns_.Take();
      WgmmaFence();
      MultiplyKeys(keys.stage);
      WgmmaCommit();
      shared_.v_full[values.stage].Wait(values.parity);
      WgmmaFence();
      AddValues(values.stage);
      WgmmaCommit();
      turns_.Pass();
      WgmmaWaitFor<1>();
      HoldRegisters(s_);
      Release(shared_.k_empty[keys.stage]);
      if (tile == tiles - 1) Release(shared_.q_empty);
      const bool raised = softmax_.Weigh(item, item.key_begin + tile * Traits::kKeys, s_, factor);
      WgmmaWaitFor<0>();
      HoldOutputs();
      HoldRegisters(s_);
      Release(shared_.v_empty[values.stage]);
      softmax_.PackWeights(s_, p_);
      if (raised) {
#pragma unroll
        for (int i = 0; i < Traits::kDimProducts; ++i) {
          ScaleRows<Traits::kDimsOfProduct>(factor, o_[i]);
        }
      }
    }
    const PrefillRingPlace<Traits> last(tiles_before_ + tiles - 1);
    shared_.v_full[last.stage].Wait(last.parity);
    ClearForeignValues(item, item.key_begin + (tiles - 1) * Traits::kKeys, last.stage);
    WgmmaFence();
    AddValues(last.stage);
    WgmmaCommit();
    WgmmaWaitFor<0>();
    HoldOutputs();
    Release(shared_.v_empty[last.stage]);
    ++items_before_;
    tiles_before_ += tiles;
  }

  // Issues S = Q K^T.
  __device__ void MultiplyKeys(int stage) {
    const uint32_t q = SharedAddress(shared_.q) + warpgroup_ * 64 * kPanelRowBytes;
    const uint32_t k = SharedAddress(shared_.k[stage].panels);
    constexpr int kSteps = kPanelElements / 16;
#pragma unroll
    for (int step = 0; step < Traits::kHeadDim / 16; ++step) {
      const uint64_t a =
          RowMajorDescriptor(q + step / kSteps * Traits::kQueryPanelBytes, step % kSteps);
      const uint64_t b =
          RowMajorDescriptor(k + step / kSteps * Traits::kKeyPanelBytes, step % kSteps);
      if (step == 0) {
        WgmmaShared<Traits::kCompute, false>(s_, a, b);
      } else {
        WgmmaShared<Traits::kCompute, true>(s_, a, b);
      }
    }
  }

  // Issues O += P V.
  __device__ void AddValues(int stage) {
    const uint32_t v = SharedAddress(shared_.v[stage].panels);
    constexpr int kPanelsOfProduct = Traits::kDimsOfProduct / kPanelElements;
#pragma unroll
    for (int step = 0; step < Traits::kKeys / 16; ++step) {
#pragma unroll
      for (int i = 0; i < Traits::kDimProducts; ++i) {
        WgmmaRegisters<Traits::kCompute>(
            o_[i], p_[4 * step], p_[4 * step + 1], p_[4 * step + 2], p_[4 * step + 3],
            ColumnMajorDescriptor(v + i * kPanelsOfProduct * Traits::kKeyPanelBytes, step,
                                  Traits::kKeyPanelBytes));
      }
    }
  }

  // The last tile may reach beyond the sequence's keys. What is there has no weight, but may be
  // NaN, and 0 * NaN is NaN.
  __device__ void ClearForeignValues(const PrefillItem& item, int first_key, int stage) {
    const int begin = item.key_limit - first_key;
    if (begin >= Traits::kKeys) return;  // the same for both warpgroups
    constexpr int kVectors = kPanelRowBytes / 16;
    const int count = (Traits::kKeys - begin) * kVectors;
#pragma unroll
    for (int panel = 0; panel < Traits::kPanels; ++panel) {
      auto* rows = reinterpret_cast<uint4*>(shared_.v[stage].panels[panel]) + begin * kVectors;
      for (int i = threadIdx.x; i < count; i += Traits::kThreads) rows[i] = make_uint4(0, 0, 0, 0);
    }
    FenceSharedForWgmma();
    SyncThreads<Traits::kThreads>();
  }

  __device__ void Release(CopyBarrier& barrier) {
    if (threadIdx.x % 32 == 0) barrier.Arrive();
  }

  __device__ void HoldOutputs() {
#pragma unroll
    for (int i = 0; i < Traits::kDimProducts; ++i) HoldRegisters(o_[i]);
  }

  const PrefillKernelArgs& args_;
  Shared& shared_;
  const int warpgroup_;
  const Turns turns_;
  int items_before_ = 0;
  int tiles_before_ = 0;
  RowSoftmax<Traits::kCompute, Traits::kKeys> softmax_;
  float s_[Traits::kKeys / 2];
  uint32_t p_[Traits::kKeys / 4];
  float o_[Traits::kDimProducts][kOutputs];
};

template <typename Traits>
__global__ void __launch_bounds__(Traits::kBlockThreads, 1)
    WgmmaPrefillKernel(const __grid_constant__ PrefillKernelArgs args,
                       const __grid_constant__ PrefillTensorMaps maps) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) std::byte shared_bytes[];
  auto& shared = *reinterpret_cast<typename Traits::Shared*>(shared_bytes);
  if (threadIdx.x == 0) {
    constexpr int kWarps = Traits::kThreads / 32;
    shared.q_full.Init(1);
    shared.q_empty.Init(kWarps);
    for (int i = 0; i < Traits::kStages; ++i) {
      shared.k_full[i].Init(1);
      shared.v_full[i].Init(1);
      shared.k_empty[i].Init(kWarps);
      shared.v_empty[i].Init(kWarps);
    }
    FenceBarrierInit();
  }
  __syncthreads();
  if (threadIdx.x >= Traits::kThreads) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
    if (threadIdx.x == Traits::kThreads) CopyItems<Traits>(args, maps, shared);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
    PrefillWarpgroup<Traits>(args, shared).Run();
  }
#endif
}

}  // namespace tributary::cuda
