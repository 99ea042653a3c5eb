// Tells ThreadSanitizer about the locks of Abseil.
//
// The system's Abseil is not instrumented, so ThreadSanitizer does not see that absl::Mutex orders
// threads. gRPC's headers use it in code that is compiled into this project's programs, and every
// use of what such a mutex guards would be called a race. This file is linked into every
// program of a ThreadSanitizer build. Its functions take the place of Abseil's in the whole
// process, call Abseil's, and say what they do. Nothing here exists in other builds.
#include <dlfcn.h>
#include <sanitizer/tsan_interface.h>

#include <cstdio>
#include <cstdlib>

#include "absl/base/config.h"
#include "absl/synchronization/mutex.h"

#define TRIBUTARY_TEXT_(x) #x
#define TRIBUTARY_TEXT(x) TRIBUTARY_TEXT_(x)
// The C++ ABI writes a name with its length before it; that of Abseil's inline namespace differs
// from one release to the next.
#define TRIBUTARY_INLINE_NAMESPACE TRIBUTARY_TEXT(ABSL_OPTION_INLINE_NAMESPACE_NAME)

namespace {

// Abseil's own function, whose mangled name ends in `symbol`.
template <typename Function>
Function Next(const char* symbol) {
  char name[256];
  std::snprintf(name, sizeof(name), "_ZN4absl%zu%s%s", sizeof(TRIBUTARY_INLINE_NAMESPACE) - 1,
                TRIBUTARY_INLINE_NAMESPACE, symbol);
  void* const function = dlsym(RTLD_NEXT, name);
  if (function == nullptr) {
    std::fprintf(stderr, "tsan_mutex: Abseil has no %s\n", name);
    std::abort();
  }
  return reinterpret_cast<Function>(function);
}

using OfMutex = void (*)(absl::Mutex*);

// Abseil's functions call each other, and only the outermost call is the program's own.
thread_local bool inside = false;

// Calls a function of Abseil between `before` and `after`, which tell ThreadSanitizer what it does.
template <typename Before, typename Call, typename After>
auto Announced(const Before& before, const Call& call, const After& after) {
  if (inside) return call();
  before();
  inside = true;
  struct Leave {
    const After& after;
    ~Leave() {
      inside = false;
      after();
    }
  } const leave{after};
  return call();
}

void Lock(absl::Mutex* mutex, OfMutex next, unsigned flags) {
  Announced([=] { __tsan_mutex_pre_lock(mutex, flags); }, [=] { next(mutex); },
            [=] { __tsan_mutex_post_lock(mutex, flags, 0); });
}

void Unlock(absl::Mutex* mutex, OfMutex next, unsigned flags) {
  Announced([=] { __tsan_mutex_pre_unlock(mutex, flags); }, [=] { next(mutex); },
            [=] { __tsan_mutex_post_unlock(mutex, flags); });
}

// A function that waits and then takes the mutex.
template <typename Take>
auto Taking(absl::Mutex* mutex, const Take& take) {
  return Announced([=] { __tsan_mutex_pre_lock(mutex, 0); }, take,
                   [=] { __tsan_mutex_post_lock(mutex, 0, 0); });
}

// A function that lets go of the mutex, waits, and takes it again.
template <typename Wait>
auto Waiting(absl::Mutex* mutex, const Wait& wait) {
  const auto before = [=] {
    __tsan_mutex_pre_unlock(mutex, 0);
    __tsan_mutex_post_unlock(mutex, 0);
    __tsan_mutex_pre_lock(mutex, 0);
  };
  return Announced(before, wait, [=] { __tsan_mutex_post_lock(mutex, 0, 0); });
}

}  // namespace

namespace absl {
ABSL_NAMESPACE_BEGIN

void Mutex::Lock() {
  static const auto next = Next<OfMutex>("5Mutex4LockEv");
  ::Lock(this, next, 0);
}

void Mutex::Unlock() {
  static const auto next = Next<OfMutex>("5Mutex6UnlockEv");
  ::Unlock(this, next, 0);
}

void Mutex::ReaderLock() {
  static const auto next = Next<OfMutex>("5Mutex10ReaderLockEv");
  ::Lock(this, next, __tsan_mutex_read_lock);
}

void Mutex::ReaderUnlock() {
  static const auto next = Next<OfMutex>("5Mutex12ReaderUnlockEv");
  ::Unlock(this, next, __tsan_mutex_read_lock);
}

bool Mutex::TryLock() {
  static const auto next = Next<bool (*)(Mutex*)>("5Mutex7TryLockEv");
  bool taken = false;
  Announced([this] { __tsan_mutex_pre_lock(this, __tsan_mutex_try_lock); },
            [&] { taken = next(this); },
            [&] {
              const unsigned failed = taken ? 0 : __tsan_mutex_try_lock_failed;
              __tsan_mutex_post_lock(this, __tsan_mutex_try_lock | failed, 0);
            });
  return taken;
}

void Mutex::LockWhen(const Condition& condition) {
  static const auto next =
      Next<void (*)(Mutex*, const Condition&)>("5Mutex8LockWhenERKNS0_9ConditionE");
  Taking(this, [&] { next(this, condition); });
}

bool Mutex::LockWhenWithTimeout(const Condition& condition, Duration timeout) {
  static const auto next = Next<bool (*)(Mutex*, const Condition&, Duration)>(
      "5Mutex19LockWhenWithTimeoutERKNS0_9ConditionENS0_8DurationE");
  return Taking(this, [&] { return next(this, condition, timeout); });
}

bool Mutex::LockWhenWithDeadline(const Condition& condition, Time deadline) {
  static const auto next = Next<bool (*)(Mutex*, const Condition&, Time)>(
      "5Mutex20LockWhenWithDeadlineERKNS0_9ConditionENS0_4TimeE");
  return Taking(this, [&] { return next(this, condition, deadline); });
}

void Mutex::Await(const Condition& condition) {
  static const auto next =
      Next<void (*)(Mutex*, const Condition&)>("5Mutex5AwaitERKNS0_9ConditionE");
  Waiting(this, [&] { next(this, condition); });
}

bool Mutex::AwaitWithTimeout(const Condition& condition, Duration timeout) {
  static const auto next = Next<bool (*)(Mutex*, const Condition&, Duration)>(
      "5Mutex16AwaitWithTimeoutERKNS0_9ConditionENS0_8DurationE");
  return Waiting(this, [&] { return next(this, condition, timeout); });
}

bool Mutex::AwaitWithDeadline(const Condition& condition, Time deadline) {
  static const auto next = Next<bool (*)(Mutex*, const Condition&, Time)>(
      "5Mutex17AwaitWithDeadlineERKNS0_9ConditionENS0_4TimeE");
  return Waiting(this, [&] { return next(this, condition, deadline); });
}

void CondVar::Wait(Mutex* mutex) {
  static const auto next = Next<void (*)(CondVar*, Mutex*)>("7CondVar4WaitEPNS0_5MutexE");
  Waiting(mutex, [&] { next(this, mutex); });
}

bool CondVar::WaitWithTimeout(Mutex* mutex, Duration timeout) {
  static const auto next = Next<bool (*)(CondVar*, Mutex*, Duration)>(
      "7CondVar15WaitWithTimeoutEPNS0_5MutexENS0_8DurationE");
  return Waiting(mutex, [&] { return next(this, mutex, timeout); });
}

bool CondVar::WaitWithDeadline(Mutex* mutex, Time deadline) {
  static const auto next =
      Next<bool (*)(CondVar*, Mutex*, Time)>("7CondVar16WaitWithDeadlineEPNS0_5MutexENS0_4TimeE");
  return Waiting(mutex, [&] { return next(this, mutex, deadline); });
}

ABSL_NAMESPACE_END
}  // namespace absl
