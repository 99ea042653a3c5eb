// Memory of GPUs that other processes share with this one, as one GPU of it reaches that memory.
//
// Which region is which, how often something is opened and what lies where is here, without CUDA;
// opening is behind RegionOpener.
#pragma once

#include <cstddef>
#include <cstdint>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "worker/command.h"

namespace tributary::worker {

// Every tensor in a region begins at a multiple of so many bytes, because kernels read and write it
// in vectors of that size; so does the region in its allocation.
inline constexpr uint64_t kRegionAlignment = 16;

// What can be said of shared memory without a GPU: kInvalidArgument naming the field of
// CudaIpcMemory (attention.proto).
absl::Status CheckSharedDeviceMemory(const SharedDeviceMemory& memory);

class RegionOpener {
 public:
  // An allocation of another process, as mapped into this one.
  struct Mapping {
    std::byte* base = nullptr;
    uint64_t bytes = 0;
    bool same_gpu = false;  // it lies on the GPU that this is for
  };

  virtual ~RegionOpener() = default;
  // Maps the allocation of `memory.handle`. Errors name fields of CudaIpcMemory.
  virtual absl::StatusOr<Mapping> Open(const SharedDeviceMemory& memory) = 0;
  // Once for every Open that succeeded, when nothing in the stream works on it.
  virtual void Close(const Mapping& mapping) = 0;
};

// Of one GPU. Not thread safe.
class OpenedRegions {
 public:
  // The opener outlives this.
  explicit OpenedRegions(RegionOpener& opener) : opener_(opener) {}
  ~OpenedRegions();
  OpenedRegions(const OpenedRegions&) = delete;
  OpenedRegions& operator=(const OpenedRegions&) = delete;

  // Backend::OpenRegion and CloseRegion.
  absl::Status Open(RegionId region, const SharedDeviceMemory& memory);
  void Close(RegionId region);

  struct Place {
    std::byte* data = nullptr;
    bool same_gpu = false;
  };
  // Where a part lies; without data when that is in no open region.
  Place Find(const RegionPart& part) const;

  size_t size() const { return open_.size(); }

 private:
  struct Region {
    SharedDeviceMemory memory;
    RegionOpener::Mapping mapping;
  };

  RegionOpener& opener_;
  absl::flat_hash_map<RegionId, Region> open_;
};

}  // namespace tributary::worker
