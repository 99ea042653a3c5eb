// What waits to be written to a session's stream.
//
// A stream takes one writer at a time; everybody else leaves messages here.
#pragma once

#include <condition_variable>
#include <deque>
#include <mutex>
#include <optional>

#include "tributary/v1/worker.pb.h"

namespace tributary::worker {

class Outbox {
 public:
  // Dropped when closed: there is nobody left to hear it.
  void Push(v1::WorkerMessage message);
  // The next message; waits for one. Nothing when the outbox was closed.
  std::optional<v1::WorkerMessage> Pop();
  void Close();

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<v1::WorkerMessage> messages_;
  bool closed_ = false;
};

}  // namespace tributary::worker
