#include "worker/rpc/outbox.h"

#include <utility>

namespace tributary::worker {

void Outbox::Push(v1::WorkerMessage message) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (closed_) return;
  messages_.push_back(std::move(message));
  changed_.notify_one();
}

std::optional<v1::WorkerMessage> Outbox::Pop() {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [this] { return closed_ || !messages_.empty(); });
  if (closed_) return std::nullopt;
  v1::WorkerMessage message = std::move(messages_.front());
  messages_.pop_front();
  return message;
}

void Outbox::Close() {
  std::lock_guard<std::mutex> lock(mutex_);
  closed_ = true;
  messages_.clear();
  changed_.notify_all();
}

}  // namespace tributary::worker
