#include "service/api/byte_budget.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "base/status/rpc_errors.h"

namespace tributary::service {

absl::Status CheckMessage(size_t bytes, size_t most) {
  if (bytes <= most) return absl::OkStatus();
  return Exhausted("max_message_bytes",
                   absl::StrCat("the request has ", bytes, " bytes, a message at most ", most));
}

std::shared_ptr<ByteBudget> ByteBudget::Create(const ByteLimits& limits, OnRefused on_refused) {
  return std::shared_ptr<ByteBudget>(new ByteBudget(limits, std::move(on_refused)));
}

absl::StatusOr<ByteBudget::ChargePtr> ByteBudget::Take(const std::string& caller, int64_t bytes) {
  if (bytes <= kSmallRequest) {
    const MutexLock lock(mutex_);
    Count(caller, bytes);
  } else if (absl::Status full = Add(caller, 0, bytes); !full.ok()) {
    return full;
  }
  return std::make_shared<Charge>(shared_from_this(), caller, bytes);
}

bool ByteBudget::HasRoom(const std::string& caller, std::function<void()> on_room) {
  const MutexLock lock(mutex_);
  if (Full(caller, 0).empty()) return true;
  waiting_.push_back({caller, std::move(on_room)});
  return false;
}

int64_t ByteBudget::in_flight() const {
  const MutexLock lock(mutex_);
  return all_;
}

std::string ByteBudget::Full(const std::string& caller, int64_t own) const {
  const auto held = by_caller_.find(caller);
  const int64_t others = (held == by_caller_.end() ? 0 : held->second) - own;
  if (limits_.per_caller > 0 && others >= limits_.per_caller) {
    return absl::StrCat("client:", caller, " bytes");
  }
  if (limits_.in_all > 0 && all_ - own >= limits_.in_all) return "bytes of all clients";
  return "";
}

void ByteBudget::Count(const std::string& caller, int64_t bytes) {
  if (bytes == 0) return;
  all_ += bytes;
  by_caller_[caller] += bytes;
}

absl::Status ByteBudget::Add(const std::string& caller, int64_t own, int64_t bytes) {
  std::string full;
  ByteLimits limits;
  {
    const MutexLock lock(mutex_);
    limits = limits_;
    full = Full(caller, own);
    if (full.empty()) {
      Count(caller, bytes);
      return absl::OkStatus();
    }
  }
  if (on_refused_) on_refused_(ClientLimit::kBytes);
  return Exhausted(
      full, absl::StrCat("calls in flight have as many bytes as they may (", limits.per_caller,
                         " of a client, ", limits.in_all,
                         " in all; 0 is no limit); repeat the call when some are answered"));
}

void ByteBudget::Give(const std::string& caller, int64_t bytes) {
  std::vector<std::function<void()>> woken;
  {
    const MutexLock lock(mutex_);
    all_ -= bytes;
    const auto held = by_caller_.find(caller);
    if (held != by_caller_.end() && (held->second -= bytes) == 0) by_caller_.erase(held);
    woken = TakeThoseWithRoom();
  }
  for (const auto& wake : woken) wake();
}

std::vector<std::function<void()>> ByteBudget::TakeThoseWithRoom() {
  std::vector<std::function<void()>> woken;
  const auto first = std::stable_partition(
      waiting_.begin(), waiting_.end(), [this](const Waiting& waiting) TRIBUTARY_REQUIRES(mutex_) {
        return !Full(waiting.caller, 0).empty();
      });
  for (auto it = first; it != waiting_.end(); ++it) woken.push_back(std::move(it->on_room));
  waiting_.erase(first, waiting_.end());
  return woken;
}

void ByteBudget::SetLimits(const ByteLimits& limits) {
  std::vector<std::function<void()>> woken;
  {
    const MutexLock lock(mutex_);
    limits_ = limits;
    woken = TakeThoseWithRoom();
  }
  for (const auto& wake : woken) wake();
}

ByteLimits ByteBudget::limits() const {
  const MutexLock lock(mutex_);
  return limits_;
}

absl::Status ByteBudget::Charge::Add(int64_t bytes) {
  if (bytes == 0) return absl::OkStatus();
  if (absl::Status full = budget_->Add(caller_, bytes_, bytes); !full.ok()) return full;
  bytes_ += bytes;
  return absl::OkStatus();
}

void ByteBudget::Charge::Reduce(int64_t bytes) {
  if (bytes >= bytes_) return;
  budget_->Give(caller_, bytes_ - bytes);
  bytes_ = bytes;
}

}  // namespace tributary::service
