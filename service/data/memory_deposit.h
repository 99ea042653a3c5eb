// Memory that hosts have handed over and not registered yet. gRPC carries no descriptors, so a host
// that shares a memfd leaves it at the socket beside the service's (api/companion_socket.h), under
// a secret of its own choice. Then it registers the memory over gRPC, where its rights are checked,
// and names the secret.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <cstddef>
#include <list>
#include <string>

#include "absl/strings/string_view.h"
#include "base/rpc/descriptor.h"
#include "base/sync/mutex.h"

namespace tributary::service {

// Thread safe.
class MemoryDeposit {
 public:
  using Clock = std::chrono::steady_clock;
  static constexpr std::chrono::seconds kGoodFor{10};
  // How many may wait, of one user and in all. One more of a user drops the user's oldest one.
  static constexpr size_t kMostOfUser = 16;
  static constexpr size_t kMost = 256;

  // `user` is the one that brought the memory. Returns false when there is no room for it.
  bool Put(std::string secret, Descriptor memory, uid_t user, Clock::time_point now);
  // Returns the memory of a secret, which is good once. It is not open when the secret is not good.
  Descriptor Take(absl::string_view secret, Clock::time_point now);

 private:
  struct Waiting {
    std::string secret;
    Descriptor memory;
    uid_t user = 0;
    Clock::time_point until;
  };

  void DropExpired(Clock::time_point now) TRIBUTARY_REQUIRES(mutex_);

  Mutex mutex_;
  std::list<Waiting> waiting_ TRIBUTARY_GUARDED_BY(mutex_);  // oldest first
};

}  // namespace tributary::service
