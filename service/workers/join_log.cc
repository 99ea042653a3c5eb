#include "service/workers/join_log.h"

#include "absl/strings/str_cat.h"
#include "base/status/errors.h"

namespace tributary::service {
namespace {

// Whoever reaches the port can make things to remember.
constexpr size_t kMostRemembered = 256;

}  // namespace

bool JoinLog::IsNews(const std::string& what) {
  if (log_ == nullptr) return false;
  const auto now = std::chrono::steady_clock::now();
  const MutexLock lock(mutex_);
  const auto found = said_.find(what);
  if (found != said_.end() && now < found->second + kAgain) return false;
  if (said_.size() >= kMostRemembered) said_.clear();
  said_[what] = now;
  return true;
}

void JoinLog::Waits(const std::string& ranks) {
  if (IsNews(ranks)) log_->Info("waiting for workers", {{"missing", ranks}});
}

void JoinLog::Refused(absl::string_view address, const absl::Status& why) {
  if (!IsNews(absl::StrCat(address, ": ", why.message()))) return;
  const bool stands_by = FieldOf(why) == "rank";
  log_->Write(stands_by ? telemetry::LogLevel::kInfo : telemetry::LogLevel::kWarning,
              "a worker was refused", {{"worker", address}, {"why", why.message()}});
}

void JoinLog::NotFormed(const std::string& why) {
  if (IsNews(why)) log_->Warning("the group could not be formed", {{"why", why}});
}

}  // namespace tributary::service
