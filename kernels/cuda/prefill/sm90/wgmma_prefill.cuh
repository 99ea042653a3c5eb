// Prefill by warpgroup products (sm_90a), after FlashAttention-3 (arXiv:2407.08608).
//
// A thread block takes 128 query rows of one head, 64 for each of two warpgroups. One thread of a
// third warpgroup keeps KV tiles coming through rings in shared memory (wgmma_prefill_copy.cuh). A
// warpgroup issues the product of the next tile's keys before that of the current tile's values,
// and weighs the former while the tensor cores work on the latter. The two warpgroups take turns in
// issuing, so that one weighs while the other's products run. README.md draws it over time;
// wgmma_prefill_config.h holds the sizes.
#pragma once

#include "kernels/cuda/prefill/row_results.cuh"
#include "kernels/cuda/prefill/row_softmax.cuh"
#include "kernels/cuda/prefill/sm90/wgmma_prefill.h"
#include "kernels/cuda/prefill/sm90/wgmma_prefill_copy.cuh"
#include "kernels/cuda/ptx/wgmma_tiles.cuh"

namespace tributary::cuda {

// Lets the two computing warpgroups issue products in turns, by one named barrier for each.
class Turns {
 public:
  __device__ explicit Turns(int warpgroup) : warpgroup_(warpgroup) {
    if (warpgroup_ == 1) Pass();
  }
  // Waits until it is this warpgroup's turn.
  __device__ void Take() const {
    asm volatile("bar.sync %0, 256;" ::"r"(kFirstTurn + warpgroup_) : "memory");
  }
  // Gives the turn to the other warpgroup.
  __device__ void Pass() const {
    asm volatile("bar.arrive %0, 256;" ::"r"(kSecondTurn - warpgroup_) : "memory");
  }

 private:
  const int warpgroup_;
};

// One computing warpgroup: 64 rows of every item of the thread block.
template <typename Traits>
class PrefillWarpgroup {
 public:
  using Shared = WgmmaPrefillShared<Traits>;

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
      StoreRows<Traits::kValueDim>(
          args_, item, row, softmax_,
          reinterpret_cast<const float(&)[Traits::kPaddedValueDim / 2]>(o_));
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
    FenceRegisters(s_);
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
      FenceRegisters(s_);
      shared_.k_empty[keys.stage].Arrive();
      if (tile == tiles - 1) shared_.q_empty[queries.stage].Arrive();
      const bool raised = softmax_.Weigh(item, item.key_begin + tile * Traits::kKeys, s_, factor);
      WgmmaWaitFor<0>();
      HoldOutputs();
      FenceRegisters(s_);
      shared_.v_empty[values.stage].Arrive();
      softmax_.PackWeights(s_, p_);
      if (raised) {
#pragma unroll
        for (int i = 0; i < Traits::kDimProducts; ++i) {
          ScaleRows(factor, o_[i]);
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
    constexpr int kSteps = Traits::kStepsOfPanel;
    static_assert(Traits::kStepBytes == kStepBytes);
    const uint32_t q = SharedAddress(shared_.q[query_stage].panels) + warpgroup_ * 64 * kRowBytes;
    const uint32_t k = SharedAddress(shared_.k[stage].panels);
#pragma unroll
    for (int step = 0; step < Traits::kScoreSteps; ++step) {
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
    constexpr int kProductBytes = Traits::kPanelsOfProduct * kPanelBytes;
#pragma unroll
    for (int step = 0; step < Traits::kKeys / 16; ++step) {
#pragma unroll
      for (int i = 0; i < Traits::kDimProducts; ++i) {
        WgmmaRegisters<Traits::kCompute>(o_[i], p_[4 * step], p_[4 * step + 1], p_[4 * step + 2],
                                         p_[4 * step + 3],
                                         ColumnMajorDescriptor<Traits::kValueRowBytes>(
                                             v + i * kProductBytes, step, kPanelBytes));
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
    SyncBlock<Traits::kThreads, kComputing>();
  }

  __device__ void HoldOutputs() {
#pragma unroll
    for (int i = 0; i < Traits::kDimProducts; ++i) FenceRegisters(o_[i]);
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
  auto& shared = *reinterpret_cast<WgmmaPrefillShared<Traits>*>(shared_bytes);
  if (threadIdx.x == 0) shared.InitBarriers();
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
