#include "worker/replica_keeper.h"

#include <functional>

#include "absl/strings/str_cat.h"
#include "base/status/errors.h"
#include "base/status/status_macros.h"

namespace tributary::worker {

absl::Status ReplicaKeeper::Begin(const Memory& memory) {
  if (replica_ != nullptr) return absl::OkStatus();
  TRIBUTARY_ASSIGN_OR_RETURN(replica_,
                             memory.backend.CreateReplica(spec_, memory.available, memory.fill));
  return absl::OkStatus();
}

absl::StatusOr<bool> ReplicaKeeper::TakeMemory(std::chrono::steady_clock::time_point until) {
  if (replica_ == nullptr) return true;
  TRIBUTARY_ASSIGN_OR_RETURN(complete_, replica_->TakeMemory(until));
  return complete_;
}

void ReplicaKeeper::Stop() {
  replica_.reset();
  complete_ = false;
}

void ReplicaKeeper::JoinedLate() {
  lacks_pages_ = true;
  replica_lacks_pages_ = !hands_over();
}

// ------------------------------------------------------------------------------------------ steps

absl::Status ReplicaKeeper::CopyPages(const std::vector<PageCopy>& copies) {
  return complete_ ? replica_->CopyPages(copies) : absl::OkStatus();
}

// -------------------------------------------------------------------------------------- transfers

absl::Status ReplicaKeeper::Check(const TransferPagesCommand& transfer) const {
  if (transfer.rank < 0 || transfer.rank >= layout_.size) {
    return InvalidField("transfer.rank", absl::StrCat("there is no rank ", transfer.rank));
  }
  if (layout_.size == 1) return InvalidField("transfer.rank", "there is no other rank");
  for (const int32_t page : transfer.pages) {
    if (page >= 0 && page < spec_.num_pages) continue;
    return InvalidField("transfer.pages", absl::StrCat("there is no page ", page));
  }
  return absl::OkStatus();
}

absl::Status ReplicaKeeper::Pass(const TransferPagesCommand& transfer, Shard& own,
                                 ParcelCarrier& parcels, collective::Communicator& comm,
                                 collective::Deadline deadline) {
  const int rank = layout_.rank;
  const int keeper = KeeperOf(transfer.rank, stride(), layout_.size);
  if (rank == keeper && !complete_) {
    return absl::InternalError(absl::StrCat("rank ", rank, " keeps no pages of others"));
  }
  Shard& mine = rank == keeper ? *replica_ : own;
  const size_t pages = transfer.pages.size();
  const size_t page_bytes = own.page_bytes();
  const uint32_t order = PageOrderOf(spec_);
  const Spread spread = [&parcels](int parts, const std::function<void(int part)>& body) {
    parcels.Spread(parts, body);
  };
  return parcels.Carry(
      {.from = transfer.restore ? keeper : transfer.rank,
       .to = transfer.restore ? transfer.rank : keeper,
       .bytes = ParcelBytes(pages, page_bytes)},
      comm, deadline,
      [&](std::byte* parcel) {
        TRIBUTARY_RETURN_IF_ERROR(mine.ReadPages(transfer.pages, parcel));
        SealParcel(pages, page_bytes, parcel, order, spread);
        return absl::OkStatus();
      },
      [&](const std::byte* parcel) {
        TRIBUTARY_RETURN_IF_ERROR(CheckParcel(transfer.pages, page_bytes, parcel, order, spread));
        return mine.WritePages(transfer.pages, parcel);
      });
}

absl::StatusOr<bool> ReplicaKeeper::Turn(const TransferPagesCommand& transfer, const Memory& memory,
                                         std::chrono::steady_clock::time_point until) {
  const bool keeps = layout_.rank == KeeperOf(transfer.rank, stride(), layout_.size);
  if (transfer.complete) {
    if (transfer.restore && layout_.rank == transfer.rank) lacks_pages_ = false;
    if (!transfer.restore && keeps) replica_lacks_pages_ = false;
    if (transfer.restore && keeps && hands_over()) Stop();
    return true;
  }
  if (!keeps || !hands_over()) return true;
  TRIBUTARY_RETURN_IF_ERROR(Begin(memory));
  absl::StatusOr<bool> complete = TakeMemory(until);
  if (!complete.ok()) Stop();
  return complete;
}

}  // namespace tributary::worker
