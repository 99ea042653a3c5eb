#include "worker/memory_taker.h"

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <thread>
#include <utility>

#include "absl/status/status.h"
#include "base/sync/mutex.h"

namespace tributary::worker {
namespace {

using std::chrono::steady_clock;

// 64 MiB: what may be taken between two looks at what the machine has left.
constexpr size_t kPiecesGranted = 32;
// Between two looks at threads that tell nobody.
constexpr std::chrono::milliseconds kLook{1};

}  // namespace

class MemoryTaker::Pieces final : public MemoryThreads::Job {
 public:
  Pieces(std::shared_ptr<ShardMemory> memory, std::unique_ptr<HostMemoryLedger::Claim> claim)
      : memory_(std::move(memory)), claim_(std::move(claim)) {}

  size_t count() const { return memory_->pieces(); }

  bool TakeNext() override {
    size_t piece = next_;
    do {
      if (piece >= granted_) return false;
    } while (!next_.compare_exchange_weak(piece, piece + 1));
    bytes_taken_ += memory_->TakePiece(piece);
    ++taken_;
    return true;
  }

  bool Keep() override {
    const MutexLock lock(mutex_);
    if (claim_ == nullptr || !failed_.ok()) return false;
    const size_t taken = taken_;  // before the bytes, which may be more by then
    const size_t bytes = bytes_taken_;
    claim_->Taken(bytes - bytes_counted_);
    bytes_counted_ = bytes;
    if (taken == count()) return false;
    failed_ = claim_->CheckRoom();
    if (!failed_.ok()) {
      granted_ = 0;
      return false;
    }
    granted_ = std::min(count(), taken + kPiecesGranted);
    return true;
  }

  // Whether all is taken.
  absl::StatusOr<bool> Look() {
    if (taken_ == count()) {
      Keep();  // counts the last ones
      return true;
    }
    const MutexLock lock(mutex_);
    if (!failed_.ok()) return failed_;
    return false;
  }

  void Stop() {
    granted_ = 0;
    const MutexLock lock(mutex_);
    claim_ = nullptr;
  }

 private:
  const std::shared_ptr<ShardMemory> memory_;
  std::atomic<size_t> next_ = 0;         // piece
  std::atomic<size_t> granted_ = 0;      // pieces
  std::atomic<size_t> taken_ = 0;        // pieces
  std::atomic<size_t> bytes_taken_ = 0;  // of no less than taken_ pieces
  Mutex mutex_;                          // no thread of MemoryThreads holds it but the keeper
  // Null: stopped.
  std::unique_ptr<HostMemoryLedger::Claim> claim_ TRIBUTARY_GUARDED_BY(mutex_);
  size_t bytes_counted_ TRIBUTARY_GUARDED_BY(mutex_) = 0;
  absl::Status failed_ TRIBUTARY_GUARDED_BY(mutex_);
};

MemoryTaker::MemoryTaker(std::shared_ptr<ShardMemory> memory,
                         std::unique_ptr<HostMemoryLedger::Claim> claim, MemoryThreads& threads)
    : pieces_(std::make_shared<Pieces>(std::move(memory), std::move(claim))), threads_(threads) {}

MemoryTaker::~MemoryTaker() { pieces_->Stop(); }

absl::StatusOr<bool> MemoryTaker::Await(steady_clock::time_point until) {
  if (pieces_->count() == 1) {
    if (!begun_ && pieces_->Keep()) pieces_->TakeNext();
    begun_ = true;
    return pieces_->Look();
  }
  if (!begun_) {
    if (!threads_.Add(pieces_)) return absl::ResourceExhaustedError("the system gives no thread");
    begun_ = true;
    // Even if they are quick: who asks for no time is told that it takes some.
    if (steady_clock::now() >= until) return false;
  }
  for (;;) {
    const absl::StatusOr<bool> all = pieces_->Look();
    const steady_clock::time_point now = steady_clock::now();
    // Who has no time for a second look need not wait for one.
    if (!all.ok() || *all || until - now < kLook) return all;
    std::this_thread::sleep_for(kLook);
  }
}

}  // namespace tributary::worker
