#include "service/coordinator/session.h"

#include <utility>

namespace tributary::service {

void SessionOutbox::Reply(v1::SessionReply reply) {
  const MutexLock lock(mutex_);
  if (!over_) replies_.push_back(std::move(reply));
}

void SessionOutbox::End(const absl::Status& why) {
  const MutexLock lock(mutex_);
  if (over_) return;
  over_ = true;
  why_ = why;
}

void SessionOutbox::Drain() {
  MutexLock lock(mutex_);
  if (draining_) return;
  draining_ = true;
  while (true) {
    if (!replies_.empty()) {
      v1::SessionReply reply = std::move(replies_.front());
      replies_.pop_front();
      lock.Unlock();
      listener_->OnReply(std::move(reply));
      lock.Lock();
      continue;
    }
    if (over_ && !told_) {
      told_ = true;
      const absl::Status why = why_;
      lock.Unlock();
      listener_->OnEnd(why);
      lock.Lock();
      continue;
    }
    break;
  }
  draining_ = false;
}

}  // namespace tributary::service
