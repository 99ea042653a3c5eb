#include "base/cuda/lent_memory.h"

#include <map>
#include <utility>

#include "base/sync/mutex.h"

namespace tributary::cuda {
namespace {

struct Table {
  Mutex mutex;
  std::map<const void*, std::weak_ptr<void>> lent TRIBUTARY_GUARDED_BY(mutex);
};

// Never destroyed: a share may be dropped when the process ends.
Table& TheTable() {
  static auto* const table = new Table();
  return *table;
}

}  // namespace

std::shared_ptr<void> LendMemory(void* address, std::function<void(void*)> free) {
  std::shared_ptr<void> share(address, [free = std::move(free)](void* memory) {
    {
      // Before the address may be given to somebody else.
      const MutexLock lock(TheTable().mutex);
      TheTable().lent.erase(memory);
    }
    free(memory);
  });
  const MutexLock lock(TheTable().mutex);
  TheTable().lent[address] = share;
  return share;
}

std::shared_ptr<void> ShareOfLentMemory(const void* address) {
  const MutexLock lock(TheTable().mutex);
  const auto found = TheTable().lent.find(address);
  return found == TheTable().lent.end() ? nullptr : found->second.lock();
}

}  // namespace tributary::cuda
