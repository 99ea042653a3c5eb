#include "worker/memory_threads.h"

#include <sched.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <system_error>
#include <utility>

namespace tributary::worker {
namespace {

using std::chrono::milliseconds;

constexpr size_t kSlots = 32;  // jobs under way; others wait
constexpr milliseconds kTick{10};
// On a machine that is never idle the keeper takes a piece in every so many ticks by itself.
constexpr int kTicksPerPiece = 3;

}  // namespace

// A thread counts itself in before it looks at the job. So once the job is null and nobody is
// counted, nobody has it.
struct MemoryThreads::Slot {
  std::atomic<int> users = 0;
  std::atomic<Job*> job = nullptr;

  bool TakeNext() {
    ++users;
    Job* const current = job;
    const bool took = current != nullptr && current->TakeNext();
    --users;
    return took;
  }
};

struct MemoryThreads::Idle {
  std::array<Slot, kSlots> slots;
  std::atomic<int> news = 0;        // rises when there is something to take, or to end for
  std::atomic<unsigned> turns = 0;  // in which something was taken
  std::atomic<bool> ending = false;

  void Tell() {
    ++news;
    news.notify_all();
  }
};

MemoryThreads::MemoryThreads(int count)
    : count_(count), idle_(std::make_shared<Idle>()), owned_(kSlots) {}

MemoryThreads::~MemoryThreads() {
  {
    const MutexLock lock(mutex_);
    ending_ = true;
    added_.NotifyAll();
  }
  if (keeper_.joinable()) keeper_.join();
  idle_->ending = true;
  idle_->Tell();
  for (Slot& slot : idle_->slots) {
    slot.job = nullptr;
    while (slot.users != 0) std::this_thread::sleep_for(milliseconds(1));
  }
}

bool MemoryThreads::Add(std::shared_ptr<Job> job) {
  if (!keeper_.joinable() && !Begin()) return false;
  if (!job->Keep()) return true;
  const MutexLock lock(mutex_);
  waiting_.push_back(std::move(job));
  FillSlots();
  idle_->Tell();
  added_.NotifyAll();
  return true;
}

void MemoryThreads::Drop(std::shared_ptr<const void> dropped) {
  if (!keeper_.joinable() && !Begin()) return;
  const MutexLock lock(mutex_);
  dropped_.push_back(std::move(dropped));
  added_.NotifyAll();
}

bool MemoryThreads::Begin() {
  try {
    keeper_ = std::thread([this] { Keep(); });
    for (int i = 0; i < count_; ++i) std::thread([idle = idle_] { TakePieces(idle); }).detach();
  } catch (const std::system_error&) {  // those that there are do it
  }
  return keeper_.joinable();
}

void MemoryThreads::TakePieces(const std::shared_ptr<Idle>& idle) {
  const sched_param none{};
  // This thread's alone, as Linux has it. Without it the thread is only less polite.
  static_cast<void>(sched_setscheduler(0, SCHED_IDLE, &none));
  while (!idle->ending) {
    const int seen = idle->news;
    bool took = false;
    for (Slot& slot : idle->slots) took |= slot.TakeNext();
    if (took) {
      ++idle->turns;
    } else {
      idle->news.wait(seen);
    }
  }
}

void MemoryThreads::FillSlots() {
  for (size_t i = 0; i < kSlots && !waiting_.empty(); ++i) {
    if (owned_[i].job != nullptr) continue;
    owned_[i] = {std::move(waiting_.front())};
    waiting_.erase(waiting_.begin());
    idle_->slots[i].job = owned_[i].job.get();
  }
}

void MemoryThreads::Keep() {
  unsigned turns = 0;
  for (int tick = 0;; ++tick) {
    // What is over is destroyed by this thread, which others do not wait for, without the lock.
    std::vector<std::shared_ptr<const void>> dropped;
    {
      const MutexLock lock(mutex_);
      const auto busy = [](const Owned& owned) { return owned.job != nullptr; };
      const bool idle = dropped_.empty() && !std::any_of(owned_.begin(), owned_.end(), busy);
      if (idle && !ending_) added_.Wait(mutex_);
      if (ending_) return;
      dropped.swap(dropped_);
      for (size_t i = 0; i < kSlots; ++i) {
        Owned& owned = owned_[i];
        if (owned.job == nullptr) continue;
        Slot& slot = idle_->slots[i];
        if (!owned.over && !owned.job->Keep()) {
          owned.over = true;
          slot.job = nullptr;
        }
        if (owned.over && slot.users == 0) dropped.push_back(std::move(owned.job));
      }
      FillSlots();
    }
    idle_->Tell();
    dropped.clear();
    if (tick % kTicksPerPiece == 0) {
      const unsigned before = turns;
      turns = idle_->turns;
      for (size_t i = 0; i < kSlots && turns == before; ++i) {
        if (idle_->slots[i].TakeNext()) break;
      }
    }
    const MutexLock lock(mutex_);
    if (!ending_) added_.WaitUntil(mutex_, std::chrono::steady_clock::now() + kTick);
  }
}

}  // namespace tributary::worker
