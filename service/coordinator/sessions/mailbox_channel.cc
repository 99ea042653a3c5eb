#include "service/coordinator/sessions/mailbox_channel.h"

#include <cstring>
#include <utility>

#include "base/mailbox/cpu_doorbell.h"
#include "worker/slot_bytes.h"

namespace tributary::service {
namespace {

worker::TensorView ViewOf(const std::byte* data, size_t bytes, DType dtype, bool pinned) {
  if (bytes == 0) return {};
  return {.data = data, .dtype = dtype, .bytes = bytes, .pinned = pinned};
}

}  // namespace

absl::StatusOr<LayerTensors> MailboxChannel::Take(const LayerCall& call,
                                                  std::chrono::steady_clock::time_point until) {
  switch (mailbox::Await(mailbox_->arrived(), call.count + 1, &is_over_, spin_, until)) {
    case mailbox::Awaited::kReached:
      break;
    case mailbox::Awaited::kEnded:
      return ended();
    case mailbox::Awaited::kTimedOut:
      return NotHandedOver(call, terms_);
  }
  if (mailbox_->lost()) return absl::ResourceExhaustedError("no memory was left for the mailbox");
  const mailbox::SlotRoom bytes =
      worker::SlotBytes(call.geometry, terms_.command, call.query_rows, call.new_tokens);
  const mailbox::Layout& layout = mailbox_->layout();
  std::byte* const slot = mailbox_->SlotOf(call.count);
  const bool pinned = mailbox_->pinned();
  LayerTensors tensors{.q = ViewOf(slot + layout.q, bytes.q, terms_.command.q_dtype, pinned),
                       .k = ViewOf(slot + layout.k, bytes.k, terms_.command.kv_dtype, pinned),
                       .v = ViewOf(slot + layout.v, bytes.v, terms_.command.kv_dtype, pinned),
                       .owner = mailbox_};
  if (bytes.output == 0) return tensors;
  tensors.output = {.data = slot + layout.output, .pinned = pinned};
  if (terms_.command.return_lse) tensors.lse = {.data = slot + layout.lse, .pinned = pinned};
  return tensors;
}

void MailboxChannel::Deliver(const LayerCall& call, std::span<const std::byte> result) {
  if (!result.empty()) {
    const mailbox::SlotRoom bytes =
        worker::SlotBytes(call.geometry, terms_.command, call.query_rows, call.new_tokens);
    std::byte* const slot = mailbox_->SlotOf(call.count);
    std::memcpy(slot + mailbox_->layout().output, result.data(), bytes.output);
    result = result.subspan(bytes.output);
    if (!result.empty()) std::memcpy(slot + mailbox_->layout().lse, result.data(), result.size());
  }
  mailbox::Ring(mailbox_->finished(), call.count + 1);
}

void MailboxChannel::End(const absl::Status& why) {
  {
    const MutexLock lock(mutex_);
    if (!ended_.ok()) return;
    ended_ = why;
  }
  mailbox::SetStatus(mailbox_->status(), static_cast<uint32_t>(why.raw_code()));
  mailbox::SetStatus(&is_over_, 1);
  mailbox::Wake(mailbox_->finished());
  mailbox::Wake(mailbox_->arrived());
}

absl::Status MailboxChannel::ended() const {
  const MutexLock lock(mutex_);
  return ended_;
}

}  // namespace tributary::service
