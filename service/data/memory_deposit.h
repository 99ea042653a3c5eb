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
  // How many may wait at a time: of one user, whose oldest goes when there are more, and in all.
  static constexpr size_t kMostOfUser = 16;
  static constexpr size_t kMost = 256;

  // `user`: the process that brought it runs as this one. False: too many wait.
  bool Put(std::string secret, Descriptor memory, uid_t user, Clock::time_point now);
  // Closed when the secret is not good, or not any more. A secret is good once.
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
