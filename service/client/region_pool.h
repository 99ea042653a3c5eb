// Room for tensors in shared memory that the service has mapped. Regions are sealed memfds, which
// are handed over beside the service's Unix socket, or else POSIX objects, which the service opens
// by name where its operator allows that.
//
// One region at a time is handed out. A region is retired when it can no longer be trusted: the
// service has forgotten it (it restarted), or the outcome of a call that used it is unknown, so
// that the service may still read or write there. Then a new region is registered in the background
// and the old one goes when its last slot does. Retiring, and not reusing, is what makes a late
// write of the service harmless.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/sync/mutex.h"
#include "tributary/v1/attention.grpc.pb.h"

namespace tributary::client {

class RegionRegistrar;
class SharedRegion;

class RegionPool {
  class Region;

 public:
  // A range of a region's bytes. It goes back to the region when the slot is destroyed.
  class Slot {
   public:
    Slot(Slot&& other) noexcept;
    Slot& operator=(Slot&& other) noexcept;
    ~Slot();

    std::byte* data() const;
    const std::string& region() const;
    uint64_t offset() const { return offset_; }

   private:
    friend class RegionPool;
    Slot(std::shared_ptr<Region> region, uint64_t offset, uint64_t bytes);

    std::shared_ptr<Region> region_;
    uint64_t offset_;
    uint64_t bytes_;
  };

  // Regions have `size` bytes; with 0 there are none. `service_path` is the path of the service's
  // Unix socket, and empty when the service is called in another way.
  RegionPool(v1::AttentionService::Stub* stub, uint64_t size, std::string service_path);
  // Unregisters; waits for the service a few seconds at most. All slots are gone by then.
  ~RegionPool();
  RegionPool(const RegionPool&) = delete;
  RegionPool& operator=(const RegionPool&) = delete;

  // Registers the first region.
  absl::Status Start(std::chrono::system_clock::time_point deadline);

  // Takes `bytes` of the region. Nothing when the region is full, or when there is none; in that
  // case a new one is being registered, and *coming says whether the service may still accept it.
  std::optional<Slot> Acquire(uint64_t bytes, bool* coming);
  // The slot's region is not handed out again.
  void Retire(const Slot& slot);
  uint64_t region_bytes() const { return size_; }

 private:
  void Renew();
  // refused: when there is none, that trying again would not help.
  void FinishRenewal(std::shared_ptr<Region> region, bool refused);

  const uint64_t size_;
  const std::string service_path_;
  const std::shared_ptr<RegionRegistrar> registrar_;

  mutable Mutex mutex_;
  std::shared_ptr<Region> current_ TRIBUTARY_GUARDED_BY(mutex_);
  bool renewing_ TRIBUTARY_GUARDED_BY(mutex_) = false;
  bool refused_ TRIBUTARY_GUARDED_BY(mutex_) =
      false;  // whether the service refused the last renewal
  // After a renewal that failed, the next one does not begin sooner.
  std::chrono::steady_clock::time_point next_renewal_ TRIBUTARY_GUARDED_BY(mutex_);
};

}  // namespace tributary::client
