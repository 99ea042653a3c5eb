#include "worker/memory_taker.h"

#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <system_error>
#include <utility>

namespace tributary::worker {
namespace {

// Whoever computes goes first, and who holds a lock of the address space is still not kept from
// giving it back for long.
constexpr int kNice = 10;
constexpr size_t kPiecesBetweenChecks = 8;

}  // namespace

MemoryTaker::MemoryTaker(KvShard& shard, std::unique_ptr<HostMemoryLedger::Claim> claim,
                         int threads)
    : shard_(shard), thread_count_(threads), claim_(std::move(claim)) {}

MemoryTaker::~MemoryTaker() {
  {
    const MutexLock lock(mutex_);
    stopped_ = true;
  }
  for (std::thread& thread : threads_) thread.join();
}

absl::StatusOr<bool> MemoryTaker::Await(std::chrono::steady_clock::time_point until) {
  if (shard_.pieces() == 1) {
    TakeNext();
  } else if (threads_.empty()) {
    if (!Begin()) return absl::ResourceExhaustedError("the system gives no thread");
    // Even if they are quick: who asks for no time is told that it takes some.
    if (std::chrono::steady_clock::now() >= until) return false;
  }
  const MutexLock lock(mutex_);
  while (taken_ < shard_.pieces() && failed_.ok()) {
    if (over_.WaitUntil(mutex_, until)) continue;
    break;
  }
  if (!failed_.ok()) return failed_;
  return taken_ == shard_.pieces();
}

bool MemoryTaker::Begin() {
  const size_t wanted = std::min(static_cast<size_t>(thread_count_), shard_.pieces());
  threads_.reserve(wanted);
  try {
    while (threads_.size() < wanted) threads_.emplace_back([this] { Run(); });
  } catch (const std::system_error&) {  // the others do it
  }
  return !threads_.empty();
}

void MemoryTaker::Run() {
  // This thread's alone, as Linux has it. Without it the thread is only less polite.
  static_cast<void>(setpriority(PRIO_PROCESS, static_cast<id_t>(gettid()), kNice));
  while (TakeNext()) {
  }
}

bool MemoryTaker::TakeNext() {
  size_t piece = 0;
  {
    const MutexLock lock(mutex_);
    if (stopped_ || !failed_.ok() || next_ == shard_.pieces()) return false;
    if (next_ % kPiecesBetweenChecks == 0) failed_ = claim_->CheckRoom();
    if (!failed_.ok()) {
      over_.NotifyAll();
      return false;
    }
    piece = next_++;
  }
  const absl::StatusOr<size_t> bytes = shard_.TakePiece(piece);
  const MutexLock lock(mutex_);
  if (bytes.ok()) {
    claim_->Taken(*bytes);
    ++taken_;
  } else if (failed_.ok()) {
    failed_ = bytes.status();
  }
  if (!failed_.ok() || taken_ == shard_.pieces()) over_.NotifyAll();
  return failed_.ok();
}

}  // namespace tributary::worker
