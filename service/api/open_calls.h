// Calls and streams that gRPC is not done with: their last bytes have not been handed to the system
// yet.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>

#include "base/sync/mutex.h"

namespace tributary::service {

// Thread safe.
class OpenCalls : public std::enable_shared_from_this<OpenCalls> {
 public:
  static std::shared_ptr<OpenCalls> Create() { return std::shared_ptr<OpenCalls>(new OpenCalls); }

  // A call or a stream keeps it until gRPC is done with it. It may outlive this.
  using Mark = std::shared_ptr<const void>;
  Mark Enter();

  // Until all that have entered so far are over; false when the deadline passes first. Those that
  // enter meanwhile are not waited for.
  bool WaitUntilOver(std::chrono::steady_clock::time_point deadline);

 private:
  OpenCalls() = default;
  void Leave(uint64_t round);

  Mutex mutex_;
  CondVar over_;
  // Rises with each WaitUntilOver.
  uint64_t round_ TRIBUTARY_GUARDED_BY(mutex_) = 0;
  int64_t of_this_round_ TRIBUTARY_GUARDED_BY(mutex_) = 0;
  int64_t of_earlier_ones_ TRIBUTARY_GUARDED_BY(mutex_) = 0;
};

}  // namespace tributary::service
