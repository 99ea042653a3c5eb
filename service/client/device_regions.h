// Memory of GPUs that the service has opened by CUDA IPC.
//
// A service that restarts has forgotten it. The memory is still there, so it is registered again,
// in the background and under its name, as soon as a call finds out; calls that name it wait
// meanwhile. What was closed never is: its owner may have freed it.
#pragma once

#include <chrono>
#include <memory>
#include <optional>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "service/client/client.h"
#include "service/client/region_registrar.h"
#include "tributary/v1/attention.grpc.pb.h"

namespace tributary::client {

// Thread safe. Of regions that others described nothing is known: they have one registration.
class DeviceRegions {
 public:
  explicit DeviceRegions(v1::AttentionService::Stub* stub) : registrar_(stub) {}
  // Waits for registrations under way, a few seconds at most.
  ~DeviceRegions() { registrar_.AwaitNone(); }
  DeviceRegions(const DeviceRegions&) = delete;
  DeviceRegions& operator=(const DeviceRegions&) = delete;

  // A region that the service does not know yet.
  absl::StatusOr<std::shared_ptr<const DeviceRegion>> Describe(const DeviceMemory& memory) const;
  // Its first registration. May be repeated until it succeeds.
  absl::Status Register(const DeviceRegion& region, std::chrono::system_clock::time_point deadline);
  // No registration begins from here on, and none is under way.
  void Close(const DeviceRegion& region);

  // The number of the registration that a call relies on now; none while another is under way.
  std::optional<int> Registration(const DeviceRegion& region) const;
  // The same, for a caller that can wait for it, until the deadline at most.
  int AwaitRegistration(const DeviceRegion& region,
                        std::chrono::steady_clock::time_point deadline) const;
  // The service has forgotten this registration. Many calls may say so of one.
  void Renew(const DeviceRegion& region, int forgotten);

 private:
  struct Sharing;
  class Shared;

  std::shared_ptr<Sharing> SharingOf(const DeviceRegion& region) const;

  RegionRegistrar registrar_;
};

}  // namespace tributary::client
