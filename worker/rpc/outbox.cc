#include "worker/rpc/outbox.h"

#include <utility>

namespace tributary::worker {

void Outbox::Push(v1::WorkerMessage message) {
  const MutexLock lock(mutex_);
  if (closed_) return;
  messages_.push_back(std::move(message));
  changed_.NotifyOne();
}

std::optional<v1::WorkerMessage> Outbox::Pop() {
  const MutexLock lock(mutex_);
  while (!closed_ && messages_.empty()) changed_.Wait(mutex_);
  if (closed_) return std::nullopt;
  v1::WorkerMessage message = std::move(messages_.front());
  messages_.pop_front();
  return message;
}

void Outbox::Close() {
  const MutexLock lock(mutex_);
  closed_ = true;
  messages_.clear();
  changed_.NotifyAll();
}

}  // namespace tributary::worker
