#include "service/coordinator/sessions/mailbox_channel.h"

#include <utility>

#include "base/mailbox/cpu_doorbell.h"
#include "worker/slot_bytes.h"

namespace tributary::service {
namespace {

worker::TensorView ViewOf(const std::byte* data, size_t bytes, DType dtype) {
  if (bytes == 0) return {};
  return {.data = data, .dtype = dtype, .bytes = bytes};
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
  LayerTensors tensors{.q = ViewOf(slot + layout.q, bytes.q, terms_.command.q_dtype),
                       .k = ViewOf(slot + layout.k, bytes.k, terms_.command.kv_dtype),
                       .v = ViewOf(slot + layout.v, bytes.v, terms_.command.kv_dtype),
                       .owner = mailbox_};
  if (bytes.output > 0) tensors.output = slot + layout.output;
  if (bytes.output > 0 && terms_.command.return_lse) tensors.lse = slot + layout.lse;
  return tensors;
}

void MailboxChannel::Deliver(const LayerCall& call) {
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
