#include "service/workers/completions.h"

#include <utility>

namespace tributary::service {

void Completions::Add(WorkerGroup::Done done, Outcome outcome) {
  {
    std::lock_guard lock(mutex_);
    if (!stopping_) {
      work_.push_back({std::move(done), std::move(outcome)});
      return changed_.notify_one();
    }
  }
  done(std::move(outcome));
}

void Completions::Stop() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
    changed_.notify_one();
  }
  if (thread_.joinable()) thread_.join();
}

void Completions::Loop() {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [this] { return stopping_ || !work_.empty(); });
    if (work_.empty()) return;
    Item item = std::move(work_.front());
    work_.pop_front();
    lock.unlock();
    item.done(std::move(item.outcome));
    item = {};  // what `done` holds is released before the lock is taken
    lock.lock();
  }
}

}  // namespace tributary::service
