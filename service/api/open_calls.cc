#include "service/api/open_calls.h"

#include <utility>

namespace tributary::service {

OpenCalls::Mark OpenCalls::Enter() {
  const MutexLock lock(mutex_);
  ++of_this_round_;
  return {static_cast<const void*>(this),
          [self = shared_from_this(), round = round_](const void*) { self->Leave(round); }};
}

void OpenCalls::Leave(uint64_t round) {
  const MutexLock lock(mutex_);
  if (round == round_) {
    --of_this_round_;
  } else if (--of_earlier_ones_ == 0) {
    over_.NotifyAll();
  }
}

bool OpenCalls::WaitUntilOver(std::chrono::steady_clock::time_point deadline) {
  const MutexLock lock(mutex_);
  ++round_;
  of_earlier_ones_ += std::exchange(of_this_round_, 0);
  while (of_earlier_ones_ > 0) {
    if (std::chrono::steady_clock::now() >= deadline) return false;
    over_.WaitUntil(mutex_, deadline);
  }
  return true;
}

}  // namespace tributary::service
