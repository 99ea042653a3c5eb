#include "service/api/call_quota.h"

#include "absl/strings/str_cat.h"
#include "base/status/rpc_errors.h"

namespace tributary::service {

std::shared_ptr<CallQuota> CallQuota::Create(int64_t most_per_caller, OnRefused on_refused,
                                             ClientLimit what) {
  return std::shared_ptr<CallQuota>(new CallQuota(most_per_caller, std::move(on_refused), what));
}

absl::StatusOr<CallQuota::Admission> CallQuota::Admit(const std::string& caller) {
  const int64_t most = most_.load();
  if (most == 0) return Admission();
  {
    const MutexLock lock(mutex_);
    int64_t& in_flight = in_flight_[caller];
    if (in_flight >= most) {
      if (on_refused_) on_refused_(what_);
      return Exhausted(absl::StrCat("client:", caller, " ", Name(what_)),
                       absl::StrCat("'", caller, "' has ", most, " ", Name(what_),
                                    " in flight, the most a client may have"));
    }
    ++in_flight;
  }
  // A pointer to nothing whose end gives the place back.
  return Admission(nullptr,
                   [self = shared_from_this(), caller](const void*) { self->Leave(caller); });
}

void CallQuota::Leave(const std::string& caller) {
  const MutexLock lock(mutex_);
  const auto found = in_flight_.find(caller);
  if (--found->second == 0) in_flight_.erase(found);
}

}  // namespace tributary::service
