#include "service/client/offset_allocator.h"

#include <iterator>

namespace tributary::client {

OffsetAllocator::OffsetAllocator(uint64_t size) {
  const uint64_t whole = size / kAlignment * kAlignment;
  if (whole > 0) free_.emplace(0, whole);
}

std::optional<uint64_t> OffsetAllocator::Allocate(uint64_t bytes) {
  // Rounding up must not wrap around to a small number.
  if (bytes == 0 || bytes > UINT64_MAX - kAlignment) return std::nullopt;
  const uint64_t length = RoundUp(bytes);
  for (auto range = free_.begin(); range != free_.end(); ++range) {
    const auto [offset, available] = *range;
    if (available < length) continue;
    free_.erase(range);
    if (available > length) free_.emplace(offset + length, available - length);
    used_ += length;
    return offset;
  }
  return std::nullopt;
}

void OffsetAllocator::Free(uint64_t offset, uint64_t bytes) {
  uint64_t length = RoundUp(bytes);
  used_ -= length;
  auto next = free_.lower_bound(offset);
  if (next != free_.end() && offset + length == next->first) {
    length += next->second;
    next = free_.erase(next);
  }
  if (next != free_.begin()) {
    const auto before = std::prev(next);
    if (before->first + before->second == offset) {
      before->second += length;
      return;
    }
  }
  free_.emplace(offset, length);
}

}  // namespace tributary::client
