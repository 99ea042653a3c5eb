#include "service/workers/completions.h"

#include <utility>

namespace tributary::service {

void Completions::Add(WorkerGroup::Done done, Outcome outcome) {
  {
    const MutexLock lock(mutex_);
    if (!stopping_) {
      work_.push_back({std::move(done), std::move(outcome)});
      return changed_.NotifyAll();
    }
  }
  done(std::move(outcome));
}

void Completions::CallOrAdd(WorkerGroup::Done done, Outcome outcome) {
  {
    const MutexLock lock(mutex_);
    if (!stopping_ && (calling_ || !work_.empty())) {
      work_.push_back({std::move(done), std::move(outcome)});
      return changed_.NotifyAll();
    }
    calling_ = true;
  }
  done(std::move(outcome));
  done = nullptr;  // what it holds is released before the lock is taken
  const MutexLock lock(mutex_);
  calling_ = false;
  // The thread is woken for something to call alone, which is rare where calls come one by one.
  if (!work_.empty() || stopping_) changed_.NotifyAll();
}

void Completions::Stop() {
  {
    const MutexLock lock(mutex_);
    stopping_ = true;
    changed_.NotifyAll();
  }
  if (thread_.joinable()) thread_.join();
}

void Completions::Loop() {
  MutexLock lock(mutex_);
  for (;;) {
    while (calling_ || (!stopping_ && work_.empty())) changed_.Wait(mutex_);
    if (work_.empty()) return;
    Item item = std::move(work_.front());
    work_.pop_front();
    calling_ = true;
    lock.Unlock();
    item.done(std::move(item.outcome));
    item = {};  // what `done` holds is released before the lock is taken
    lock.Lock();
    calling_ = false;
  }
}

}  // namespace tributary::service
