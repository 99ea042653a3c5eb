// Shared memory regions that clients registered, so that tensors need not travel in messages.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <shared_mutex>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace tributary::service {

// Bytes of a region; valid while `owner` lives, even when the region is unregistered meanwhile.
struct RegionBytes {
  std::byte* data = nullptr;
  std::shared_ptr<const void> owner;
};

// Thread safe.
class SharedMemoryRegistry {
 public:
  // Only objects whose key begins with one of `prefixes` may be mapped; any when there is none.
  explicit SharedMemoryRegistry(std::vector<std::string> prefixes = {})
      : prefixes_(std::move(prefixes)) {}

  // Maps `byte_size` bytes at `offset` of the POSIX object `key`. The same registration again is
  // OK. PERMISSION_DENIED when no prefix allows the key. Regions whose owners died are forgotten.
  absl::Status RegisterSystem(const std::string& name, const std::string& key, uint64_t offset,
                              uint64_t byte_size);
  absl::Status Unregister(const std::string& name);

  // Bytes [offset, offset + bytes) of a region. `field` names the tensor in errors.
  absl::StatusOr<RegionBytes> Find(const std::string& name, uint64_t offset, uint64_t bytes,
                                   absl::string_view field) const;

 private:
  class Region;

  absl::Status CheckKey(const std::string& key) const;

  const std::vector<std::string> prefixes_;
  mutable std::shared_mutex mutex_;
  absl::flat_hash_map<std::string, std::shared_ptr<const Region>> regions_;
};

// 1..128 of [A-Za-z0-9._-], the form of cache ids and region names.
absl::Status CheckName(absl::string_view field, absl::string_view name);

}  // namespace tributary::service
