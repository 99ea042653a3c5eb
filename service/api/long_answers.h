// A thread that sends long answers.
//
// gRPC hands what it sends to the connection on the thread that answers, which takes the kernel
// 0.7 ms for some megabytes. The thread on which a step ends answers many callers: each would wait
// for the long answers to those before it.
#pragma once

#include <cstddef>
#include <deque>
#include <functional>
#include <thread>

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
  void Send(size_t bytes, std::function<void()> send);

 private:
  void Loop();

  Mutex mutex_;
  CondVar changed_;
  std::deque<std::function<void()>> waiting_ TRIBUTARY_GUARDED_BY(mutex_);
  bool stopping_ TRIBUTARY_GUARDED_BY(mutex_) = false;
  std::thread thread_;  // the last member: it uses the others
};

}  // namespace tributary::service
