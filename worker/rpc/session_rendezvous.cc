#include "worker/rpc/session_rendezvous.h"

#include <utility>

namespace tributary::worker {

SessionRendezvous::SessionRendezvous(uint64_t epoch, std::shared_ptr<Outbox> outbox)
    : epoch_(epoch), outbox_(std::move(outbox)) {}

tributary::Status SessionRendezvous::Set(const std::string& key, const std::string& value) {
  v1::WorkerMessage message;
  message.set_epoch(epoch_);
  message.mutable_rendezvous_put()->set_key(key);
  message.mutable_rendezvous_put()->set_value(value);
  outbox_->Push(std::move(message));
  return tributary::Status::Ok();
}

tributary::Status SessionRendezvous::Get(const std::string& key, std::string* value,
                                         collective::Deadline deadline) {
  v1::WorkerMessage message;
  message.set_epoch(epoch_);
  message.mutable_rendezvous_get()->set_key(key);
  outbox_->Push(std::move(message));

  const MutexLock lock(mutex_);
  while (cancelled_.empty() && values_.count(key) == 0) {
    if (!changed_.WaitUntil(mutex_, deadline)) break;
  }
  if (!cancelled_.empty()) return {tributary::StatusCode::kAborted, cancelled_};
  const auto found = values_.find(key);
  if (found == values_.end()) {
    return {tributary::StatusCode::kDeadlineExceeded, "rendezvous: nobody set " + key};
  }
  *value = found->second;
  return tributary::Status::Ok();
}

void SessionRendezvous::Deliver(v1::RendezvousValue value) {
  const MutexLock lock(mutex_);
  values_[value.key()] = std::move(*value.mutable_value());
  changed_.NotifyAll();
}

void SessionRendezvous::Cancel(std::string reason) {
  const MutexLock lock(mutex_);
  if (cancelled_.empty()) cancelled_ = reason.empty() ? "cancelled" : std::move(reason);
  changed_.NotifyAll();
}

}  // namespace tributary::worker
