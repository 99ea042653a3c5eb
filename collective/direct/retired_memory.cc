#include "collective/direct/retired_memory.h"

#include <algorithm>
#include <utility>

namespace tributary::collective {

RetiredMemory::~RetiredMemory() { Sweep(); }

void RetiredMemory::Add(size_t bytes, std::function<bool()> try_free) {
  const MutexLock lock(mutex_);
  buffers_.push_back({bytes, std::move(try_free)});
}

size_t RetiredMemory::Sweep() {
  const MutexLock lock(mutex_);
  std::erase_if(buffers_, [](const Buffer& b) { return b.try_free(); });
  size_t held = 0;
  for (const Buffer& b : buffers_) held += b.bytes;
  return held;
}

}  // namespace tributary::collective
