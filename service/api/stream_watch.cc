#include "service/api/stream_watch.h"

#include <utility>

namespace tributary::service {

using Clock = std::chrono::steady_clock;

StreamWatch::StreamWatch(const Options& options) : options_(options), thread_([this] { Loop(); }) {}

StreamWatch::~StreamWatch() {
  {
    const MutexLock lock(mutex_);
    stopped_ = true;
    wake_.NotifyAll();
  }
  thread_.join();
}

void StreamWatch::Add(std::weak_ptr<WatchedStream> stream, std::function<absl::Status()> allowed) {
  const MutexLock lock(mutex_);
  streams_.push_back({std::move(stream), std::move(allowed)});
}

bool StreamWatch::Await(std::vector<Watched>* open) {
  const MutexLock lock(mutex_);
  const Clock::time_point until = Clock::now() + options_.interval;
  while (!stopped_ && Clock::now() < until) wake_.WaitUntil(mutex_, until);
  std::erase_if(streams_, [](const Watched& watched) { return watched.stream.expired(); });
  *open = streams_;
  return !stopped_;
}

void StreamWatch::Loop() {
  std::vector<Watched> open;
  while (Await(&open)) {
    for (const Watched& watched : open) {
      const std::shared_ptr<WatchedStream> stream = watched.stream.lock();
      if (stream == nullptr) continue;
      const absl::Status allowed = watched.allowed();
      if (!allowed.ok()) stream->End(allowed);
      stream->EndIfStuckSince(Clock::now() - options_.reply_timeout);
    }
    open.clear();
  }
}

}  // namespace tributary::service
