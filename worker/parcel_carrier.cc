#include "worker/parcel_carrier.h"

#include "base/status/status_macros.h"
#include "worker/status_conversion.h"

namespace tributary::worker {

absl::Status ParcelCarrier::Carry(const Trip& trip, collective::Communicator& comm,
                                  collective::Deadline deadline,
                                  const std::function<absl::Status(std::byte*)>& pack,
                                  const std::function<absl::Status(const std::byte*)>& unpack) {
  const int rank = comm.rank();
  if (trip.from == trip.to) {
    if (rank != trip.from) return absl::OkStatus();
    std::byte* const parcel = buffer_.Reserve(trip.bytes);
    TRIBUTARY_RETURN_IF_ERROR(pack(parcel));
    return unpack(parcel);
  }
  if (lanes_ == nullptr && may_have_lanes_ && trip.bytes >= least_lane_bytes_) {
    TRIBUTARY_ASSIGN_OR_RETURN(lanes_, ParcelLanes::Form(comm, deadline));
    pins_.resize(static_cast<size_t>(comm.size()));
    pinned_.resize(static_cast<size_t>(comm.size()));
  }
  const bool takes_part = rank == trip.from || rank == trip.to;
  if (lanes_ == nullptr || !lanes_->Serves(trip.from, trip.to, trip.bytes)) {
    std::byte* const parcel = takes_part ? buffer_.Reserve(trip.bytes) : nullptr;
    if (rank == trip.from) TRIBUTARY_RETURN_IF_ERROR(pack(parcel));
    TRIBUTARY_RETURN_IF_ERROR(
        CollectiveStatus(comm.Pass(parcel, parcel, trip.bytes, trip.from, trip.to, deadline)));
    return rank == trip.to ? unpack(parcel) : absl::OkStatus();
  }
  if (takes_part) Pin(trip.from);
  if (rank == trip.from) {
    TRIBUTARY_ASSIGN_OR_RETURN(std::byte* const parcel, lanes_->Begin(deadline));
    TRIBUTARY_RETURN_IF_ERROR(pack(parcel));
  }
  TRIBUTARY_ASSIGN_OR_RETURN(std::byte* const parcel,
                             lanes_->Pass(comm, trip.from, trip.to, deadline));
  if (rank != trip.to) return absl::OkStatus();
  TRIBUTARY_RETURN_IF_ERROR(unpack(parcel));
  lanes_->Done();
  return absl::OkStatus();
}

void ParcelCarrier::Reset() {
  pins_.clear();
  pinned_.clear();
  lanes_.reset();
  buffer_ = {};
}

void ParcelCarrier::Pin(int rank) {
  const auto index = static_cast<size_t>(rank);
  if (pinned_[index]) return;
  pinned_[index] = true;
  const ParcelLanes::Memory lane = lanes_->of(rank);
  pins_[index] = backend_.PinHost(lane.data, lane.bytes);
}

}  // namespace tributary::worker
