// How many bytes of messages may be in flight, of each caller and of all together, so that the
// memory of the process has a bound whatever callers send and however slowly they read.
//
// A call counts with its request's bytes and those that its reply is going to have in a message,
// from its arrival until its reply has been sent. It is let in while fewer bytes than the limit are
// in flight: so a message of any permitted size is let in at some time, and what is in flight is
// less than the limit and one call. Requests of a few bytes, without tensors, are always let in: to
// close a sequence or to look at the service must be possible then, too. Streams are not read while
// their callers have no room, which makes the callers wait; unary calls are refused.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/sync/mutex.h"
#include "service/observe/observer.h"

namespace tributary::service {

// A request of at most so many bytes needs no room. It counts all the same.
inline constexpr int64_t kSmallRequest = 4096;

// RESOURCE_EXHAUSTED ("max_message_bytes") when a request is larger than a message may be.
absl::Status CheckMessage(size_t bytes, size_t most);

// 0: no limit.
struct ByteLimits {
  int64_t per_caller = 0;
  int64_t in_all = 0;
};

// Thread safe. Callbacks are made without its lock, on the threads of those who give bytes back.
class ByteBudget : public std::enable_shared_from_this<ByteBudget> {
 public:
  // The bytes of one call. Its end gives them back, and may call callbacks of AwaitRoom: hold no
  // lock then that one of those takes. Used by one thread at a time.
  class Charge {
   public:
    Charge(std::shared_ptr<ByteBudget> budget, std::string caller, int64_t bytes)
        : budget_(std::move(budget)), caller_(std::move(caller)), bytes_(bytes) {}
    ~Charge() { budget_->Give(caller_, bytes_); }
    Charge(const Charge&) = delete;
    Charge& operator=(const Charge&) = delete;

    // RESOURCE_EXHAUSTED when the bytes of others leave no room; nothing is changed then.
    absl::Status Add(int64_t bytes);
    // From now on the call counts for no more than `bytes`.
    void Reduce(int64_t bytes);

   private:
    const std::shared_ptr<ByteBudget> budget_;
    const std::string caller_;
    int64_t bytes_;
  };
  using ChargePtr = std::shared_ptr<Charge>;

  // `on_refused`, if there is one, is told of every refusal.
  static std::shared_ptr<ByteBudget> Create(const ByteLimits& limits,
                                            OnRefused on_refused = nullptr);

  // RESOURCE_EXHAUSTED when the caller's bytes, or those of all, leave no room for a request.
  absl::StatusOr<ChargePtr> Take(const std::string& caller, int64_t bytes);
  // Whether the caller has room now. If it has none, `on_room` is called once when it may have.
  bool HasRoom(const std::string& caller, std::function<void()> on_room);

  // From now on. What is in flight stays, and callers that have room now are told.
  void SetLimits(const ByteLimits& limits);

  int64_t in_flight() const;
  ByteLimits limits() const;

 private:
  ByteBudget(const ByteLimits& limits, OnRefused on_refused)
      : on_refused_(std::move(on_refused)), limits_(limits) {}

  // Empty when there is room beside `own` bytes of the caller's, which are in flight; or else whose
  // bytes leave none: "client:host-1 bytes".
  std::string Full(const std::string& caller, int64_t own) const TRIBUTARY_REQUIRES(mutex_);
  absl::Status Add(const std::string& caller, int64_t own, int64_t bytes);
  void Count(const std::string& caller, int64_t bytes) TRIBUTARY_REQUIRES(mutex_);
  void Give(const std::string& caller, int64_t bytes);
  // Callbacks of callers that waited for room and have it. Call them without the lock.
  std::vector<std::function<void()>> TakeThoseWithRoom() TRIBUTARY_REQUIRES(mutex_);

  struct Waiting {
    std::string caller;
    std::function<void()> on_room;
  };

  const OnRefused on_refused_;
  mutable Mutex mutex_;
  ByteLimits limits_ TRIBUTARY_GUARDED_BY(mutex_);
  int64_t all_ TRIBUTARY_GUARDED_BY(mutex_) = 0;
  // Callers that have no bytes in flight are not in it.
  absl::flat_hash_map<std::string, int64_t> by_caller_ TRIBUTARY_GUARDED_BY(mutex_);
  std::deque<Waiting> waiting_ TRIBUTARY_GUARDED_BY(mutex_);
};

}  // namespace tributary::service
