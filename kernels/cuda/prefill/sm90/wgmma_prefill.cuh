// Prefill by warpgroup products (sm_90a), after FlashAttention-3 (arXiv:2407.08608).
//
// A thread block takes 128 query rows of one head, 64 for each of two warpgroups. One thread of a
// third warpgroup keeps KV tiles coming through rings in shared memory (wgmma_prefill_copy.cuh). A
// warpgroup issues the product of the next tile's keys before that of the current tile's values,
// and weighs the former while the tensor cores work on the latter. The two warpgroups take turns in
// issuing, so that one weighs while the other's products run. README.md draws it over time;
// wgmma_prefill_config.h holds the sizes.
#pragma once

#include "base/cuda/early_launch.cuh"
#include "kernels/cuda/prefill/hidden_values.cuh"
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
    const int left = RunPass<false>();
    shared_.first_pass.Arrive();
    shared_.first_pass.Wait(0);
    if (left < 0 && shared_.second_pass == 0) return;
    RunPass<true>();
  }

 private:
  static constexpr int kOutputs = Traits::kDimsOfProduct / 2;  // of a product, a thread's

  // Attends to the items of the first pass or, with kAgain, of the second. Returns the item that
  // the pass leaves, or -1.
  template <bool kAgain>
  __device__ __forceinline__ int RunPass() {
    const int warp = threadIdx.x / 32;
    const int row = warp * 16 + threadIdx.x % 32 / 4;
    auto& o = reinterpret_cast<float(&)[Traits::kPaddedValueDim / 2]>(o_);
    int index = args_.item_begin + blockIdx.x;
    int n = 0;
    while (index >= 0 && (kAgain || items_before_ < kMarkedItems)) {
      const PrefillItem item = args_.items[index];
      index = item.next;
      const int tiles = TilesOf<Traits>(item);
      const int number = kAgain ? n : items_before_;
      if constexpr (kAgain) {
        if (tiles > 0) ++n;
        if (tiles > 0 ? !shared_.Wanted(number) : number < kMarkedItems) continue;
      }
      softmax_.Reset(args_, item, row);
#pragma unroll
      for (int i = 0; i < Traits::kDimProducts; ++i) {
#pragma unroll
        for (int j = 0; j < kOutputs; ++j) o_[i][j] = 0.0f;
      }
      if (tiles > 0) Attend<kAgain>(item, tiles);
      if constexpr (kAgain) {
        if (!shared_.WantedBy(warp, number)) continue;  // it is stored
        AddHiddenValues<Traits::kCompute, Traits::kKeys, Traits::kValueDim>(args_, item,
                                                                            softmax_.keys(), o);
      } else if (!IsDense<Traits::kKeys>(item, item.key_begin, tiles)) {
        if (__any_sync(0xffffffffu, row < item.row_count && HasNonFinite(o))) {
          if (threadIdx.x % 32 == 0) {
            shared_.again[warp][number / 32] |= 1u << number % 32;
            shared_.second_pass = 1;
          }
          continue;
        }
      }
      StoreRows<Traits::kValueDim>(args_, item, row, softmax_, o);
    }
    return index;
  }

  // kConfines: takes values that are not finite out of tiles that are not dense.
  template <bool kConfines>
  __device__ __forceinline__ void Attend(const PrefillItem& item, int tiles) {
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
      if constexpr (kConfines) {
        KeepFiniteValues(item, item.key_begin + (tile - 1) * Traits::kKeys, values);
      }
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
      if constexpr (Traits::kFp8Values) {
        // The tile is weighed while the tensor cores add the values before it. The compiler would
        // wait for them first: it moves that wait ahead of what it does not concern, but not out of
        // its block of instructions, which this wait, over since long, begins.
        FenceRegisters(s_);
        shared_.v_full[values.stage].Wait(values.parity);
      }
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
      if constexpr (Traits::kFp8Values) {
        if (raised) {
          sums_factor_[0] *= factor[0];
          sums_factor_[1] *= factor[1];
        }
        if (tile % kWgmmaPrefillSummedTiles == 0) KeepSums(tile == kWgmmaPrefillSummedTiles);
      }
    }
    const PrefillRingPlace<Traits::kStages> last(tiles_before_ + tiles - 1);
    shared_.v_full[last.stage].Wait(last.parity);
    const int last_key = item.key_begin + (tiles - 1) * Traits::kKeys;  // the first of the tile
    ClearForeignValues(item, last_key, last.stage);
    if constexpr (kConfines) KeepFiniteValues(item, last_key, last);
    WgmmaFence();
    AddValues(last.stage);
    WgmmaCommit();
    WgmmaWaitFor<0>();
    HoldOutputs();
    shared_.v_empty[last.stage].Arrive();
    if constexpr (Traits::kFp8Values) {
      if (tiles > kWgmmaPrefillSummedTiles) AddSums();
    }
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
#pragma unroll
    for (int step = 0; step < Traits::kKeys / Traits::kSlotsOfProduct; ++step) {
#pragma unroll
      for (int i = 0; i < Traits::kDimProducts; ++i) {
        const uint32_t v = SharedAddress(shared_.v[stage].panels) + i * Traits::kProductBytes;
        WgmmaRegisters<Traits::kCompute>(o_[i], p_[4 * step], p_[4 * step + 1], p_[4 * step + 2],
                                         p_[4 * step + 3], ValueDescriptor(v, step));
      }
    }
  }
  static __device__ uint64_t ValueDescriptor(uint32_t v, int step) {
    constexpr int kRowBytes = Traits::kValueRowBytes;
    if constexpr (Traits::kFp8Values) return RowMajorDescriptor<kRowBytes>(v, step);
    return ColumnMajorDescriptor<kRowBytes>(v, step, Traits::kKeys * kRowBytes);
  }

  // Adds the outputs to the thread's sums in fp32, which have their first with `first`, and begins
  // the outputs anew.
  __device__ void KeepSums(bool first) {
    auto& o = reinterpret_cast<float4(&)[Traits::kPaddedValueDim / 8]>(o_);
#pragma unroll
    for (int i = 0; i < Traits::kPaddedValueDim / 8; ++i) {
      float4& sums = shared_.sums.of[i][threadIdx.x];
      sums = first ? o[i] : Sum(o[i], sums);
      o[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
    sums_factor_[0] = sums_factor_[1] = 1.0f;
  }
  // Adds the sums to the outputs.
  __device__ void AddSums() {
    auto& o = reinterpret_cast<float4(&)[Traits::kPaddedValueDim / 8]>(o_);
#pragma unroll
    for (int i = 0; i < Traits::kPaddedValueDim / 8; ++i) {
      o[i] = Sum(o[i], shared_.sums.of[i][threadIdx.x]);
    }
  }
  // Outputs and their sums so far, which are by as much too large as the references have risen.
  __device__ float4 Sum(const float4& o, const float4& sums) const {
    return make_float4(fmaf(sums.x, sums_factor_[0], o.x), fmaf(sums.y, sums_factor_[0], o.y),
                       fmaf(sums.z, sums_factor_[1], o.z), fmaf(sums.w, sums_factor_[1], o.w));
  }

  // The last tile may reach beyond the sequence's keys. What is there has no weight, but may be
  // NaN, and 0 * NaN is NaN. Values of eight bits are gathered, and a gather leaves zeros there.
  __device__ void ClearForeignValues(const PrefillItem& item, int first_key, int stage) {
    if constexpr (Traits::kFp8Values) return;
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

  // Takes what is not finite out of a tile's values, if not all rows see all its keys. Both
  // warpgroups do this together, and none has a turn.
  __device__ void KeepFiniteValues(const PrefillItem& item, int first_key,
                                   const PrefillRingPlace<Traits::kStages>& values) {
    if (IsDense<Traits::kKeys>(item, first_key)) return;
    shared_.v_full[values.stage].Wait(values.parity);
    KeepFinite<Traits::kCompute, sizeof(typename Traits::Values), Traits::kThreads>(
        &shared_.v[values.stage], static_cast<int>(threadIdx.x));
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
  RowSoftmax<Traits::kWeights, Traits::kKeys> softmax_;
  float s_[Traits::kKeys / 2];
  uint32_t p_[Traits::kWeightWords];
  float sums_factor_[2] = {1.0f, 1.0f};  // one for each row, of what is kept in shared memory
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
  shared.ClearMarks();
  WaitForLaunchesAhead();
  LetNextLaunchBegin();
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
