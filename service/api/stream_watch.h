// Looks after open streams: a caller may lose the right to its stream, or cease to read it, and a
// stream tells neither by itself.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "base/sync/mutex.h"

namespace tributary::service {

// A stream as its watch sees it. Both are called from the watch's thread.
class WatchedStream {
 public:
  virtual ~WatchedStream() = default;
  // Ends the stream, with this status, as soon as it can be told its client.
  virtual void End(const absl::Status& why) = 0;
  // Ends the stream at once if its client has not taken a reply since then.
  virtual void EndIfStuckSince(std::chrono::steady_clock::time_point since) = 0;
};

// Thread safe. It has a thread, which looks once per interval.
class StreamWatch {
 public:
  struct Options {
    std::chrono::milliseconds interval{1'000};
    // How long a client may leave a reply untaken.
    std::chrono::milliseconds reply_timeout{60'000};
  };

  explicit StreamWatch(const Options& options);
  ~StreamWatch();

  // `allowed` says whether the stream's caller may still have it: an error ends the stream.
  void Add(std::weak_ptr<WatchedStream> stream, std::function<absl::Status()> allowed);

 private:
  struct Watched {
    std::weak_ptr<WatchedStream> stream;
    std::function<absl::Status()> allowed;
  };

  void Loop();
  // The streams that are open, when it is time to look; false when the watch ends.
  bool Await(std::vector<Watched>* open);

  const Options options_;
  Mutex mutex_;
  CondVar wake_;
  bool stopped_ TRIBUTARY_GUARDED_BY(mutex_) = false;
  std::vector<Watched> streams_ TRIBUTARY_GUARDED_BY(mutex_);
  std::thread thread_;
};

}  // namespace tributary::service
