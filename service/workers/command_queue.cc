#include "service/workers/command_queue.h"

#include <utility>

namespace tributary::service {

void CommandStream::Enqueue(Build build, WorkerGroup::Done done) {
  std::lock_guard lock(mutex_);
  jobs_.push_back({std::move(build), std::move(done)});
}

void CommandStream::Drain() {
  std::unique_lock lock(mutex_);
  if (draining_) return;
  draining_ = true;
  while (!jobs_.empty()) {
    Job job = std::move(jobs_.front());
    jobs_.pop_front();
    const uint64_t number = next_number_++;
    lock.unlock();
    auto command = std::make_shared<worker::Command>(job.build(number));
    group_->Submit(std::move(command), std::move(job.done));
    job = {};  // what the closures hold goes before the lock is taken again
    lock.lock();
  }
  draining_ = false;
}

}  // namespace tributary::service
