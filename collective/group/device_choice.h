// The choice of a strategy for an exchange in device memory, and what it costs: pure functions of
// the call and of what the group has. A DeviceGroup calls them for every call; whoever cuts large
// calls (worker/cuda/device_exchange.h) asks them beforehand and gets the same answers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "collective/device/device_exchange.h"
#include "kernels/status.h"

namespace tributary::collective {

struct DeviceExchangeCapability {
  int32_t ranks = 1;
  DeviceExchangeLimits limits;
  std::string no_nccl;    // why NCCL cannot be used; empty: it can
  std::string no_direct;  // why peers' memory cannot be used; empty: it can
};

// The strategy for a call: a pure function. `forced` other than kAuto wins or is refused.
// kInvalidArgument names the field; kFailedPrecondition lists what was tried and why not.
Status ChooseDeviceStrategy(const DeviceExchangeParams& params,
                            const DeviceExchangeCapability& capability, Strategy* out);

// The most rows, up to the call's own, that a group with this capability takes at once; a call with
// more of them is made in pieces, whose rows follow each other. The same on every rank. 0: not even
// one row fits, or the strategy is not there.
int32_t RowsAtOnce(const DeviceExchangeParams& params, const DeviceExchangeCapability& capability);
int32_t RowsAtOnce(const DeviceGatherParams& params, const DeviceExchangeCapability& capability);

// Bytes that a rank other than 0 sends to its peers.
size_t DeviceBytesSent(const DeviceExchangeParams& params, int32_t ranks, Strategy strategy);

}  // namespace tributary::collective
