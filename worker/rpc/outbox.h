// The messages that wait to be written to a session's stream. A stream takes one writer at a time,
// the session's writing thread; all other threads leave their messages here.
#pragma once

#include <deque>
#include <optional>

#include "base/sync/mutex.h"
#include "tributary/v1/worker.pb.h"

namespace tributary::worker {

class Outbox {
 public:
  // Adds a message. After Close() it is dropped, because nobody is left to hear it.
  void Push(v1::WorkerMessage message);
  // Waits for the next message and takes it. Nothing when the outbox was closed.
  std::optional<v1::WorkerMessage> Pop();
  // Ends every Pop, and drops what has not been taken.
  void Close();

 private:
  Mutex mutex_;
  CondVar changed_;
  std::deque<v1::WorkerMessage> messages_ TRIBUTARY_GUARDED_BY(mutex_);
  bool closed_ TRIBUTARY_GUARDED_BY(mutex_) = false;
};

}  // namespace tributary::worker
