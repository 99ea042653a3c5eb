#include "service/workers/completions.h"

#include <utility>

namespace tributary::service {

void Completions::Add(WorkerGroup::Done done, Outcome outcome) {
  {
    const MutexLock lock(mutex_);
    if (!stopping_) {
      work_.push_back({std::move(done), std::move(outcome)});
      return changed_.NotifyOne();
    }
  }
  done(std::move(outcome));
}

void Completions::Stop() {
  {
    const MutexLock lock(mutex_);
    stopping_ = true;
    changed_.NotifyOne();
  }
  if (thread_.joinable()) thread_.join();
}

void Completions::Loop() {
  MutexLock lock(mutex_);
  for (;;) {
    while (!stopping_ && work_.empty()) changed_.Wait(mutex_);
    if (work_.empty()) return;
    Item item = std::move(work_.front());
    work_.pop_front();
    lock.Unlock();
    item.done(std::move(item.outcome));
    item = {};  // what `done` holds is released before the lock is taken
    lock.Lock();
  }
}

}  // namespace tributary::service
