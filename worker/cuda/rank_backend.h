// The backend over one rank's GPU.
#pragma once

#include <algorithm>
#include <cstddef>
#include <functional>
#include <memory>
#include <utility>

#include "worker/backend.h"
#include "worker/cuda/rank.h"
#include "worker/cuda/replica.h"
#include "worker/cuda/session/session.h"
#include "worker/cuda/session/watch.h"
#include "worker/cuda/shard.h"
#include "worker/host_memory_ledger.h"

namespace tributary::worker {

// What CreateCudaBackend makes.
class CudaRankBackend : public Backend {
 public:
  explicit CudaRankBackend(std::unique_ptr<CudaRank> rank) : rank_(std::move(rank)) {}

  const BackendCapabilities& capabilities() const override { return CudaBackend(); }

  size_t AvailableMemory() const override {
    const size_t free = rank_->FreeMemory();
    return free - std::min(free, kHeadroom);
  }

  absl::StatusOr<std::unique_ptr<collective::Communicator>> Join(
      std::unique_ptr<collective::Communicator> comm, collective::Rendezvous& rendezvous,
      collective::Deadline deadline) override {
    return rank_->Join(std::move(comm), rendezvous, deadline);
  }
  void Leave() override { rank_->Leave(); }
  bool MemoryHoldsUpPeers() const override { return rank_->group() != nullptr; }

  absl::StatusOr<std::unique_ptr<Shard>> CreateShard(const CacheSpec& spec, size_t available,
                                                     PageFill fill) override {
    return CudaShard::Create(*rank_, spec, available, fill);
  }

  bool ReplicasApart() const override { return true; }
  size_t AvailableForReplicas() const override { return ledger_->Available(); }
  absl::StatusOr<std::unique_ptr<Shard>> CreateReplica(const CacheSpec& spec, size_t available,
                                                       PageFill fill) override {
    return CudaReplica::Create(host(), rank_->options().gpu, spec, available, fill);
  }
  void Spread(int parts, const std::function<void(int part)>& body) override {
    host().pool.Run(parts, body);
  }
  std::shared_ptr<const void> PinHost(std::byte* data, size_t bytes) override {
    return PinHostMemory(rank_->options().gpu, data, bytes);
  }

  absl::StatusOr<std::unique_ptr<DeviceSession>> OpenSession(const OpenSessionCommand& command,
                                                             collective::Communicator& comm,
                                                             collective::Deadline deadline,
                                                             OnSessionNews news) override {
    return CudaSession::Open(*rank_, watch_, command, comm, deadline, std::move(news));
  }

  absl::Status OpenRegion(RegionId region, const SharedDeviceMemory& memory) override {
    return rank_->OpenRegion(region, memory);
  }
  absl::Status CloseRegion(RegionId region, collective::Deadline deadline) override {
    return rank_->CloseRegion(region, deadline);
  }
  bool Reaches(const RegionPart& part) const override {
    return rank_->regions().Find(part).data != nullptr;
  }

 protected:
  CudaRank& rank() { return *rank_; }

 private:
  ReplicaHost& host() {
    if (host_ == nullptr) {
      host_ = std::make_unique<ReplicaHost>(rank_->options().copy_threads, ledger_);
    }
    return *host_;
  }

  // What steps need besides the pages: partials, staged tensors, graphs.
  static constexpr size_t kHeadroom = size_t{512} << 20;

  const std::unique_ptr<CudaRank> rank_;
  const std::shared_ptr<HostMemoryLedger> ledger_ = HostMemoryLedger::Create();
  std::unique_ptr<ReplicaHost> host_;  // null before its first use
  SessionWatch watch_;                 // frees what is of the rank
};

}  // namespace tributary::worker
