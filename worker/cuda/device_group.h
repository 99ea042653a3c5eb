// Forms the group of GPUs that belongs to a group of ranks, for one epoch.
#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "collective/communicator.h"
#include "collective/direct/retired_memory.h"
#include "collective/group/device_group.h"
#include "collective/rendezvous/rendezvous.h"

namespace tributary::worker {

// The largest call that a group takes memory for: 17 MB on each of 4 ranks, and twice that on rank
// 0. Larger calls are made in pieces (collective::RowsAtOnce). 512 rows are the largest batch that
// was measured, and a piece of so many rows costs what its bytes cost.
inline constexpr collective::DeviceExchangeLimits kDeviceGroupLimits{
    .rows = 512, .heads = 32, .value_dim = 128, .widest = DType::kF32};

struct DeviceGroupWishes {
  int gpu = 0;
  collective::Strategy strategy = collective::Strategy::kAuto;
  // Direct buffers of earlier epochs; lives as long as the rank.
  std::shared_ptr<collective::RetiredMemory> retired;
};

struct FormedDeviceGroup {
  std::unique_ptr<collective::DeviceGroup> group;  // null: partials meet in host memory
  std::string how;  // says to people which way is used, or why there is none
};

// Called by all ranks of `comm` at once; all of them get a group, or none does. Ranks agree over
// `comm`, step by step, so that one that fails by itself (no memory, no library) leaves nobody
// behind. Not having a way is no error when the strategy is auto or one that the host has as well.
// kFailedPrecondition: it is `direct`, with the reasons. Other errors are of `comm` or of the
// deadline; the group of ranks must be formed anew.
absl::StatusOr<FormedDeviceGroup> FormDeviceGroup(const DeviceGroupWishes& wishes,
                                                  collective::Communicator& comm,
                                                  collective::Rendezvous& rendezvous,
                                                  collective::Deadline deadline);

// The host's communicator of ranks that also have a group of GPUs: whoever aborts the one aborts
// the other. The caller keeps the group.
std::unique_ptr<collective::Communicator> AbortTogether(
    std::unique_ptr<collective::Communicator> comm, std::weak_ptr<collective::DeviceGroup> group);

}  // namespace tributary::worker
