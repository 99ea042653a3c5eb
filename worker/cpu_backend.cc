#include "worker/cpu_backend.h"

#include <algorithm>
#include <functional>
#include <utility>

#include "base/status/status_macros.h"
#include "kernels/cpu/backend.h"
#include "worker/cpu_operations.h"
#include "worker/kv_shard.h"
#include "worker/memory_giver.h"
#include "worker/memory_taker.h"
#include "worker/status_conversion.h"
#include "worker/step_output.h"

namespace tributary::worker {
namespace {

// Half of a rank's threads, so that new caches leave processors for steps.
int ThreadsThatTakeMemory(int threads) { return std::max(1, threads / 2); }

// What the shards of a rank share: they never work at the same time.
struct CpuRank {
  std::shared_ptr<cpu::ThreadPool> pool;
  const std::shared_ptr<HostMemoryLedger> memory;
  MemoryThreads memory_threads;
  collective::Strategy strategy = collective::Strategy::kAuto;
  StepWorkspace workspace;
};

class CpuShard final : public Shard {
 public:
  CpuShard(CpuRank& rank, std::unique_ptr<KvShard> pages,
           std::unique_ptr<HostMemoryLedger::Claim> claim)
      : rank_(rank),
        pages_(std::move(pages)),
        taker_(std::make_unique<MemoryTaker>(pages_->memory(), std::move(claim),
                                             rank_.memory_threads)) {}

  ~CpuShard() override {
    taker_.reset();
    std::shared_ptr<ShardMemory> memory = pages_->memory();
    pages_.reset();
    GiveBack(std::move(memory), rank_.memory, rank_.memory_threads);
  }
  CpuShard(const CpuShard&) = delete;
  CpuShard& operator=(const CpuShard&) = delete;

  size_t bytes() const override { return pages_->bytes(); }

  absl::StatusOr<bool> TakeMemory(std::chrono::steady_clock::time_point until) override {
    if (taker_ == nullptr) return true;
    TRIBUTARY_ASSIGN_OR_RETURN(const bool complete, taker_->Await(until));
    if (complete) taker_.reset();
    return complete;
  }

  absl::Status CopyPages(const std::vector<PageCopy>& copies) override {
    pages_->CopyPages(copies, *rank_.pool);
    return absl::OkStatus();
  }

  absl::Status Reserve(const PlannedStep& step) override {
    ReserveWorkspace(step, &rank_.workspace);
    StepResults places;
    if (!step.outputs.empty()) PlaceNumbers(step, &places);
    return absl::OkStatus();
  }

  size_t page_bytes() const override { return pages_->page_bytes(); }
  absl::Status ReadPages(std::span<const int32_t> pages, std::byte* out) override {
    pages_->ReadPages(pages, out, *rank_.pool);
    return absl::OkStatus();
  }
  absl::Status WritePages(std::span<const int32_t> pages, const std::byte* in) override {
    pages_->WritePages(pages, in, *rank_.pool);
    return absl::OkStatus();
  }

  size_t run_bytes(int32_t slots) const override { return pages_->run_bytes(slots); }
  absl::Status ReadRuns(std::span<const int64_t> first, int32_t slots, std::byte* out) override {
    pages_->ReadRuns(first, slots, out, *rank_.pool);
    return absl::OkStatus();
  }
  absl::Status WriteRuns(std::span<const int64_t> first, int32_t slots,
                         const std::byte* in) override {
    pages_->WriteRuns(first, slots, in, *rank_.pool);
    return absl::OkStatus();
  }

  absl::Status Run(const PlannedStep& step, StepResults* results) override {
    if (step.replica != nullptr && step.plan.keeps_any) {
      const TimedSection timed(results->times.append);
      TRIBUTARY_RETURN_IF_ERROR(static_cast<CpuShard*>(step.replica)->KeepTokens(step));
    }
    const RankResources resources{step.comm, *rank_.pool, rank_.workspace, rank_.strategy};
    if (!step.outputs.empty()) PlaceNumbers(step, results);
    CpuOperations operations(step, pages_->layer(step.layer_index), resources, results);
    TRIBUTARY_RETURN_IF_ERROR(RunStep(step, operations));
    if (!step.outputs.empty()) {
      StoreOutputs(step.outputs, step.geometry(), results->o, results->lse, rank_.pool.get());
    }
    return absl::OkStatus();
  }

 private:
  // Of a replica: writes the tokens of a step as the ward does.
  absl::Status KeepTokens(const PlannedStep& step) {
    return ToAbsl(cpu::Append({.kv = pages_->layer(step.layer_index),
                               .k = step.k.data,
                               .v = step.v.data,
                               .input_dtype = step.k.dtype,
                               .tokens = static_cast<int32_t>(step.plan.kept_slots.size()),
                               .slots = step.plan.kept_slots.data()},
                              *rank_.pool));
  }

  // Rows of one caller who wants f32 are merged where they are wanted, others in the workspace.
  void PlaceNumbers(const PlannedStep& step, StepResults* results) {
    const LayerGeometry geometry = step.geometry();
    const StepOutput& first = step.outputs.front();
    const bool only = step.outputs.size() == 1;
    const bool o_is_result = only && first.o.data != nullptr && first.format.dtype == DType::kF32;
    const bool lse_is_result = only && first.lse.data != nullptr;
    const size_t row_heads =
        static_cast<size_t>(step.plan.query_rows) * static_cast<size_t>(geometry.q_heads);
    StepWorkspace& memory = rank_.workspace;
    results->o =
        o_is_result
            ? reinterpret_cast<float*>(first.o.data)
            : memory.result_o.Reserve(row_heads * static_cast<size_t>(geometry.kv.value_dim));
    results->lse = lse_is_result ? reinterpret_cast<float*>(first.lse.data)
                                 : memory.result_lse.Reserve(row_heads);
  }

  CpuRank& rank_;
  std::unique_ptr<KvShard> pages_;
  std::unique_ptr<MemoryTaker> taker_;  // null: all is taken
};

class CpuRankBackend final : public Backend {
 public:
  CpuRankBackend(std::shared_ptr<cpu::ThreadPool> pool, collective::Strategy strategy,
                 std::shared_ptr<HostMemoryLedger> memory)
      : rank_{.pool = pool,
              .memory = std::move(memory),
              .memory_threads = MemoryThreads(ThreadsThatTakeMemory(pool->threads())),
              .strategy = strategy} {}

  const BackendCapabilities& capabilities() const override { return CpuBackend(); }
  size_t AvailableMemory() const override { return rank_.memory->Available(); }

  absl::StatusOr<std::unique_ptr<Shard>> CreateShard(const CacheSpec& spec, size_t available,
                                                     PageFill fill) override {
    TRIBUTARY_ASSIGN_OR_RETURN(std::unique_ptr<KvShard> pages,
                               KvShard::Create(spec, available, fill));
    TRIBUTARY_ASSIGN_OR_RETURN(std::unique_ptr<HostMemoryLedger::Claim> claim,
                               rank_.memory->Take(pages->bytes()));
    return std::make_unique<CpuShard>(rank_, std::move(pages), std::move(claim));
  }
  void Spread(int parts, const std::function<void(int part)>& body) override {
    rank_.pool->Run(parts, body);
  }
  absl::StatusOr<std::unique_ptr<Shard>> CreateReplica(const CacheSpec& spec, size_t available,
                                                       PageFill fill) override {
    return CreateShard(spec, available, fill);
  }

 private:
  CpuRank rank_;
};

}  // namespace

std::unique_ptr<Backend> CreateCpuBackend(std::shared_ptr<cpu::ThreadPool> pool,
                                          collective::Strategy strategy,
                                          std::shared_ptr<HostMemoryLedger> memory) {
  if (memory == nullptr) memory = HostMemoryLedger::Create();
  return std::make_unique<CpuRankBackend>(std::move(pool), strategy, std::move(memory));
}

}  // namespace tributary::worker
