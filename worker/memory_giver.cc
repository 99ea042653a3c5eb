#include "worker/memory_giver.h"

#include <cstddef>
#include <utility>

namespace tributary::worker {
namespace {

// What a step does not notice.
constexpr size_t kFewPieces = 2;

// Given back when this is destroyed.
class GivenBack {
 public:
  GivenBack(std::shared_ptr<ShardMemory> memory, std::shared_ptr<HostMemoryLedger> ledger)
      : memory_(std::move(memory)), returning_(std::move(ledger), memory_->bytes()) {}
  ~GivenBack() {
    memory_->GiveBack([this](size_t bytes) { returning_.Returned(bytes); });
  }
  GivenBack(const GivenBack&) = delete;
  GivenBack& operator=(const GivenBack&) = delete;

 private:
  const std::shared_ptr<ShardMemory> memory_;
  HostMemoryLedger::Returning returning_;
};

}  // namespace

void GiveBack(std::shared_ptr<ShardMemory> memory, std::shared_ptr<HostMemoryLedger> ledger,
              MemoryThreads& threads) {
  if (memory->pieces() <= kFewPieces) return;
  threads.Drop(std::make_shared<GivenBack>(std::move(memory), std::move(ledger)));
}

}  // namespace tributary::worker
