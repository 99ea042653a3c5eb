// Prefill by warpgroup products (sm_90a), after FlashAttention-3 (arXiv:2407.08608).
//
// A block has 128 query rows of one head, 64 to a warpgroup. A warp of a third warpgroup keeps
// tiles of K and V coming through a ring in shared memory, by the copy engine. A warpgroup issues
// the product of the next tile's keys before that of the last one's values, and weighs the former
// while the tensor cores work on the latter; and the two warpgroups take turns in issuing, so that
// one weighs while the other's products run.
#pragma once

#include <algorithm>

#include "kernels/cuda/prefill/prefill_rows.cuh"
#include "kernels/cuda/prefill/sm90/tensor_map.h"
#include "kernels/cuda/prefill/sm90/wgmma_prefill.h"
#include "kernels/cuda/ptx/bulk_copy.cuh"
#include "kernels/cuda/ptx/wgmma_tiles.cuh"

namespace tributary::cuda {

struct PrefillTensorMaps {
  CUtensorMap q;
  CUtensorMap k;
  CUtensorMap v;
};

template <DType kScoreType, DType kComputeType, int kHeadDimension>
struct WgmmaPrefillTraits {
  static constexpr DType kScores = kScoreType;
  static constexpr DType kCompute = kComputeType;
  static constexpr int kHeadDim = kHeadDimension;
  static constexpr int kRows = kWgmmaPrefillRows;
  static constexpr int kKeys = WgmmaPrefillKeys(kHeadDim);
  static constexpr int kWarpgroups = 2;
  static constexpr int kThreads = 128 * kWarpgroups;  // that compute
  static constexpr int kBlockThreads = kThreads + 128;
  // Of a head's queries and keys, and of the rows of a panel of them.
  static constexpr int kScoreBytes = kHeadDim * int(SizeOf(kScores));
  static constexpr int kScoreRowBytes = std::min(128, kScoreBytes);
  static constexpr int kScorePanels = kScoreBytes / kScoreRowBytes;
  // The same of values.
  static constexpr int kValueBytes = kHeadDim * 2;
  static constexpr int kValueRowBytes = 128;
  static constexpr int kValuePanels = kValueBytes / kValueRowBytes;
  static constexpr int kStages = kHeadDim == 64 ? 4 : 2;
  // Two, so that an item's queries can be there before the last item is done with its own.
  static constexpr int kQueryStages = kHeadDim == 256 ? 1 : 2;
  // Output dimensions of one product, and how many products make up the head.
  static constexpr int kDimsOfProduct = kHeadDim == 64 ? 64 : 128;
  static constexpr int kDimProducts = kHeadDim / kDimsOfProduct;

  struct Queries {
    alignas(1024) std::byte panels[kScorePanels][kRows * kScoreRowBytes];
  };
  struct Keys {
    alignas(1024) std::byte panels[kScorePanels][kKeys * kScoreRowBytes];
  };
  struct Values {
    alignas(1024) std::byte panels[kValuePanels][kKeys * kValueRowBytes];
  };
  struct Shared {
    Queries q[kQueryStages];
    Keys k[kStages];
    Values v[kStages];
    CopyBarrier q_full[kQueryStages];
    CopyBarrier q_empty[kQueryStages];  // "empty": one arrival a thread that computes
    CopyBarrier k_full[kStages];
    CopyBarrier k_empty[kStages];
    CopyBarrier v_full[kStages];
    CopyBarrier v_empty[kStages];
  };
  static_assert(sizeof(Shared) <= 227 * 1024);
};

// Asks for a box of a tensor of rows.
__device__ __forceinline__ void CopyBox(void* shared, const CUtensorMap& map, int byte, int head,
                                        int row, CopyBarrier& barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%2, %3, %4}], [%5];" ::"r"(SharedAddress(shared)),
      "l"(&map), "r"(byte), "r"(head), "r"(row), "r"(SharedAddress(&barrier.state))
      : "memory");
}

template <int kRowBytes, int kPanels, int kPanelBytes>
__device__ __forceinline__ void CopyPanels(std::byte (&panels)[kPanels][kPanelBytes],
                                           const CUtensorMap& map, int head, int row,
                                           CopyBarrier& full) {
  full.ArriveAndExpect(kPanels * kPanelBytes);
#pragma unroll
  for (int i = 0; i < kPanels; ++i) CopyBox(panels[i], map, i * kRowBytes, head, row, full);
}

// Where the n-th tile, or the n-th item's queries, of a block are in their ring.
template <int kStages>
struct PrefillRingPlace {
  int stage;
  uint32_t parity;
  __device__ explicit PrefillRingPlace(int n) : stage(n % kStages), parity(n / kStages % 2) {}
};

// The next item is soon read by all warps.
__device__ __forceinline__ void PrefetchItem(const PrefillKernelArgs& args, int index) {
  if (index >= 0) asm volatile("prefetch.global.L1 [%0];" ::"l"(args.items + index));
}

template <typename Traits>
__device__ __forceinline__ int TilesOf(const PrefillItem& item) {
  return max(0, (item.key_end - item.key_begin + Traits::kKeys - 1) / Traits::kKeys);
}

// The copying thread: the queries and tiles of every item of the block, in the order of their use.
template <typename Traits>
__device__ __forceinline__ void CopyItems(const PrefillKernelArgs& args,
                                          const PrefillTensorMaps& maps,
                                          typename Traits::Shared& shared) {
  using TilePlace = PrefillRingPlace<Traits::kStages>;
  int items_before = 0;
  int tiles_before = 0;
  for (int index = args.item_begin + blockIdx.x; index >= 0;) {
    const PrefillItem item = args.items[index];
    index = item.next;
    PrefetchItem(args, index);
    const int tiles = TilesOf<Traits>(item);
    if (tiles == 0) continue;
    const int kv_head = args.KvHead(item.head);
    const int first_row = item.key_row + item.key_begin;
    const auto copy_keys = [&](int tile) {
      const TilePlace place(tiles_before + tile);
      shared.k_empty[place.stage].Wait(place.parity ^ 1);
      CopyPanels<Traits::kScoreRowBytes>(shared.k[place.stage].panels, maps.k, kv_head,
                                         first_row + tile * Traits::kKeys,
                                         shared.k_full[place.stage]);
    };
    const auto copy_values = [&](int tile) {
      const TilePlace place(tiles_before + tile);
      shared.v_empty[place.stage].Wait(place.parity ^ 1);
      CopyPanels<Traits::kValueRowBytes>(shared.v[place.stage].panels, maps.v, kv_head,
                                         first_row + tile * Traits::kKeys,
                                         shared.v_full[place.stage]);
    };
    const PrefillRingPlace<Traits::kQueryStages> queries(items_before);
    shared.q_empty[queries.stage].Wait(queries.parity ^ 1);
    CopyPanels<Traits::kScoreRowBytes>(shared.q[queries.stage].panels, maps.q, item.head,
                                       item.row_begin, shared.q_full[queries.stage]);
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
    const PrefillRingPlace<Traits::kQueryStages> queries(items_before_);
    shared_.q_full[queries.stage].Wait(queries.parity);
    const PrefillRingPlace<Traits::kStages> first(tiles_before_);
    shared_.k_full[first.stage].Wait(first.parity);
    WgmmaFence();
    MultiplyKeys(queries.stage, first.stage);
    WgmmaCommit();
    WgmmaWaitFor<0>();
    HoldRegisters(s_);
    shared_.k_empty[first.stage].Arrive();
    if (tiles == 1) shared_.q_empty[queries.stage].Arrive();
    softmax_.Weigh(item, item.key_begin, s_, factor);
    softmax_.PackWeights(s_, p_);
    for (int tile = 1; tile < tiles; ++tile) {
      const PrefillRingPlace<Traits::kStages> keys(tiles_before_ + tile);
      const PrefillRingPlace<Traits::kStages> values(tiles_before_ + tile - 1);
      shared_.k_full[keys.stage].Wait(keys.parity);
      turns_.Take();
      WgmmaFence();
      MultiplyKeys(queries.stage, keys.stage);
      WgmmaCommit();
      shared_.v_full[values.stage].Wait(values.parity);
      WgmmaFence();
      AddValues(values.stage);
      WgmmaCommit();
      turns_.Pass();
      WgmmaWaitFor<1>();
      HoldRegisters(s_);
      shared_.k_empty[keys.stage].Arrive();
      if (tile == tiles - 1) shared_.q_empty[queries.stage].Arrive();
      const bool raised = softmax_.Weigh(item, item.key_begin + tile * Traits::kKeys, s_, factor);
      WgmmaWaitFor<0>();
      HoldOutputs();
      HoldRegisters(s_);
      shared_.v_empty[values.stage].Arrive();
      softmax_.PackWeights(s_, p_);
      if (raised) {
#pragma unroll
        for (int i = 0; i < Traits::kDimProducts; ++i) {
          ScaleRows<Traits::kDimsOfProduct>(factor, o_[i]);
        }
      }
    }
    const PrefillRingPlace<Traits::kStages> last(tiles_before_ + tiles - 1);
    shared_.v_full[last.stage].Wait(last.parity);
    ClearForeignValues(item, item.key_begin + (tiles - 1) * Traits::kKeys, last.stage);
    WgmmaFence();
    AddValues(last.stage);
    WgmmaCommit();
    WgmmaWaitFor<0>();
    HoldOutputs();
    shared_.v_empty[last.stage].Arrive();
    ++items_before_;
    tiles_before_ += tiles;
  }

  // Issues S = Q K^T.
  __device__ void MultiplyKeys(int query_stage, int stage) {
    constexpr int kRowBytes = Traits::kScoreRowBytes;
    constexpr int kSteps = kRowBytes / kStepBytes;
    const uint32_t q = SharedAddress(shared_.q[query_stage].panels) + warpgroup_ * 64 * kRowBytes;
    const uint32_t k = SharedAddress(shared_.k[stage].panels);
#pragma unroll
    for (int step = 0; step < Traits::kScoreBytes / kStepBytes; ++step) {
      const int panel = step / kSteps;
      const uint64_t a =
          RowMajorDescriptor<kRowBytes>(q + panel * Traits::kRows * kRowBytes, step % kSteps);
      const uint64_t b =
          RowMajorDescriptor<kRowBytes>(k + panel * Traits::kKeys * kRowBytes, step % kSteps);
      if (step == 0) {
        WgmmaShared<Traits::kScores, false>(s_, a, b);
      } else {
        WgmmaShared<Traits::kScores, true>(s_, a, b);
      }
    }
  }

  // Issues O += P V.
  __device__ void AddValues(int stage) {
    const uint32_t v = SharedAddress(shared_.v[stage].panels);
    constexpr int kPanelBytes = Traits::kKeys * Traits::kValueRowBytes;
    constexpr int kProductBytes = Traits::kDimsOfProduct * 2 / Traits::kValueRowBytes * kPanelBytes;
#pragma unroll
    for (int step = 0; step < Traits::kKeys / 16; ++step) {
#pragma unroll
      for (int i = 0; i < Traits::kDimProducts; ++i) {
        WgmmaRegisters<Traits::kCompute>(
            o_[i], p_[4 * step], p_[4 * step + 1], p_[4 * step + 2], p_[4 * step + 3],
            ColumnMajorDescriptor(v + i * kProductBytes, step, kPanelBytes));
      }
    }
  }

  // The last tile may reach beyond the sequence's keys. What is there has no weight, but may be
  // NaN, and 0 * NaN is NaN.
  __device__ void ClearForeignValues(const PrefillItem& item, int first_key, int stage) {
    const int begin = item.key_limit - first_key;
    if (begin >= Traits::kKeys) return;  // the same for both warpgroups
    constexpr int kVectors = Traits::kValueRowBytes / 16;
    const int count = (Traits::kKeys - begin) * kVectors;
#pragma unroll
    for (int panel = 0; panel < Traits::kValuePanels; ++panel) {
      auto* rows = reinterpret_cast<uint4*>(shared_.v[stage].panels[panel]) + begin * kVectors;
      for (int i = threadIdx.x; i < count; i += Traits::kThreads) rows[i] = make_uint4(0, 0, 0, 0);
    }
    FenceSharedForWgmma();
    SyncThreads<Traits::kThreads>();
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
    for (int i = 0; i < Traits::kQueryStages; ++i) {
      shared.q_full[i].Init(1);
      shared.q_empty[i].Init(Traits::kThreads);
    }
    for (int i = 0; i < Traits::kStages; ++i) {
      shared.k_full[i].Init(1);
      shared.v_full[i].Init(1);
      shared.k_empty[i].Init(Traits::kThreads);
      shared.v_empty[i].Init(Traits::kThreads);
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
