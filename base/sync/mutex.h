// The mutex of every floor: its rules are part of its users' types.
//
// Clang checks the annotations when it compiles with -Wthread-safety; other compilers see a plain
// std::mutex. std::mutex itself carries no annotations in libstdc++. absl::Mutex would bring Abseil
// to floors that must build where only CUDA, NCCL and CMake are installed, its timed waits follow
// the wall clock, and ThreadSanitizer does not see the locks of a library that is not instrumented.
//
// This header needs the standard library alone, so every floor may include it.
//
//   class Counter {
//    public:
//     void Add(int n) {
//       const MutexLock lock(mutex_);
//       sum_ += n;
//     }
//
//    private:
//     Mutex mutex_;
//     int sum_ TRIBUTARY_GUARDED_BY(mutex_) = 0;
//   };
#pragma once

#include <chrono>
#include <condition_variable>
#include <mutex>

#if defined(__clang__) && !defined(__CUDACC__)
#define TRIBUTARY_THREAD_ANNOTATION(x) __attribute__((x))
#else
#define TRIBUTARY_THREAD_ANNOTATION(x)
#endif

// A member that may be read or written only while the mutex is held.
#define TRIBUTARY_GUARDED_BY(mutex) TRIBUTARY_THREAD_ANNOTATION(guarded_by(mutex))
// A function that is called with the mutex held, and returns with it held.
#define TRIBUTARY_REQUIRES(...) TRIBUTARY_THREAD_ANNOTATION(exclusive_locks_required(__VA_ARGS__))
// A function that tells the analysis that the mutex is held, where it cannot see that itself.
#define TRIBUTARY_ASSERTS_HELD(...) TRIBUTARY_THREAD_ANNOTATION(assert_exclusive_lock(__VA_ARGS__))
// A function that takes the mutex itself: the caller must not hold it.
#define TRIBUTARY_EXCLUDES(...) TRIBUTARY_THREAD_ANNOTATION(locks_excluded(__VA_ARGS__))

namespace tributary {

class TRIBUTARY_THREAD_ANNOTATION(capability("mutex")) Mutex {
 public:
  Mutex() = default;
  Mutex(const Mutex&) = delete;
  Mutex& operator=(const Mutex&) = delete;

  void Lock() TRIBUTARY_THREAD_ANNOTATION(exclusive_lock_function()) { mutex_.lock(); }
  void Unlock() TRIBUTARY_THREAD_ANNOTATION(unlock_function()) { mutex_.unlock(); }

 private:
  friend class CondVar;
  std::mutex mutex_;
};

// Holds a mutex until the end of the scope, apart from what runs between Unlock and Lock.
class TRIBUTARY_THREAD_ANNOTATION(scoped_lockable) MutexLock {
 public:
  explicit MutexLock(Mutex& mutex) TRIBUTARY_THREAD_ANNOTATION(exclusive_lock_function(mutex))
      : mutex_(mutex) {
    mutex_.Lock();
  }
  ~MutexLock() TRIBUTARY_THREAD_ANNOTATION(unlock_function()) {
    if (held_) mutex_.Unlock();
  }
  MutexLock(const MutexLock&) = delete;
  MutexLock& operator=(const MutexLock&) = delete;

  void Unlock() TRIBUTARY_THREAD_ANNOTATION(unlock_function()) {
    held_ = false;
    mutex_.Unlock();
  }
  void Lock() TRIBUTARY_THREAD_ANNOTATION(exclusive_lock_function()) {
    mutex_.Lock();
    held_ = true;
  }

 private:
  Mutex& mutex_;
  bool held_ = true;
};

// A condition variable. Callers hold the mutex and wait in a loop over their condition, which the
// analysis can follow (it cannot follow a predicate that is passed in):
//
//   while (!done_) changed_.Wait(mutex_);
class CondVar {
 public:
  CondVar() = default;
  CondVar(const CondVar&) = delete;
  CondVar& operator=(const CondVar&) = delete;

  // Returns, with the mutex held again, once notified; it may also return for no reason.
  void Wait(Mutex& mutex) TRIBUTARY_REQUIRES(mutex) {
    std::unique_lock<std::mutex> lock(mutex.mutex_, std::adopt_lock);
    condition_.wait(lock);
    lock.release();
  }
  // The same. False when the deadline has passed.
  bool WaitUntil(Mutex& mutex, std::chrono::steady_clock::time_point deadline)
      TRIBUTARY_REQUIRES(mutex) {
    std::unique_lock<std::mutex> lock(mutex.mutex_, std::adopt_lock);
    const std::cv_status status = condition_.wait_until(lock, deadline);
    lock.release();
    return status == std::cv_status::no_timeout;
  }

  void NotifyOne() { condition_.notify_one(); }
  void NotifyAll() { condition_.notify_all(); }

 private:
  std::condition_variable condition_;
};

}  // namespace tributary
