// Leases of hosts: what sequences belong to, so that those of a dead host do not stay for ever.
//
// A lease is known by a text that its host chose. It is held while anybody presents it, by a call
// or a stream that is open. When nobody has held it for the timeout it has ended, and whoever
// closes its sequences is told (TakeEnded). A host that presents the text after that begins another
// lease.
#pragma once

#include <chrono>
#include <cstddef>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "base/sync/mutex.h"

namespace tributary::service {

class Leases;

// Sequences keep a pointer to theirs, and compare pointers.
class Lease {
 public:
  explicit Lease(std::string name) : name_(std::move(name)) {}
  const std::string& name() const { return name_; }

 private:
  friend class Leases;
  const std::string name_;
  // Guarded by Leases::State::mutex.
  int holders_ = 0;
  std::chrono::steady_clock::time_point renewed_;  // when the last holder let go
};
using LeasePtr = std::shared_ptr<Lease>;

// Thread safe.
class Leases {
 public:
  using Clock = std::chrono::steady_clock;

 private:
  struct State {
    Mutex mutex;
    absl::flat_hash_map<std::string, LeasePtr> by_name TRIBUTARY_GUARDED_BY(mutex);
    // When TakeEnded has something to look at.
    Clock::time_point next_look TRIBUTARY_GUARDED_BY(mutex) = Clock::time_point::max();
  };

 public:
  // As long as it lives, the lease is held. It may outlive Leases.
  class Holder {
   public:
    Holder(std::shared_ptr<State> state, LeasePtr lease)
        : state_(std::move(state)), lease_(std::move(lease)) {}
    ~Holder();
    Holder(const Holder&) = delete;
    Holder& operator=(const Holder&) = delete;
    const LeasePtr& lease() const { return lease_; }

   private:
    const std::shared_ptr<State> state_;
    LeasePtr lease_;
  };
  using HolderPtr = std::shared_ptr<const Holder>;

  // `timeout` 0: leases do not end.
  explicit Leases(std::chrono::milliseconds timeout) : timeout_(timeout) {}

  // INVALID_ARGUMENT, with the field, unless `name` is 1 to 128 of [A-Za-z0-9._-].
  static absl::Status CheckName(absl::string_view name, absl::string_view field);

  // A lease that nobody knows yet begins.
  HolderPtr Present(const std::string& name);
  // A lease of sequences that were held when the coordinator restarted. Its time begins now, and
  // nobody holds it.
  LeasePtr Restore(const std::string& name, Clock::time_point now);

  // When TakeEnded may have something to do; max() for never.
  Clock::time_point NextLook() const;
  // The leases that have ended by now. They are known no more.
  std::vector<LeasePtr> TakeEnded(Clock::time_point now);

  std::chrono::milliseconds timeout() const { return timeout_; }
  // That are held, or have sequences.
  size_t size() const;

 private:
  LeasePtr Find(const std::string& name, Clock::time_point now);

  const std::chrono::milliseconds timeout_;
  const std::shared_ptr<State> state_ = std::make_shared<State>();
};

}  // namespace tributary::service
