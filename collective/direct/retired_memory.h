// Device memory of epochs gone by that a peer may still hold mapped.
//
// A direct exchange stores into its peers' memory. When an epoch ends, a rank that is stopped, or
// late, may have such stores ahead of it: they must land where nothing is read any more and nothing
// else lives. So a buffer is freed once every peer has said that it is through with it, or, of a
// peer on this machine, once its process is gone. Until then it waits here.
#pragma once

#include <cstddef>
#include <functional>
#include <mutex>
#include <vector>

namespace tributary::collective {

class RetiredMemory {
 public:
  RetiredMemory() = default;
  // Frees what may be freed, and leaves the rest to the end of the process.
  ~RetiredMemory();
  RetiredMemory(const RetiredMemory&) = delete;
  RetiredMemory& operator=(const RetiredMemory&) = delete;

  // `try_free` frees the memory and returns true once no peer can reach it any more.
  void Add(size_t bytes, std::function<bool()> try_free);
  // Bytes still held, after freeing what may be freed.
  size_t Sweep();

 private:
  struct Buffer {
    size_t bytes;
    std::function<bool()> try_free;
  };
  std::mutex mutex_;
  std::vector<Buffer> buffers_;
};

}  // namespace tributary::collective
