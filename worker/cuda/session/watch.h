// Tells the coordinator's side how far the sessions of a GPU have come, without asking the GPU:
// each session writes its progress to pinned memory, and one thread per rank looks at it.
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "base/mailbox/gate.h"
#include "base/sync/mutex.h"
#include "worker/backend.h"
#include "worker/command.h"

namespace tributary::worker {

// Thread safe. Its thread looks every few tens of microseconds while a step of some session is in
// flight, and sleeps otherwise.
class SessionWatch {
 public:
  SessionWatch();
  ~SessionWatch();
  SessionWatch(const SessionWatch&) = delete;
  SessionWatch& operator=(const SessionWatch&) = delete;

  // From now on `told` is called, on the watch's thread, whenever more of the session's steps have
  // ended, and when it has failed and nothing of it is left on the GPU. `progress` stays until
  // Remove. `device_status` says whether the GPU still works; it is called now and then. Where
  // `answered` is given, the session is about to wait for its host on the GPU, as a step does,
  // until that returns true; it is called now and then, too. Then no memory is being freed when
  // this returns, and none is until then.
  void Add(SessionId session, const mailbox::SessionProgress* progress, OnSessionNews told,
           std::function<absl::Status()> device_status, std::function<bool()> answered = nullptr);
  // The session's steps in flight will end with layer number `end` - 1.
  void Expect(SessionId session, uint32_t end);
  // `told` is not called any more when this returns. Not from within `told`.
  void Remove(SessionId session);
  // Destroys `memory` on the watch's thread, when no session waits for its host or after a while,
  // because CUDA may make that wait for all that runs. It is not destroyed before `may_go`, which
  // is called now and then, returns true; memory that it holds back until the watch ends stays
  // until the process ends.
  void FreeLater(std::shared_ptr<void> memory, std::function<bool()> may_go = nullptr);

 private:
  struct Unused {
    std::shared_ptr<void> memory;
    std::function<bool()> may_go;
    std::chrono::steady_clock::time_point since;
  };
  struct Watched {
    SessionId session = 0;
    const mailbox::SessionProgress* progress = nullptr;
    OnSessionNews told;
    std::function<absl::Status()> device_status;
    std::function<bool()> answered;  // null from when it has returned true
    uint32_t expected = 0;           // number of layers that were enqueued
    uint32_t seen = 0;               // number of layers that `told` knows to have ended
    bool failed = false;             // `told` knows that it failed
  };
  using WatchedPtr = std::shared_ptr<Watched>;

  void Loop();
  bool Busy() const TRIBUTARY_REQUIRES(mutex_);
  // Calls `told` where there is news; releases the lock meanwhile.
  void Look(bool at_device) TRIBUTARY_REQUIRES(mutex_);
  // Destroys what has become unused; releases the lock meanwhile.
  void FreeUnused() TRIBUTARY_REQUIRES(mutex_);
  // The same at the end, when whatever holds memory back has had its time.
  void FreeOrLeakUnused() TRIBUTARY_REQUIRES(mutex_);

  Mutex mutex_;
  CondVar changed_;
  std::vector<WatchedPtr> sessions_ TRIBUTARY_GUARDED_BY(mutex_);
  const Watched* telling_ TRIBUTARY_GUARDED_BY(mutex_) = nullptr;  // whose `told` is being called
  std::deque<Unused> unused_ TRIBUTARY_GUARDED_BY(mutex_);
  bool freeing_ TRIBUTARY_GUARDED_BY(mutex_) = false;  // something that was in unused_
  bool stopping_ TRIBUTARY_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace tributary::worker
