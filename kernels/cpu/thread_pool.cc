#include "kernels/cpu/thread_pool.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <system_error>
#include <thread>
#include <vector>

#include "base/sync/mutex.h"
#include "hwy/cache_control.h"

namespace tributary::cpu {
namespace {

// To wake a thread that sleeps takes 10 to 100 us, as much as a short job. A thread that has
// nothing to do therefore looks for this long whether there is something again, and then sleeps.
constexpr std::chrono::microseconds kSpin(50);

// Waits until done(), for kSpin at most. Whoever else is ready to run may have the core.
template <typename Done>
void Spin(const Done& done) {
  const auto deadline = std::chrono::steady_clock::now() + kSpin;
  do {
    for (int i = 0; i < 16; ++i) {
      if (done()) return;
      hwy::Pause();
    }
    std::this_thread::yield();
  } while (std::chrono::steady_clock::now() < deadline);
}

}  // namespace

// A job is a counter of parts handed out. Helpers wait for a new generation, take parts until there
// are none left and report back; the caller takes parts too, then waits for every helper that
// joined. A helper that wakes late finds no parts and changes nothing. Spinning only delays the
// waits: what is waited for is decided under the mutex.
struct ThreadPool::Impl {
  Mutex caller;  // one job at a time

  Mutex mutex;
  CondVar started;
  CondVar finished;
  std::atomic<uint64_t> generation{0};  // written under mutex
  // Null between jobs.
  const std::function<void(int)>* body TRIBUTARY_GUARDED_BY(mutex) = nullptr;
  int parts TRIBUTARY_GUARDED_BY(mutex) = 0;
  std::atomic<int> active{0};         // helpers in the job; written under mutex
  std::atomic<bool> stopping{false};  // written under mutex
  std::atomic<int> next{0};

  std::vector<std::thread> helpers;

  void TakeParts(const std::function<void(int)>& work, int count) {
    for (int part = next.fetch_add(1); part < count; part = next.fetch_add(1)) work(part);
  }

  void Help() {
    uint64_t seen = 0;
    MutexLock lock(mutex);
    while (true) {
      while (!stopping && (generation == seen || body == nullptr)) started.Wait(mutex);
      if (stopping) return;
      seen = generation;
      const std::function<void(int)>& work = *body;
      const int count = parts;
      ++active;
      lock.Unlock();
      TakeParts(work, count);
      lock.Lock();
      if (--active == 0) finished.NotifyOne();
      lock.Unlock();
      Spin([&] { return stopping || generation != seen; });
      lock.Lock();
    }
  }
};

ThreadPool::ThreadPool(int threads) : impl_(std::make_unique<Impl>()) {
  try {
    for (int i = 1; i < threads; ++i) impl_->helpers.emplace_back([this] { impl_->Help(); });
  } catch (const std::system_error&) {
    // The machine makes no more of them. Fewer do the same work.
  }
}

ThreadPool::~ThreadPool() {
  {
    const MutexLock lock(impl_->mutex);
    impl_->stopping = true;
  }
  impl_->started.NotifyAll();
  for (std::thread& helper : impl_->helpers) helper.join();
}

int ThreadPool::threads() const { return static_cast<int>(impl_->helpers.size()) + 1; }

void ThreadPool::Run(int parts, const std::function<void(int part)>& body) {
  if (parts <= 0) return;
  if (parts == 1 || impl_->helpers.empty()) {
    // Nothing to share out: do not wake anybody, and do not queue behind another caller's job.
    for (int part = 0; part < parts; ++part) body(part);
    return;
  }
  const MutexLock one_job(impl_->caller);
  {
    const MutexLock lock(impl_->mutex);
    impl_->body = &body;
    impl_->parts = parts;
    impl_->next.store(0);
    ++impl_->generation;
  }
  impl_->started.NotifyAll();
  impl_->TakeParts(body, parts);
  {
    const MutexLock lock(impl_->mutex);
    impl_->body = nullptr;  // helpers that have not joined yet no longer can
  }
  Spin([&] { return impl_->active == 0; });
  const MutexLock lock(impl_->mutex);
  while (impl_->active != 0) impl_->finished.Wait(impl_->mutex);
}

}  // namespace tributary::cpu
