// Layers through a mailbox in shared memory, for hosts on the CPUs of this machine.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <span>

#include "base/sync/mutex.h"
#include "service/coordinator/sessions/layer_channel.h"
#include "service/data/host_mailbox.h"
#include "service/data/session_terms.h"

namespace tributary::service {

// Thread safe.
class MailboxChannel final : public LayerChannel {
 public:
  // `spin`: how long it waits for the host with eyes open before it sleeps.
  MailboxChannel(const SessionTerms& terms, std::shared_ptr<HostMailbox> mailbox,
                 std::chrono::nanoseconds spin)
      : terms_(terms), mailbox_(std::move(mailbox)), spin_(spin) {}

  absl::StatusOr<LayerTensors> Take(const LayerCall& call,
                                    std::chrono::steady_clock::time_point until) override;
  void Deliver(const LayerCall& call, std::span<const std::byte> result) override;
  void End(const absl::Status& why) override;

 private:
  absl::Status ended() const;

  const SessionTerms terms_;
  const std::shared_ptr<HostMailbox> mailbox_;
  const std::chrono::nanoseconds spin_;
  // Not 0: ended_ is set. The mailbox's own word is not asked, for the host may write to it.
  uint32_t is_over_ = 0;

  mutable Mutex mutex_;
  absl::Status ended_ TRIBUTARY_GUARDED_BY(mutex_);
};

}  // namespace tributary::service
