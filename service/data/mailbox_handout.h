// Mailboxes that wait for their hosts. gRPC carries no descriptors, so a host whose rights were
// checked when it opened the session is told a secret there. Whoever shows the secret at another
// socket (api/companion_socket.h) gets the mailbox's descriptor.
#pragma once

#include <chrono>
#include <cstddef>
#include <map>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "base/sync/mutex.h"
#include "service/data/host_mailbox.h"

namespace tributary::service {

// Thread safe.
class MailboxHandout {
 public:
  using Clock = std::chrono::steady_clock;
  static constexpr size_t kTokenBytes = 16;
  static constexpr std::chrono::seconds kGoodFor{10};

  // kTokenBytes random bytes.
  static absl::StatusOr<std::string> MakeSecret();

  // States the socket at which hosts ask for mailboxes, or why there is none.
  void SetSocket(absl::StatusOr<std::string> path);
  absl::StatusOr<std::string> socket() const;

  // Returns a secret of kTokenBytes random bytes that is good once, and for kGoodFor. An offer does
  // not keep the mailbox: when the session has ended, it is not handed out.
  absl::StatusOr<std::string> Offer(const std::shared_ptr<HostMailbox>& mailbox,
                                    Clock::time_point now);
  // Null when the secret is not good, or not any more.
  std::shared_ptr<HostMailbox> Take(absl::string_view token, Clock::time_point now);

 private:
  struct Offered {
    std::weak_ptr<HostMailbox> mailbox;
    Clock::time_point until;
  };

  mutable Mutex mutex_;
  absl::StatusOr<std::string> socket_ TRIBUTARY_GUARDED_BY(mutex_) =
      absl::FailedPreconditionError("the service listens at no Unix socket");
  std::map<std::string, Offered> offered_ TRIBUTARY_GUARDED_BY(mutex_);  // by secret
};

}  // namespace tributary::service
