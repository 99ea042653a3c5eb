#include "service/workers/command_queue.h"

#include <memory>
#include <utility>

namespace tributary::service {

void CommandQueue::Enqueue(Build build, WorkerGroup::Done done) {
  const MutexLock lock(mutex_);
  jobs_.push_back({std::move(build), std::move(done)});
}

void CommandQueue::Drain() {
  MutexLock lock(mutex_);
  if (draining_) return;
  draining_ = true;
  while (!jobs_.empty()) {
    Job job = std::move(jobs_.front());
    jobs_.pop_front();
    const uint64_t number = next_number_++;
    lock.Unlock();
    auto command = std::make_shared<worker::Command>(job.build(number));
    group_->Submit(std::move(command), std::move(job.done));
    job = {};  // what the closures hold is released before the lock is taken again
    lock.Lock();
  }
  draining_ = false;
}

}  // namespace tributary::service
