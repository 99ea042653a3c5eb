#include "service/coordinator/critical_section.h"

namespace tributary::service {
namespace {

constexpr int64_t kFewAnswers = 8;

}  // namespace

// The analysis does not look into constructors and destructors: here kCoordinatorLock is made to
// mean CoordinatorLock::mutex_.
CriticalSection::CriticalSection(CoordinatorLock& lock) : lock_(lock) { lock_.mutex_.Lock(); }

CriticalSection::~CriticalSection() {
  lock_.end_.BeforeRelease();
  const DeferredCalls deferred = std::exchange(lock_.deferred_, {});
  lock_.mutex_.Unlock();
  // A few callers have their answers before the next step is built. The workers do not wait for
  // many answers.
  const bool many = deferred.answers() > kFewAnswers;
  if (many) lock_.end_.AfterRelease();
  deferred.Run();
  if (!many) lock_.end_.AfterRelease();
  if (deferred.answers() > 0) lock_.CountAnswered(deferred.answers());
}

ReadSection::ReadSection(CoordinatorLock& lock) : lock_(lock) { lock_.mutex_.Lock(); }

ReadSection::~ReadSection() { lock_.mutex_.Unlock(); }

void CoordinatorLock::CountAnswered(int64_t count) {
  const ReadSection section(*this);
  open_calls_ -= count;
  if (open_calls_ == 0) idle_.NotifyAll();
}

bool CoordinatorLock::WaitIdle(Clock::time_point until) {
  const ReadSection section(*this);
  while (open_calls_ > 0) {
    if (Clock::now() >= until) return false;
    Wait(idle_, until);
  }
  return true;
}

// The analysis does not know that whoever holds kCoordinatorLock holds mutex_.
void CoordinatorLock::Wait(CondVar& changed, Clock::time_point until)
    TRIBUTARY_THREAD_ANNOTATION(no_thread_safety_analysis) {
  if (until == Clock::time_point::max()) {
    changed.Wait(mutex_);
  } else {
    changed.WaitUntil(mutex_, until);
  }
}

}  // namespace tributary::service
