// Device memory of epochs gone by that a peer may still hold mapped.
//
// A direct exchange stores into the memory of its peers. When an epoch ends, a rank that is stopped
// or late may still make such stores. They must land where nothing is read any more and nothing
// else lives. A buffer is therefore freed only when every peer has said that it will not write to
// it again, or, for a peer on this machine, when its process has ended. Until then it waits here.
//
// A rank owns one object for as long as it lives; the groups that it makes, one after the other,
// add their buffers to it.
#pragma once

#include <cstddef>
#include <functional>
#include <vector>

#include "base/sync/mutex.h"

namespace tributary::collective {

class RetiredMemory {
 public:
  RetiredMemory() = default;
  // Frees what may be freed. The rest stays until the process ends.
  ~RetiredMemory();
  RetiredMemory(const RetiredMemory&) = delete;
  RetiredMemory& operator=(const RetiredMemory&) = delete;

  // `try_free` frees the memory and returns true, or returns false while a peer can still reach it.
  void Add(size_t bytes, std::function<bool()> try_free) TRIBUTARY_EXCLUDES(mutex_);
  // Bytes still held, after freeing what may be freed.
  size_t Sweep() TRIBUTARY_EXCLUDES(mutex_);

 private:
  struct Buffer {
    size_t bytes;
    std::function<bool()> try_free;
  };
  Mutex mutex_;
  std::vector<Buffer> buffers_ TRIBUTARY_GUARDED_BY(mutex_);
};

}  // namespace tributary::collective
