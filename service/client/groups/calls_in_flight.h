// Unary calls that have been begun and not answered.
#pragma once

#include <grpcpp/client_context.h>

#include <memory>
#include <set>

#include "base/sync/mutex.h"

namespace tributary::client {

// Thread safe. Every call that begins ends: by its answer, its deadline, or Cancel.
class CallsInFlight {
 public:
  CallsInFlight() = default;
  ~CallsInFlight() { Cancel(); }
  CallsInFlight(const CallsInFlight&) = delete;
  CallsInFlight& operator=(const CallsInFlight&) = delete;

  void Begin(const std::shared_ptr<grpc::ClientContext>& call) {
    const MutexLock lock(mutex_);
    calls_.insert(call);
  }
  // From the call's callback, as the last thing it does.
  void End(const std::shared_ptr<grpc::ClientContext>& call) {
    const MutexLock lock(mutex_);
    calls_.erase(call);
    if (calls_.empty()) ended_.NotifyAll();
  }
  // Until all have ended.
  void Wait() {
    const MutexLock lock(mutex_);
    while (!calls_.empty()) ended_.Wait(mutex_);
  }
  // Ends all, and waits.
  void Cancel() {
    std::set<std::shared_ptr<grpc::ClientContext>> calls;
    {
      const MutexLock lock(mutex_);
      calls = calls_;
    }
    for (const auto& call : calls) call->TryCancel();
    Wait();
  }

 private:
  Mutex mutex_;
  CondVar ended_;
  std::set<std::shared_ptr<grpc::ClientContext>> calls_ TRIBUTARY_GUARDED_BY(mutex_);
};

}  // namespace tributary::client
