// How many open sequences and pages each client may hold, over all caches.
//
// A sequence counts for the client that opened or forked it, until it is closed or lost. A page
// counts for a client while any of the client's sequences holds it. It counts once, however many of
// them share it, and it counts for each client that shares it. So a client that forks its own
// sequence pays no pages, and a client that forks another's sequence pays for what it then holds.
//
// Counting costs one look-up per page that changes hands, however much a sequence holds. What is
// not limited is not counted.
//
// Not thread safe, except that the last reference to an account may be dropped on any thread.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/types/span.h"
#include "service/observe/observer.h"
#include "worker/command.h"

namespace tributary::service {

// A limit that may change while others look at it, on any thread. Whoever looks sees the old value
// or the new one.
class LiveLimit {
 public:
  // NOLINTNEXTLINE(google-explicit-constructor): it stands where a number does.
  LiveLimit(int64_t most = 0) : most_(most) {}
  LiveLimit(const LiveLimit& other) : most_(static_cast<int64_t>(other)) {}
  LiveLimit& operator=(const LiveLimit& other) { return *this = static_cast<int64_t>(other); }
  LiveLimit& operator=(int64_t most) {
    most_.store(most, std::memory_order_relaxed);
    return *this;
  }
  // NOLINTNEXTLINE(google-explicit-constructor)
  operator int64_t() const { return most_.load(std::memory_order_relaxed); }

 private:
  std::atomic<int64_t> most_;
};

// 0: no limit. When a limit changes, clients keep what they hold. What they came to hold while it
// was 0 does not count.
struct ClientLimits {
  LiveLimit sequences;
  LiveLimit pages;
  LiveLimit caches;
  LiveLimit cache_bytes;  // of their pages, on all ranks together
  LiveLimit sessions;
  LiveLimit mailbox_bytes;  // of its sessions
};

// RESOURCE_EXHAUSTED for a client at a limit. The client holds `held` and asks for `wanted` more;
// `most` is what it may hold.
absl::Status LimitReached(const std::string& client, ClientLimit limit, int64_t held,
                          int64_t wanted, int64_t most);

// What one client holds. The limits must be there as long as something is taken.
class ClientAccount {
 public:
  ClientAccount(std::string client, const ClientLimits* limits, OnRefused on_refused)
      : client_(std::move(client)), limits_(*limits), on_refused_(std::move(on_refused)) {}

  // RESOURCE_EXHAUSTED when the client has as many sequences as it may have; nothing is changed
  // then.
  absl::Status TakeSequence();
  void ReturnSequence() { --sequences_; }

  // RESOURCE_EXHAUSTED when `more` pages that the client does not hold yet are too many.
  absl::Status CheckRoom(int64_t more) const;
  // How many of `pages` the client does not hold.
  int64_t CountNew(worker::CacheId cache, absl::Span<const int32_t> pages) const;
  // One of the client's sequences takes a page. Whether it may was checked before.
  void Hold(worker::CacheId cache, int32_t page);
  // The sequence gives the page back. A page that is not held is ignored: its cache was forgotten.
  void Release(worker::CacheId cache, int32_t page);
  // The cache is deleted: the client holds none of its pages any more.
  void ForgetPages(worker::CacheId cache);

  int64_t sequences() const { return sequences_; }
  int64_t pages() const { return static_cast<int64_t>(holds_.size()); }

 private:
  absl::Status Refuse(ClientLimit limit, int64_t held, int64_t wanted, int64_t most) const;

  const std::string client_;
  const ClientLimits& limits_;
  const OnRefused on_refused_;
  int64_t sequences_ = 0;
  // How many of the client's sequences (and steps under way) hold a page.
  absl::flat_hash_map<std::pair<worker::CacheId, int32_t>, int32_t> holds_;
};

// An account is null where nothing is limited.
using ClientAccountPtr = std::shared_ptr<ClientAccount>;

// The accounts of all clients that hold something.
class ClientQuota {
 public:
  // The limits must outlive the quota.
  ClientQuota(const ClientLimits* limits, OnRefused on_refused)
      : limits_(*limits), on_refused_(std::move(on_refused)) {}

  // Null when nothing is limited.
  ClientAccountPtr Of(const std::string& client);

  // How many accounts are kept, including those that were dropped since the last sweep.
  size_t size() const { return accounts_.size(); }

 private:
  void Sweep();

  const ClientLimits& limits_;
  const OnRefused on_refused_;
  // Sequences that hold something keep their owner's account alive.
  absl::flat_hash_map<std::string, std::weak_ptr<ClientAccount>> accounts_;
  size_t sweep_at_ = 64;
};

}  // namespace tributary::service
