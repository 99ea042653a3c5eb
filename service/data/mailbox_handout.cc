#include "service/data/mailbox_handout.h"

#include <sys/random.h>

#include <utility>

#include "base/status/status_macros.h"

namespace tributary::service {

absl::StatusOr<std::string> MailboxHandout::MakeSecret() {
  std::string secret(kTokenBytes, '\0');
  // So few bytes come at once or not at all.
  if (getrandom(secret.data(), secret.size(), 0) != static_cast<ssize_t>(secret.size())) {
    return absl::InternalError("the system has no random bytes");
  }
  return secret;
}

void MailboxHandout::SetSocket(absl::StatusOr<std::string> path) {
  const MutexLock lock(mutex_);
  socket_ = std::move(path);
}

absl::StatusOr<std::string> MailboxHandout::socket() const {
  const MutexLock lock(mutex_);
  return socket_;
}

absl::StatusOr<std::string> MailboxHandout::Offer(const std::shared_ptr<HostMailbox>& mailbox,
                                                  Clock::time_point now) {
  TRIBUTARY_ASSIGN_OR_RETURN(std::string token, MakeSecret());
  const MutexLock lock(mutex_);
  std::erase_if(offered_, [now](const auto& offer) { return offer.second.until < now; });
  offered_.emplace(token, Offered{mailbox, now + kGoodFor});
  return token;
}

std::shared_ptr<HostMailbox> MailboxHandout::Take(absl::string_view token, Clock::time_point now) {
  const MutexLock lock(mutex_);
  const auto found = offered_.find(std::string(token));
  if (found == offered_.end()) return nullptr;
  const Offered offered = std::move(found->second);
  offered_.erase(found);
  return now <= offered.until ? offered.mailbox.lock() : nullptr;
}

}  // namespace tributary::service
