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

// 0: no limit.
struct ClientLimits {
  int64_t sequences = 0;
  int64_t pages = 0;
  int64_t caches = 0;
  int64_t cache_bytes = 0;  // of their pages, on all ranks together
  int64_t sessions = 0;
  int64_t mailbox_bytes = 0;  // of its sessions
};

// RESOURCE_EXHAUSTED for a client at a limit. The client holds `held` and asks for `wanted` more;
// `most` is what it may hold.
absl::Status LimitReached(const std::string& client, ClientLimit limit, int64_t held,
                          int64_t wanted, int64_t most);

// What one client holds.
class ClientAccount {
 public:
  ClientAccount(std::string client, const ClientLimits& limits, OnRefused on_refused)
      : client_(std::move(client)), limits_(limits), on_refused_(std::move(on_refused)) {}

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
  const ClientLimits limits_;
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
  ClientQuota(const ClientLimits& limits, OnRefused on_refused)
      : limits_(limits), on_refused_(std::move(on_refused)) {}

  // Null when nothing is limited.
  ClientAccountPtr Of(const std::string& client);

  // How many accounts are kept, including those that were dropped since the last sweep.
  size_t size() const { return accounts_.size(); }

 private:
  void Sweep();

  const ClientLimits limits_;
  const OnRefused on_refused_;
  // Sequences that hold something keep their owner's account alive.
  absl::flat_hash_map<std::string, std::weak_ptr<ClientAccount>> accounts_;
  size_t sweep_at_ = 64;
};

}  // namespace tributary::service
