// The regions of memory that clients registered, by name. Tensors in a region need not travel in
// messages. Memfds and POSIX shared memory are mapped here; memory of GPUs is opened by the
// workers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "base/rpc/descriptor.h"
#include "base/sync/mutex.h"
#include "service/data/guarded_mapping.h"
#include "service/data/registered_region.h"
#include "worker/command.h"
#include "worker/host_memory.h"

namespace tributary::service {

// A part of a region, in host memory or in memory of a GPU.
struct RegionBytes {
  std::byte* data = nullptr;
  bool pinned = false;  // GuardedMapping::pinned
  // Keeps `data`, even when the region is unregistered meanwhile. Null of a GPU.
  std::shared_ptr<const GuardedMapping> owner;

  RegisteredRegionPtr device;  // null: of host memory
  worker::RegionPart part;
};

// Thread safe.
class SharedMemoryRegistry {
 public:
  // POSIX objects are mapped only where their key begins with one of `prefixes` ("/" for any).
  // There are none by default, because a caller may name an object that is not its own, and the
  // owner may cut it short. `available` returns the bytes that the machine would still give.
  // `pinner`, which may be empty, pins regions.
  explicit SharedMemoryRegistry(
      std::vector<std::string> prefixes = {},
      std::function<size_t()> available = [] { return worker::AvailableHostMemory(); },
      MemoryPinner pinner = {});
  ~SharedMemoryRegistry();

  // Maps `byte_size` bytes at `offset` of a memfd, which is sealed against shrinking.
  // `registration` tells it from others. The same registration again is OK, and its `memory` need
  // not be open. NOT_FOUND: `memory` is not open, and there is no such region.
  absl::Status RegisterMemfd(const std::string& name, Descriptor memory,
                             const std::string& registration, uint64_t offset, uint64_t byte_size);
  // Maps `byte_size` bytes at `offset` of the POSIX object `key`. The same registration again is
  // OK. PERMISSION_DENIED when no prefix allows the key.
  absl::Status RegisterSystem(const std::string& name, const std::string& key, uint64_t offset,
                              uint64_t byte_size);
  // Returns the region of that name, which it makes if there is none. ALREADY_EXISTS when the
  // region has other memory. `owner_key` is CudaIpcMemory.owner_key, empty for none.
  absl::StatusOr<RegisteredRegionPtr> RegisterDevice(const std::string& name,
                                                     const worker::SharedDeviceMemory& memory,
                                                     const std::string& owner_key);
  // Forgets a region. Returns null for memory that is mapped here. For memory of a GPU it returns
  // the region, which the caller must have closed.
  absl::StatusOr<RegisteredRegionPtr> Unregister(const std::string& name);
  // Forgets this very region if it is still known.
  void Forget(const RegisteredRegionPtr& region);
  // Null when no region of that name exists, or when it is not memory of a GPU.
  RegisteredRegionPtr FindDevice(const std::string& name) const;

  // Whether ForgetOwnerless may ever have something to forget.
  bool HasOwners() const;
  // Forgets regions whose owners died. Returns those in memory of GPUs, which the caller must have
  // closed.
  std::vector<RegisteredRegionPtr> ForgetOwnerless();

  // Bytes [offset, offset + bytes) of a region. `field` names the tensor in errors.
  absl::StatusOr<RegionBytes> Find(const std::string& name, uint64_t offset, uint64_t bytes,
                                   absl::string_view field) const;

 private:
  class Object;
  class Mapping;
  // One of `mapping` and `device`.
  struct Region {
    std::shared_ptr<const Mapping> mapping;
    RegisteredRegionPtr device;
    std::shared_ptr<const Object> owner;  // whose lock says that the owner lives; may be null
  };

  // Registers memory that is mapped here. The names of fields in errors begin with `kind`.
  template <typename Open>
  absl::Status Register(const std::string& name, absl::string_view kind, const std::string& key,
                        uint64_t offset, uint64_t byte_size, Open open);

  const std::vector<std::string> prefixes_;
  const std::function<size_t()> available_;
  const MemoryPinner pinner_;
  mutable Mutex mutex_;
  absl::flat_hash_map<std::string, Region> regions_ TRIBUTARY_GUARDED_BY(mutex_);
  worker::RegionId next_id_ TRIBUTARY_GUARDED_BY(mutex_) = 1;
};

// PERMISSION_DENIED: who names shared memory must be on this machine. `field` is where it was
// named.
absl::Status NotOnThisMachine(absl::string_view field);

// INVALID_ARGUMENT when bytes of the mapping were used and it turned out to be cut short; `field`
// names the tensor that lies there. `memory` may be null: OK.
absl::Status CheckWhole(const GuardedMapping* memory, absl::string_view field);

// 1..128 of [A-Za-z0-9._-], the form of cache ids and region names.
absl::Status CheckName(absl::string_view field, absl::string_view name);

}  // namespace tributary::service
