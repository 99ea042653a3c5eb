#include "worker/cuda/session/session_group.h"

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/cuda/device_memory.h"
#include "base/status/errors.h"
#include "base/status/status_macros.h"
#include "collective/rendezvous/gathered_rendezvous.h"
#include "worker/cuda/device_group.h"
#include "worker/cuda/ipc_opener.h"
#include "worker/cuda/status.h"
#include "worker/status_conversion.h"

namespace tributary::worker {
namespace {

using collective::DeviceGroup;
using collective::Wanted;

// How long an exchange waits for a rank that nobody said is gone.
constexpr std::chrono::milliseconds kExchangeBound{10'000};
constexpr int32_t kFewestRows = 16;

absl::Status NotInReach(absl::string_view why) {
  return FieldError(absl::StatusCode::kFailedPrecondition, "open.memory",
                    absl::StrCat("a mailbox on a GPU needs ranks whose GPUs reach each other's "
                                 "memory; HOST serves any: ",
                                 why));
}

// A status as the other ranks hear it.
struct SaidStatus {
  int32_t code = 0;
  char message[508] = {};
};

// Where a mailbox lies, as the other ranks hear it.
struct MailboxPlace {
  uint64_t address = 0;
  char handle[sizeof(cudaIpcMemHandle_t)] = {};
  char nonce[16] = {};
  char gpu[64] = {};
};

// Room for the largest layer in one call, as far as calls of the group's shape have it at all;
// larger ones are made in pieces.
collective::DeviceExchangeLimits LimitsOf(const OpenSessionCommand& command) {
  collective::DeviceExchangeLimits limits = kDeviceGroupLimits;
  const auto pairs = static_cast<int64_t>(command.layout.slot_bytes - command.layout.lse) /
                     static_cast<int64_t>(sizeof(float));  // of a row and a head
  limits.rows = static_cast<int32_t>(
      std::clamp<int64_t>(pairs / limits.heads + 1, kFewestRows, kDeviceGroupLimits.rows));
  return limits;
}

}  // namespace

absl::Status SessionMeeting::Agree(const absl::Status& own) {
  SaidStatus word{.code = own.raw_code()};
  const std::string message(own.message());
  std::copy_n(message.begin(), std::min(message.size(), sizeof(word.message) - 1), word.message);
  std::vector<SaidStatus> words(static_cast<size_t>(comm_.size()));
  TRIBUTARY_RETURN_IF_ERROR(
      CollectiveStatus(comm_.AllGather(&word, words.data(), sizeof(SaidStatus), deadline_)));
  for (size_t rank = 0; rank < words.size(); ++rank) {
    SaidStatus& said = words[rank];
    if (said.code == 0) continue;
    said.message[sizeof(said.message) - 1] = '\0';
    // The rank's own status has payloads, which name the field.
    if (static_cast<int>(rank) == comm_.rank()) return own;
    const auto code = static_cast<absl::StatusCode>(said.code);
    const std::string text = absl::StrCat("rank ", rank, ": ", said.message);
    if (code == absl::StatusCode::kFailedPrecondition) return FieldError(code, "open.memory", text);
    return {code, text};
  }
  return absl::OkStatus();
}

absl::StatusOr<DeviceMailbox> SessionMeeting::HearMailbox(const DeviceMailbox& own) {
  MailboxPlace place{.address = own.address};
  std::copy_n(own.handle.begin(), std::min(own.handle.size(), sizeof(place.handle)), place.handle);
  std::copy_n(own.process_nonce.begin(), std::min(own.process_nonce.size(), sizeof(place.nonce)),
              place.nonce);
  std::copy_n(own.gpu.begin(), std::min(own.gpu.size(), sizeof(place.gpu) - 1), place.gpu);
  std::vector<MailboxPlace> places(static_cast<size_t>(comm_.size()));
  TRIBUTARY_RETURN_IF_ERROR(
      CollectiveStatus(comm_.AllGather(&place, places.data(), sizeof(MailboxPlace), deadline_)));
  const MailboxPlace& root = places.front();
  return DeviceMailbox{.handle = std::string(root.handle, sizeof(root.handle)),
                       .gpu = root.gpu,
                       .address = root.address,
                       .process_nonce = std::string(root.nonce, sizeof(root.nonce))};
}

absl::StatusOr<std::unique_ptr<PeerMailbox>> PeerMailbox::Map(CudaRank& rank,
                                                              const DeviceMailbox& mailbox) {
  TRIBUTARY_ASSIGN_OR_RETURN(const int owner, FindGpu(mailbox.gpu));
  if (owner < 0) return NotInReach(absl::StrCat("the GPU of rank 0, ", mailbox.gpu, ", is hidden"));
  if (mailbox.process_nonce != cuda::ProcessNonce()) {
    cudaIpcMemHandle_t handle;
    if (mailbox.handle.size() != sizeof(handle)) {
      return absl::InternalError("rank 0 sent no handle of its mailbox");
    }
    std::memcpy(&handle, mailbox.handle.data(), sizeof(handle));
    void* data = nullptr;
    const cudaError_t error = cudaIpcOpenMemHandle(&data, handle, cudaIpcMemLazyEnablePeerAccess);
    if (error != cudaSuccess) {
      cudaGetLastError();
      return NotInReach(absl::StrCat("mapping the mailbox: ", cudaGetErrorString(error)));
    }
    return std::unique_ptr<PeerMailbox>(
        new PeerMailbox(static_cast<std::byte*>(data), /*opened=*/true));
  }
  if (owner != rank.options().gpu) {
    const cudaError_t error = cudaDeviceEnablePeerAccess(owner, 0);
    cudaGetLastError();
    if (error != cudaSuccess && error != cudaErrorPeerAccessAlreadyEnabled) {
      return NotInReach(absl::StrCat("peer access: ", cudaGetErrorString(error)));
    }
  }
  return std::unique_ptr<PeerMailbox>(
      new PeerMailbox(reinterpret_cast<std::byte*>(mailbox.address), /*opened=*/false));
}

PeerMailbox::~PeerMailbox() {
  if (opened_) (void)cudaIpcCloseMemHandle(data_);
}

absl::StatusOr<std::unique_ptr<DeviceGroup>> FormSessionGroup(CudaRank& rank,
                                                              const OpenSessionCommand& command,
                                                              SessionMeeting& meeting) {
  collective::Communicator& comm = meeting.comm();
  const collective::DeviceGroupOptions options{.rank = comm.rank(),
                                               .size = comm.size(),
                                               .epoch = comm.epoch(),
                                               .device = rank.options().gpu,
                                               .limits = LimitsOf(command),
                                               .nccl = Wanted::kNo,
                                               .direct = Wanted::kYes,
                                               .direct_bound = kExchangeBound,
                                               .retired = rank.retired()};
  std::unique_ptr<DeviceGroup> group;
  collective::GatheredRendezvous rendezvous(comm, meeting.deadline());
  const tributary::Status made =
      collective::CreateDeviceGroup(options, rendezvous, meeting.deadline(), &group);
  const absl::Status own = made.ok() ? absl::OkStatus() : NotInReach(made.message());
  TRIBUTARY_RETURN_IF_ERROR(meeting.Agree(own));
  return group;
}

}  // namespace tributary::worker
