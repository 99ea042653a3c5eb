#include "service/api/long_answers.h"

namespace tributary::service {

LongAnswers::LongAnswers() : thread_([this] { Loop(); }) {}

LongAnswers::~LongAnswers() {
  {
    const MutexLock lock(mutex_);
    stopping_ = true;
    changed_.NotifyOne();
  }
  thread_.join();
}

void LongAnswers::SendLater(std::function<void()> send) {
  const MutexLock lock(mutex_);
  waiting_.push_back(std::move(send));
  changed_.NotifyOne();
}

void LongAnswers::Loop() {
  MutexLock lock(mutex_);
  for (;;) {
    while (waiting_.empty() && !stopping_) changed_.Wait(mutex_);
    if (waiting_.empty()) return;
    std::function<void()> send = std::move(waiting_.front());
    waiting_.pop_front();
    lock.Unlock();
    send();
    send = nullptr;  // what it holds is released before the lock is taken
    lock.Lock();
  }
}

}  // namespace tributary::service
