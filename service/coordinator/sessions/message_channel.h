// Layers as messages on the session's stream, for hosts on other machines.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <set>
#include <span>

#include "base/mailbox/layout.h"
#include "base/sync/mutex.h"
#include "service/coordinator/sessions/layer_channel.h"
#include "service/data/session_terms.h"
#include "tributary/v1/session.pb.h"

namespace tributary::service {

// Thread safe.
class MessageChannel final : public LayerChannel {
 public:
  // `send`: a message to the host. `on_room`: a layer that was kept here was taken. Both are called
  // without the channel's lock.
  MessageChannel(const SessionTerms& terms, std::function<void(v1::SessionReply)> send,
                 std::function<void()> on_room)
      : terms_(terms), send_(std::move(send)), on_room_(std::move(on_room)) {}

  absl::StatusOr<LayerTensors> Take(const LayerCall& call,
                                    std::chrono::steady_clock::time_point until) override;
  void Deliver(const LayerCall& call, std::span<const std::byte> result) override;
  void End(const absl::Status& why) override;

  // A layer has come. Layers of refused steps are left out.
  void Put(v1::LayerInput layer);
  // Fewer layers are kept here than the session has slots.
  bool HasRoom() const;
  // Layers of this step are not taken any more.
  void Refuse(uint64_t step_id);

 private:
  using LayerPtr = std::shared_ptr<const v1::LayerInput>;

  // Steps that were refused lately are remembered: a host may have sent layers before it knew.
  static constexpr size_t kRemembered = 64;

  mailbox::SlotRoom BytesOf(const LayerCall& call) const;
  absl::Status Check(const LayerCall& call, const v1::LayerInput& layer) const;

  const SessionTerms terms_;
  const std::function<void(v1::SessionReply)> send_;
  const std::function<void()> on_room_;

  mutable Mutex mutex_;
  CondVar changed_;
  std::deque<LayerPtr> layers_ TRIBUTARY_GUARDED_BY(mutex_);
  std::set<uint64_t> refused_ TRIBUTARY_GUARDED_BY(mutex_);
  absl::Status ended_ TRIBUTARY_GUARDED_BY(mutex_);
};

}  // namespace tributary::service
