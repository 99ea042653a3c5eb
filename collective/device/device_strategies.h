// all_gather, ag_rs and a2a of partials in device memory, over any DeviceCommunicator.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>

#include "collective/device/device_communicator.h"
#include "collective/device/device_exchange.h"
#include "kernels/status.h"

namespace tributary::collective {

// Device memory that a call of a strategy needs between its operations.
size_t DeviceWorkspaceBytes(const DeviceExchangeParams& params, int32_t ranks, Strategy strategy);
size_t DeviceWorkspaceBytes(const DeviceGatherParams& params, int32_t ranks);
// The most that any call within the limits needs whose heads are dealt as evenly.
size_t DeviceWorkspaceBytes(const DeviceExchangeLimits& limits, int32_t ranks);

// Enqueues a strategy other than auto and direct. `params` was checked and is not empty; the
// workspace has the bytes that the call needs, is aligned to 16 bytes and is not touched by others
// until the stream has passed the call.
Status EnqueueExchange(const DeviceExchangeParams& params, Strategy strategy,
                       DeviceCommunicator& comm, std::byte* workspace, cudaStream_t stream);
Status EnqueueGather(const DeviceGatherParams& params, DeviceCommunicator& comm,
                     std::byte* workspace, cudaStream_t stream);

// A group of one: applies sinks and converts.
Status EnqueueAlone(const DeviceExchangeParams& params, cudaStream_t stream);

}  // namespace tributary::collective
