// What the operations of a step on the CPU work on, and what every step results in.
#pragma once

#include <chrono>
#include <cstddef>
#include <memory>
#include <vector>

#include "collective/communicator.h"
#include "collective/exchange/exchange.h"
#include "kernels/cpu/thread_pool.h"
#include "kernels/paged_kv.h"
#include "worker/cache_spec.h"
#include "worker/command.h"

namespace tributary::worker {

// Memory of a given size without a value, kept from step to step: it grows to the largest step and
// no step after that allocates.
template <typename T>
class Scratch {
 public:
  T* Reserve(size_t count) {
    if (count > capacity_) {
      data_.reset();  // first, so that the peak is the larger of the two
      capacity_ = 0;
      data_ = std::make_unique_for_overwrite<T[]>(count);
      capacity_ = count;
    }
    return data_.get();
  }

 private:
  std::unique_ptr<T[]> data_;
  size_t capacity_ = 0;
};

// Of one rank, shared by its caches.
struct StepWorkspace {
  Scratch<float> partial_o;    // [rows of a pass, q_heads, value_dim]
  Scratch<float> partial_lse;  // [rows of a pass, q_heads]
  Scratch<float> context_o;    // [rows of a pass, heads of the rank, value_dim]
  Scratch<float> context_lse;  // [rows of a pass, heads of the rank]
  Scratch<float> slice_o;      // [rows, heads of the rank, value_dim]
  Scratch<float> slice_lse;    // [rows, heads of the rank]
  Scratch<uint8_t> matches;    // [new tokens]
  Scratch<float> rounded_q;    // [rows of a pass, q_heads, key_dim]
  Scratch<float> result_o;     // rank 0: [rows, q_heads, value_dim]
  Scratch<float> result_lse;   // rank 0: [rows, q_heads]
  collective::ExchangeWorkspace exchange;
};

// What a rank brings to every step.
struct RankResources {
  collective::Communicator& comm;
  cpu::ThreadPool& pool;
  StepWorkspace& workspace;
  collective::Strategy strategy = collective::Strategy::kAuto;
};

// The operands of the step. The shapes were checked.
struct StepOperands {
  const CacheSpec& spec;
  const LayerSpec& layer;
  LayerGeometry geometry;
  PagedKv kv;
  TensorView q;
  TensorView k;
  TensorView v;
  collective::Deadline deadline;

  float soft_cap() const { return SoftCap(spec, layer); }
  const float* sinks() const { return layer.sinks.empty() ? nullptr : layer.sinks.data(); }
};

// What comes of a step. (Where its rows go: PlannedStep::outputs.)
struct StepResults {
  // Where a backend that merges in host memory does so on rank 0; else null. It sets them itself.
  float* o = nullptr;              // [query rows, q_heads, value_dim]
  float* lse = nullptr;            // [query rows, q_heads]
  std::vector<int32_t> conflicts;  // entries whose replayed tokens differ, ascending
  bool refused_by_all = false;     // AgreeOnMemory: the group is as good as before the step
  StepTimes times;
};

// Adds the seconds of its life to a sum.
class TimedSection {
 public:
  explicit TimedSection(double& seconds) : seconds_(seconds) {}
  ~TimedSection() {
    seconds_ += std::chrono::duration<double>(std::chrono::steady_clock::now() - begin_).count();
  }
  TimedSection(const TimedSection&) = delete;
  TimedSection& operator=(const TimedSection&) = delete;

 private:
  double& seconds_;
  std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();
};

}  // namespace tributary::worker
