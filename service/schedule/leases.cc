#include "service/schedule/leases.h"

#include <algorithm>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "base/status/errors.h"

namespace tributary::service {
namespace {

constexpr size_t kLongestName = 128;

}  // namespace

absl::Status Leases::CheckName(absl::string_view name, absl::string_view field) {
  const auto allowed = [](char c) {
    return absl::ascii_isalnum(static_cast<unsigned char>(c)) || c == '.' || c == '_' || c == '-';
  };
  if (!name.empty() && name.size() <= kLongestName &&
      std::all_of(name.begin(), name.end(), allowed)) {
    return absl::OkStatus();
  }
  return InvalidField(field, absl::StrCat("must be 1 to ", kLongestName, " of [A-Za-z0-9._-]"));
}

Leases::Holder::~Holder() {
  const MutexLock lock(state_->mutex);
  --lease_->holders_;
  lease_->renewed_ = Clock::now();
  if (lease_->holders_ > 0) return;
  // A lease to which nothing belongs is forgotten at once, so that nobody can pile them up. Only
  // a holder's call, or a sequence, could give it to a sequence.
  const auto known = state_->by_name.find(lease_->name_);
  if (known == state_->by_name.end() || known->second != lease_) return;
  lease_.reset();
  if (known->second.use_count() == 1) state_->by_name.erase(known);
}

LeasePtr Leases::Find(const std::string& name, Clock::time_point now) {
  const MutexLock lock(state_->mutex);
  LeasePtr& lease = state_->by_name[name];
  if (lease == nullptr) {
    lease = std::make_shared<Lease>(name);
    if (timeout_.count() > 0) state_->next_look = std::min(state_->next_look, now + timeout_);
  }
  lease->renewed_ = now;
  return lease;
}

Leases::HolderPtr Leases::Present(const std::string& name) {
  // Nobody forgets it in between: it is referred to here, and has just been renewed.
  LeasePtr lease = Find(name, Clock::now());
  const MutexLock lock(state_->mutex);
  ++lease->holders_;
  return std::make_shared<const Holder>(state_, std::move(lease));
}

LeasePtr Leases::Restore(const std::string& name, Clock::time_point now) { return Find(name, now); }

Leases::Clock::time_point Leases::NextLook() const {
  const MutexLock lock(state_->mutex);
  return state_->next_look;
}

std::vector<LeasePtr> Leases::TakeEnded(Clock::time_point now) {
  const MutexLock lock(state_->mutex);
  std::vector<LeasePtr> ended;
  if (now < state_->next_look) return ended;
  Clock::time_point next = Clock::time_point::max();
  for (auto it = state_->by_name.begin(); it != state_->by_name.end();) {
    const LeasePtr& lease = it->second;
    // Whoever lets go of it later renews it then.
    const Clock::time_point end = (lease->holders_ > 0 ? now : lease->renewed_) + timeout_;
    const bool unused = lease->holders_ == 0 && lease.use_count() == 1;
    if (unused || end <= now) {
      if (!unused) ended.push_back(lease);
      state_->by_name.erase(it++);
    } else {
      next = std::min(next, end);
      ++it;
    }
  }
  state_->next_look = next;
  return ended;
}

size_t Leases::size() const {
  const MutexLock lock(state_->mutex);
  return state_->by_name.size();
}

}  // namespace tributary::service
