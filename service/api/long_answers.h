// A thread that sends long answers.
//
// gRPC gives what it sends to the connection on the thread that answers. For some megabytes the
// operating system takes 0.7 ms to copy them. The thread on which a step ends answers many callers:
// each of them would wait for the long answers to those before it.
#pragma once

#include <cstddef>
#include <deque>
#include <functional>
#include <thread>
#include <utility>

#include "base/sync/mutex.h"

namespace tributary::service {

// Thread safe.
class LongAnswers {
 public:
  // Answers of so many bytes are long.
  static constexpr size_t kLongBytes = size_t{64} * 1024;

  LongAnswers();
  // Sends what has not been sent yet.
  ~LongAnswers();
  LongAnswers(const LongAnswers&) = delete;
  LongAnswers& operator=(const LongAnswers&) = delete;

  // Calls `send`, which sends an answer of so many bytes: at once if it is short; otherwise on the
  // thread, behind the long answers that came before it. It must not throw, and may not use this.
  template <typename Call>
  void Send(size_t bytes, Call send) {
    if (bytes < kLongBytes) {
      send();
    } else {
      SendLater(std::move(send));
    }
  }

 private:
  void SendLater(std::function<void()> send);
  void Loop();

  Mutex mutex_;
  CondVar changed_;
  std::deque<std::function<void()>> waiting_ TRIBUTARY_GUARDED_BY(mutex_);
  bool stopping_ TRIBUTARY_GUARDED_BY(mutex_) = false;
  std::thread thread_;  // the last member: it uses the others
};

}  // namespace tributary::service
