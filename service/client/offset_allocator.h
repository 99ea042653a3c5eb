// Hands out ranges of [0, size) and takes them back.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>

namespace tributary::client {

// First fit over an ordered list of free ranges, neighbours joined when they are returned. Calls in
// flight are few and live shortly, so the list stays short. Not thread safe.
class OffsetAllocator {
 public:
  // Ranges begin and end on multiples of a cache line, so that no two calls share one.
  static constexpr uint64_t kAlignment = 64;

  explicit OffsetAllocator(uint64_t size);

  // The offset of `bytes` (> 0) bytes; none when no free range is long enough.
  std::optional<uint64_t> Allocate(uint64_t bytes);
  // Takes back what Allocate(bytes) returned.
  void Free(uint64_t offset, uint64_t bytes);

  uint64_t used() const { return used_; }

 private:
  static uint64_t RoundUp(uint64_t bytes) {
    return (bytes + kAlignment - 1) / kAlignment * kAlignment;
  }

  std::map<uint64_t, uint64_t> free_;  // offset -> length; disjoint, no two adjacent
  uint64_t used_ = 0;
};

}  // namespace tributary::client
