#include "service/coordinator/timer.h"

namespace tributary::service {

void Timer::Start() {
  thread_ = std::thread([this] { Loop(); });
}

void Timer::Reconsider() {
  if (next_due_() < sleeps_until_) wake_.NotifyOne();
}

void Timer::Stop() {
  stopped_ = true;
  wake_.NotifyAll();
}

void Timer::Join() {
  if (thread_.joinable()) thread_.join();
}

bool Timer::Sleep() {
  const ReadSection section(lock_);
  if (stopped_) return false;
  sleeps_until_ = next_due_();
  lock_.Wait(wake_, sleeps_until_);
  sleeps_until_ = Clock::time_point::min();
  return !stopped_;
}

void Timer::Loop() {
  while (Sleep()) {
    const CriticalSection section(lock_);  // its end begins batches whose window has closed
    act_(Clock::now());
  }
}

}  // namespace tributary::service
