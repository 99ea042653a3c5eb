// Memory of a GPU that a host registered, as the coordinator knows it.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "service/data/coordinator_lock.h"
#include "worker/command.h"

namespace tributary::service {

// SharedMemoryRegistry makes it and finds it by name, RegisteredRegions (service/coordinator/)
// moves it from state to state, and calls that use it keep it alive.
struct RegisteredRegion {
  enum class State : uint8_t {
    kNew,      // known by name; no worker was told
    kOpening,  // the workers are opening it
    kOpen,     // calls may use it
    kClosing,  // no call may begin to use it; the workers close it when the last call is through
  };

  RegisteredRegion(worker::RegionId region_id, std::string region_name,
                   worker::SharedDeviceMemory shared)
      : id(region_id), name(std::move(region_name)), memory(std::move(shared)) {}

  const worker::RegionId id;
  const std::string name;
  const worker::SharedDeviceMemory memory;

  State state TRIBUTARY_GUARDED_BY(kCoordinatorLock) = State::kNew;
  // How many tensors of accepted calls that are not through lie in it.
  int64_t users TRIBUTARY_GUARDED_BY(kCoordinatorLock) = 0;
  // Callers that wait until it is open, or closed.
  std::vector<std::function<void(absl::Status)>> waiting TRIBUTARY_GUARDED_BY(kCoordinatorLock);
};

using RegisteredRegionPtr = std::shared_ptr<RegisteredRegion>;

}  // namespace tributary::service
