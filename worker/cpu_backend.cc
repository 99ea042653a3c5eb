#include "worker/cpu_backend.h"

#include <utility>

#include "base/status/status_macros.h"
#include "worker/cpu_operations.h"
#include "worker/host_memory.h"
#include "worker/kv_shard.h"

namespace tributary::worker {
namespace {

// What the shards of a rank share: they never work at the same time.
struct CpuRank {
  std::shared_ptr<cpu::ThreadPool> pool;
  collective::Strategy strategy = collective::Strategy::kAuto;
  StepWorkspace workspace;
};

class CpuShard final : public Shard {
 public:
  CpuShard(CpuRank& rank, std::unique_ptr<KvShard> pages) : rank_(rank), pages_(std::move(pages)) {}

  size_t bytes() const override { return pages_->bytes(); }

  absl::Status CopyPages(const std::vector<PageCopy>& copies) override {
    pages_->CopyPages(copies, *rank_.pool);
    return absl::OkStatus();
  }

  absl::Status Run(const PlannedStep& step, StepResults* results) override {
    const RankResources resources{step.comm, *rank_.pool, rank_.workspace, rank_.strategy};
    CpuOperations operations(step, pages_->layer(step.layer_index), resources, results);
    return RunStep(step, operations);
  }

 private:
  CpuRank& rank_;
  const std::unique_ptr<KvShard> pages_;
};

class CpuRankBackend final : public Backend {
 public:
  CpuRankBackend(std::shared_ptr<cpu::ThreadPool> pool, collective::Strategy strategy)
      : rank_{.pool = std::move(pool), .strategy = strategy} {}

  const BackendCapabilities& capabilities() const override { return CpuBackend(); }
  size_t AvailableMemory() const override { return AvailableHostMemory(); }

  absl::StatusOr<std::unique_ptr<Shard>> CreateShard(const CacheSpec& spec, size_t available,
                                                     PageFill fill) override {
    TRIBUTARY_ASSIGN_OR_RETURN(std::unique_ptr<KvShard> pages,
                               KvShard::Create(spec, available, fill));
    return std::make_unique<CpuShard>(rank_, std::move(pages));
  }

 private:
  CpuRank rank_;
};

}  // namespace

std::unique_ptr<Backend> CreateCpuBackend(std::shared_ptr<cpu::ThreadPool> pool,
                                          collective::Strategy strategy) {
  return std::make_unique<CpuRankBackend>(std::move(pool), strategy);
}

}  // namespace tributary::worker
