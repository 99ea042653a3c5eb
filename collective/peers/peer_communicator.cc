#include "collective/peers/peer_communicator.h"

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "collective/op.h"

namespace tributary::collective {
namespace {

class PeerCommunicator final : public Communicator {
 public:
  PeerCommunicator(const GroupPlace& place, std::unique_ptr<Transfers> transfers)
      : rank_(place.rank),
        size_(place.size),
        epoch_(place.epoch),
        transfers_(std::move(transfers)) {}

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  uint64_t epoch() const override { return epoch_; }

  Status AllGather(const void* send, void* recv, size_t bytes, Deadline deadline) override {
    std::vector<Transfer> transfers = TransfersWithAll();
    for (Transfer& t : transfers) {
      t.send = Part(send, 0, bytes);
      t.recv = Part(recv, t.peer, bytes);
    }
    CopyOwn(send, 0, recv, bytes);
    return transfers_->Run(Op::kAllGather, bytes, 0, transfers, deadline);
  }

  Status AllToAll(const void* send, void* recv, size_t bytes, Deadline deadline) override {
    CopyOwn(send, rank_, recv, bytes);
    return SwapParts(Op::kAllToAll, send, recv, bytes, deadline);
  }

  Status ReduceScatter(const float* send, float* recv, size_t count, Deadline deadline) override {
    parts_.resize(size_ * count);
    const size_t bytes = count * sizeof(float);
    CopyOwn(send, rank_, parts_.data(), bytes);
    if (Status s = SwapParts(Op::kReduceScatter, send, parts_.data(), bytes, deadline); !s.ok()) {
      return s;
    }
    if (count > 0) std::memcpy(recv, parts_.data(), bytes);
    for (int r = 1; r < size_; ++r) {
      const float* part = parts_.data() + r * count;
      for (size_t i = 0; i < count; ++i) recv[i] += part[i];
    }
    return Status::Ok();
  }

  Status Gather(const void* send, void* recv, size_t bytes, int root, Deadline deadline) override {
    if (root < 0 || root >= size_) return InvalidArgument("gather: root is not a rank");
    std::vector<Transfer> transfers;
    if (rank_ == root) {
      transfers = TransfersWithAll();
      for (Transfer& t : transfers) {
        t.sends = false;
        t.recv = Part(recv, t.peer, bytes);
      }
      CopyOwn(send, 0, recv, bytes);
    } else {
      transfers.push_back({.peer = root, .sends = true, .send = Part(send, 0, bytes)});
    }
    return transfers_->Run(Op::kGather, bytes, root, transfers, deadline);
  }

  Status Pass(const void* send, void* recv, size_t bytes, int from, int to,
              Deadline deadline) override {
    if (Status s = CheckPass(from, to, size_); !s.ok()) return s;
    std::vector<Transfer> transfers;
    if (rank_ == from) {
      transfers.push_back({.peer = to, .sends = true, .send = Part(send, 0, bytes)});
    } else if (rank_ == to) {
      transfers.push_back({.peer = from, .receives = true, .recv = Part(recv, 0, bytes)});
    }
    return transfers_->Run(Op::kPass, bytes, from, transfers, deadline);
  }

  Status Barrier(Deadline deadline) override {
    return transfers_->Run(Op::kBarrier, 0, 0, TransfersWithAll(), deadline);
  }

  void Abort(const std::string& reason) override { transfers_->Abort(reason); }

 private:
  static const std::byte* Part(const void* data, int part, size_t bytes) {
    return bytes == 0 ? nullptr : static_cast<const std::byte*>(data) + part * bytes;
  }
  static std::byte* Part(void* data, int part, size_t bytes) {
    return bytes == 0 ? nullptr : static_cast<std::byte*>(data) + part * bytes;
  }

  void CopyOwn(const void* send, int part, void* recv, size_t bytes) const {
    if (bytes > 0) std::memcpy(Part(recv, rank_, bytes), Part(send, part, bytes), bytes);
  }

  // Peers in the order of a rotation that starts after this rank, so that not all ranks begin with
  // the same one.
  std::vector<Transfer> TransfersWithAll() const {
    std::vector<Transfer> transfers;
    for (int i = 1; i < size_; ++i) {
      transfers.push_back({.peer = (rank_ + i) % size_, .sends = true, .receives = true});
    }
    return transfers;
  }

  Status SwapParts(Op op, const void* send, void* recv, size_t bytes, Deadline deadline) {
    std::vector<Transfer> transfers = TransfersWithAll();
    for (Transfer& t : transfers) {
      t.send = Part(send, t.peer, bytes);
      t.recv = Part(recv, t.peer, bytes);
    }
    return transfers_->Run(op, bytes, 0, transfers, deadline);
  }

  const int rank_;
  const int size_;
  const uint64_t epoch_;
  std::vector<float> parts_;  // what ReduceScatter receives
  const std::unique_ptr<Transfers> transfers_;
};

}  // namespace

std::unique_ptr<Communicator> MakePeerCommunicator(const GroupPlace& place,
                                                   std::unique_ptr<Transfers> transfers) {
  return std::make_unique<PeerCommunicator>(place, std::move(transfers));
}

}  // namespace tributary::collective
