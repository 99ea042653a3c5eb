#include "examples/tinylm/for_each.h"

#include <mutex>
#include <thread>
#include <vector>

namespace tributary::tinylm {

absl::Status ForEach(int64_t items, int threads,
                     const std::function<absl::Status(int64_t item, int thread)>& work) {
  std::mutex mutex;
  int64_t next = 0;
  absl::Status first_error;
  const auto take = [&](int thread) {
    std::unique_lock lock(mutex);
    while (first_error.ok() && next < items) {
      const int64_t item = next++;
      lock.unlock();
      const absl::Status status = work(item, thread);
      lock.lock();
      first_error.Update(status);
    }
  };
  std::vector<std::thread> others;
  others.reserve(threads - 1);
  for (int thread = 1; thread < threads; ++thread) others.emplace_back(take, thread);
  take(0);
  for (std::thread& other : others) other.join();
  return first_error;
}

}  // namespace tributary::tinylm
