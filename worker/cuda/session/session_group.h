// What the ranks of a session share: rank 0's mailbox, which all of them read, and a group of GPUs
// in which they exchange partials. The group belongs to the one session, so sessions and calls need
// no common order, and a silent host holds up nobody else.
#pragma once

#include <cstddef>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "collective/communicator.h"
#include "collective/group/device_group.h"
#include "worker/command.h"
#include "worker/cuda/rank.h"

namespace tributary::worker {

// How a rank agrees with all others while a session is opened. All ranks call every function at
// once.
class SessionMeeting {
 public:
  SessionMeeting(collective::Communicator& comm, collective::Deadline deadline)
      : comm_(comm), deadline_(deadline) {}

  // Returns OK when all ranks bring OK. Otherwise all of them get the error of the first rank that
  // brings one, or an error of the communicator.
  absl::Status Agree(const absl::Status& own);
  // Tells all ranks where rank 0's mailbox lies, which rank 0 states as `own`.
  absl::StatusOr<DeviceMailbox> HearMailbox(const DeviceMailbox& own);

  collective::Communicator& comm() { return comm_; }
  collective::Deadline deadline() const { return deadline_; }

 private:
  collective::Communicator& comm_;
  const collective::Deadline deadline_;
};

// Rank 0's mailbox as another rank reaches it.
class PeerMailbox {
 public:
  // kFailedPrecondition, open.memory: this rank's GPU does not reach it. The device is the calling
  // thread's.
  static absl::StatusOr<std::unique_ptr<PeerMailbox>> Map(CudaRank& rank,
                                                          const DeviceMailbox& mailbox);
  ~PeerMailbox();
  PeerMailbox(const PeerMailbox&) = delete;
  PeerMailbox& operator=(const PeerMailbox&) = delete;

  std::byte* data() const { return data_; }

 private:
  PeerMailbox(std::byte* data, bool opened) : data_(data), opened_(opened) {}

  std::byte* const data_;
  const bool opened_;  // whether data_ was opened by the mailbox's handle
};

// Forms a group of GPUs for the exchanges of one session, straight between their memories. All
// ranks call this at once; all of them get the group, or all fail alike. kFailedPrecondition,
// open.memory: the ranks cannot reach each other's memory.
absl::StatusOr<std::unique_ptr<collective::DeviceGroup>> FormSessionGroup(
    CudaRank& rank, const OpenSessionCommand& command, SessionMeeting& meeting);

}  // namespace tributary::worker
