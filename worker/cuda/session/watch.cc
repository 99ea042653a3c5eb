#include "worker/cuda/session/watch.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"

namespace tributary::worker {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::chrono::microseconds kPause{50};
constexpr std::chrono::milliseconds kDevicePause{20};
// Between two looks at memory that other ranks may still reach.
constexpr std::chrono::milliseconds kHeldBackPause{20};
constexpr std::chrono::seconds kLastGrace{2};

uint32_t Read(const uint32_t& word) {
  return std::atomic_ref<const uint32_t>(word).load(std::memory_order_acquire);
}

// Memory that a session left waits for the steps of others no longer than this.
constexpr std::chrono::seconds kUnusedGrace{10};

absl::Status FailureOf(uint32_t failure, uint32_t silent) {
  switch (static_cast<mailbox::Awaited>(failure)) {
    case mailbox::Awaited::kTimedOut:
      return absl::DeadlineExceededError(absl::StrCat(
          silent == 0 ? std::string("the host") : absl::StrCat("endpoint ", silent - 1),
          " did not hand the next layer over in time"));
    default:
      return absl::AbortedError("the session was ended");
  }
}

}  // namespace

SessionWatch::SessionWatch() {
  thread_ = std::thread([this] { Loop(); });
}

SessionWatch::~SessionWatch() {
  {
    const MutexLock lock(mutex_);
    stopping_ = true;
    changed_.NotifyAll();
  }
  thread_.join();
}

void SessionWatch::Add(SessionId session, const mailbox::SessionProgress* progress,
                       OnSessionNews told, std::function<absl::Status()> device_status,
                       std::function<bool()> answered) {
  auto watched = std::make_shared<Watched>();
  watched->session = session;
  watched->progress = progress;
  watched->told = std::move(told);
  watched->device_status = std::move(device_status);
  watched->answered = std::move(answered);
  const MutexLock lock(mutex_);
  const bool waits_for_host = watched->answered != nullptr;
  sessions_.push_back(std::move(watched));
  changed_.NotifyAll();
  while (waits_for_host && freeing_) changed_.Wait(mutex_);
}

void SessionWatch::Expect(SessionId session, uint32_t end) {
  const MutexLock lock(mutex_);
  for (const WatchedPtr& watched : sessions_) {
    if (watched->session == session) watched->expected = end;
  }
  changed_.NotifyAll();
}

void SessionWatch::Remove(SessionId session) {
  const MutexLock lock(mutex_);
  const auto of = [session](const WatchedPtr& w) { return w->session == session; };
  sessions_.erase(std::remove_if(sessions_.begin(), sessions_.end(), of), sessions_.end());
  while (telling_ != nullptr && telling_->session == session) changed_.Wait(mutex_);
}

bool SessionWatch::Busy() const {
  return std::any_of(sessions_.begin(), sessions_.end(),
                     [](const WatchedPtr& w) { return w->answered || w->seen != w->expected; });
}

void SessionWatch::Look(bool at_device) {
  const std::vector<WatchedPtr> sessions = sessions_;
  for (const WatchedPtr& watched : sessions) {
    if (at_device && watched->answered && watched->answered()) watched->answered = nullptr;
    if (watched->seen == watched->expected) continue;
    SessionNews news{.session = watched->session, .ended = Read(watched->progress->ended)};
    const uint32_t failure = Read(watched->progress->failure);
    if (failure != 0 && news.ended != watched->expected) continue;  // until nothing runs
    if (failure != 0) {
      news.status = FailureOf(failure, Read(watched->progress->silent));
      news.ended = Read(watched->progress->failed_at);
    }
    if (at_device && news.status.ok()) news.status = watched->device_status();
    const bool is_news = news.ended != watched->seen || !news.status.ok();
    if (!is_news || watched->failed) continue;
    watched->seen = news.ended;
    if (!news.status.ok()) {
      watched->failed = true;
      watched->seen = watched->expected;
    }
    telling_ = watched.get();
    mutex_.Unlock();
    watched->told(news);
    mutex_.Lock();
    telling_ = nullptr;
    changed_.NotifyAll();
  }
}

void SessionWatch::FreeLater(std::shared_ptr<void> memory, std::function<bool()> may_go) {
  const MutexLock lock(mutex_);
  unused_.push_back({std::move(memory), std::move(may_go), Clock::now()});
  changed_.NotifyAll();
}

void SessionWatch::FreeUnused() {
  // Each is looked at once: what may not go yet goes to the end of the queue.
  for (size_t left = unused_.size(); left > 0; --left) {
    if (Busy() && Clock::now() - unused_.front().since <= kUnusedGrace) return;
    Unused unused = std::move(unused_.front());
    unused_.pop_front();
    freeing_ = true;
    mutex_.Unlock();
    const bool goes = unused.may_go == nullptr || unused.may_go();
    if (goes) unused.memory.reset();
    mutex_.Lock();
    freeing_ = false;
    changed_.NotifyAll();
    if (goes) continue;
    unused.since = Clock::now();
    unused_.push_back(std::move(unused));
  }
}

void SessionWatch::FreeOrLeakUnused() {
  const Clock::time_point grace = Clock::now() + kLastGrace;
  while (true) {
    FreeUnused();
    if (unused_.empty() || Clock::now() >= grace) break;
    changed_.WaitUntil(mutex_, Clock::now() + kHeldBackPause);
  }
  // The ranks that hold it back will not let it go any more.
  for (Unused& unused : unused_) new std::shared_ptr<void>(std::move(unused.memory));
  unused_.clear();
}

void SessionWatch::Loop() {
  const MutexLock lock(mutex_);
  Clock::time_point next_device = Clock::now();
  while (!stopping_) {
    FreeUnused();
    if (!Busy()) {
      if (stopping_) continue;
      if (unused_.empty()) {
        changed_.Wait(mutex_);
      } else {
        changed_.WaitUntil(mutex_, Clock::now() + kHeldBackPause);
      }
      continue;
    }
    const Clock::time_point now = Clock::now();
    const bool at_device = now >= next_device;
    if (at_device) next_device = now + kDevicePause;
    Look(at_device);
    if (!stopping_ && Busy()) changed_.WaitUntil(mutex_, Clock::now() + kPause);
  }
  // Whoever stops the watch has no sessions left.
  sessions_.clear();
  FreeOrLeakUnused();
}

}  // namespace tributary::worker
