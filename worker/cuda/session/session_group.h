// What the ranks of a session have of each other: rank 0's mailbox, which all of them read, and a
// group of GPUs to exchange partials in. Exchanges of one session meet those of no other session
// and of no call, so sessions need no common order, and a silent host holds up nobody else.
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

// How a rank agrees with all others while a session is opened. Every function is called by all
// ranks at once.
class SessionMeeting {
 public:
  SessionMeeting(collective::Communicator& comm, collective::Deadline deadline)
      : comm_(comm), deadline_(deadline) {}

  // OK when all ranks bring OK. Else, on all ranks alike, an error of the first rank that brings
  // one, or one of the communicator.
  absl::Status Agree(const absl::Status& own);
  // Where rank 0's mailbox lies: that rank says `own`, and all hear it.
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
  const bool opened_;  // by its handle
};

// A group of GPUs for the exchanges of one session, straight between their memories. Called by all
// ranks at once, which all get one or all fail alike. kFailedPrecondition, open.memory: the ranks
// cannot reach each other's memory.
absl::StatusOr<std::unique_ptr<collective::DeviceGroup>> FormSessionGroup(
    CudaRank& rank, const OpenSessionCommand& command, SessionMeeting& meeting);

}  // namespace tributary::worker
