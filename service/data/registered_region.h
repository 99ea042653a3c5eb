// Memory of a GPU that a host registered, as the coordinator knows it.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "worker/command.h"

namespace tributary::service {

struct DeviceRegion {
  enum class State : uint8_t {
    kNew,      // known by name, and nobody was told
    kOpening,  // workers are opening it
    kOpen,     // calls may use it
    kClosing,  // no call may begin to use it; workers close it when the last one is through
  };

  DeviceRegion(worker::RegionId region_id, std::string region_name,
               worker::SharedDeviceMemory shared)
      : id(region_id), name(std::move(region_name)), memory(std::move(shared)) {}

  const worker::RegionId id;
  const std::string name;
  const worker::SharedDeviceMemory memory;

  // Under the coordinator's lock.
  State state = State::kNew;
  int64_t users = 0;  // tensors of calls that were accepted and are not through
  // Callers that wait until it is open, or closed.
  std::vector<std::function<void(absl::Status)>> waiting;
};

using DeviceRegionPtr = std::shared_ptr<DeviceRegion>;

}  // namespace tributary::service
