#include "worker/host_memory_ledger.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "absl/memory/memory.h"
#include "absl/strings/str_cat.h"
#include "worker/cache_spec.h"

namespace tributary::worker {
namespace {

constexpr size_t kLeastMargin = size_t{64} << 20;
constexpr size_t kMostMargin = size_t{1} << 30;

}  // namespace

size_t MemoryMargin(size_t available) {
  return std::clamp(available / 32, kLeastMargin, kMostMargin);
}

std::shared_ptr<HostMemoryLedger> HostMemoryLedger::Create(std::function<size_t()> available) {
  return absl::WrapUnique(new HostMemoryLedger(std::move(available)));
}

size_t HostMemoryLedger::AvailableNow() const {
  size_t available = available_();
  if (available == std::numeric_limits<size_t>::max()) return available;
  available += returning_;
  const size_t spoken_for = claimed_ + MemoryMargin(available);
  return available - std::min(available, spoken_for);
}

size_t HostMemoryLedger::Available() const {
  const MutexLock lock(mutex_);
  return AvailableNow();
}

absl::StatusOr<std::unique_ptr<HostMemoryLedger::Claim>> HostMemoryLedger::Take(size_t bytes) {
  const MutexLock lock(mutex_);
  const size_t available = AvailableNow();
  if (bytes > available) {
    return ShardOutOfMemory(
        bytes, absl::StrCat(available, " are available on the machine, beside ", claimed_,
                            " that other ranks are taking and a margin"));
  }
  claimed_ += bytes;
  return std::make_unique<Claim>(shared_from_this(), bytes);
}

HostMemoryLedger::Returning::Returning(std::shared_ptr<HostMemoryLedger> ledger, size_t bytes)
    : ledger_(std::move(ledger)), bytes_(bytes) {
  const MutexLock lock(ledger_->mutex_);
  ledger_->returning_ += bytes_;
}

HostMemoryLedger::Returning::~Returning() { Returned(bytes_); }

void HostMemoryLedger::Returning::Returned(size_t bytes) {
  bytes = std::min(bytes, bytes_);
  bytes_ -= bytes;
  const MutexLock lock(ledger_->mutex_);
  ledger_->returning_ -= bytes;
}

void HostMemoryLedger::Claim::Taken(size_t bytes) {
  bytes = std::min(bytes, bytes_);
  bytes_ -= bytes;
  const MutexLock lock(ledger_->mutex_);
  ledger_->claimed_ -= bytes;
}

absl::Status HostMemoryLedger::Claim::CheckRoom() const {
  const size_t available = ledger_->available_();
  if (available >= std::min(bytes_, kLeastMargin) + kLeastMargin) return absl::OkStatus();
  return ShardOutOfMemory(
      bytes_, absl::StrCat("are yet to be taken, and ", available, " are left on the machine"));
}

}  // namespace tributary::worker
