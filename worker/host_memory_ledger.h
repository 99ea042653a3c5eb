// Host memory that ranks of one process take for caches, a little at a time.
//
// What is not yet touched is not missing from the machine's free memory, so ranks that look there
// by themselves would all find room for the same bytes. Here they claim what they are going to
// take, before any of it is taken.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/sync/mutex.h"
#include "worker/host_memory.h"

namespace tributary::worker {

// Of `available` bytes, how many are left for everything else on the machine: a thirty-second part,
// between 64 MiB and 1 GiB.
size_t MemoryMargin(size_t available);

// Thread safe. Claims keep it alive.
class HostMemoryLedger : public std::enable_shared_from_this<HostMemoryLedger> {
 public:
  // Bytes that somebody is going to take.
  class Claim {
   public:
    Claim(std::shared_ptr<HostMemoryLedger> ledger, size_t bytes)
        : ledger_(std::move(ledger)), bytes_(bytes) {}
    ~Claim() { Taken(bytes_); }
    Claim(const Claim&) = delete;
    Claim& operator=(const Claim&) = delete;

    // So many more are taken: they now show in the machine's memory.
    void Taken(size_t bytes);
    // kResourceExhausted when others have brought the machine close to its end meanwhile.
    absl::Status CheckRoom() const;

   private:
    const std::shared_ptr<HostMemoryLedger> ledger_;
    size_t bytes_;  // not yet taken
  };

  // Bytes that somebody is giving back. They count as available already: whoever claims them looks
  // at what the machine has before it takes them (Claim::CheckRoom).
  class Returning {
   public:
    Returning(std::shared_ptr<HostMemoryLedger> ledger, size_t bytes);
    ~Returning();
    Returning(const Returning&) = delete;
    Returning& operator=(const Returning&) = delete;

    // So many are given back: the machine's memory shows them.
    void Returned(size_t bytes);

   private:
    const std::shared_ptr<HostMemoryLedger> ledger_;
    size_t bytes_;  // not yet given back
  };

  // `available` says what the machine would still give; SIZE_MAX when that is not known.
  static std::shared_ptr<HostMemoryLedger> Create(std::function<size_t()> available = [] {
    return AvailableHostMemory();
  });

  // Bytes that may be claimed now.
  size_t Available() const;
  // kResourceExhausted, with the numbers, when they are more than that.
  absl::StatusOr<std::unique_ptr<Claim>> Take(size_t bytes);

 private:
  explicit HostMemoryLedger(std::function<size_t()> available) : available_(std::move(available)) {}

  size_t AvailableNow() const TRIBUTARY_REQUIRES(mutex_);

  const std::function<size_t()> available_;
  mutable Mutex mutex_;
  size_t claimed_ TRIBUTARY_GUARDED_BY(mutex_) = 0;    // and not yet taken
  size_t returning_ TRIBUTARY_GUARDED_BY(mutex_) = 0;  // and not yet given back
};

}  // namespace tributary::worker
