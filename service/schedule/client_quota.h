// How many open sequences and pages each client may hold, over all caches.
//
// A sequence counts for whoever opened or forked it, until it is closed or lost. A page counts for
// a client while any of its sequences holds it: once, however many of them share it, and for each
// of several clients that share it. So forking among its own sequences costs a client no pages, and
// taking over another's prefix costs what it then holds.
//
// Counting costs a look-up a page that changes hands, whatever a sequence holds. What is not
// limited is not counted.
//
// Not thread safe, but that accounts may be let go on any thread.
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

struct ClientLimits {
  int64_t sequences = 0;  // 0: no limit
  int64_t pages = 0;      // 0: no limit
};

// What one client holds.
class ClientAccount {
 public:
  ClientAccount(std::string client, const ClientLimits& limits, OnRefused on_refused)
      : client_(std::move(client)), limits_(limits), on_refused_(std::move(on_refused)) {}

  // RESOURCE_EXHAUSTED, nothing changed, when the client has as many as it may.
  absl::Status TakeSequence();
  void ReturnSequence() { --sequences_; }

  // RESOURCE_EXHAUSTED when `more` pages that the client does not hold yet are too many.
  absl::Status CheckRoom(int64_t more) const;
  // Of `pages`, those that the client does not hold.
  int64_t CountNew(worker::CacheId cache, absl::Span<const int32_t> pages) const;
  // One of the client's sequences holds a page; no check.
  void Hold(worker::CacheId cache, int32_t page);
  // It holds it no longer. A page that is not held is let be: its cache was forgotten.
  void Release(worker::CacheId cache, int32_t page);
  // The cache is deleted: none of its pages is held any more.
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

// Null stands for a client that nobody counts.
using ClientAccountPtr = std::shared_ptr<ClientAccount>;

// The accounts of all clients that hold something.
class ClientQuota {
 public:
  ClientQuota(const ClientLimits& limits, OnRefused on_refused)
      : limits_(limits), on_refused_(std::move(on_refused)) {}

  // Null when nothing is limited.
  ClientAccountPtr Of(const std::string& client);

  // Accounts kept, those let go since the last sweep included.
  size_t size() const { return accounts_.size(); }

 private:
  void Sweep();

  const ClientLimits limits_;
  const OnRefused on_refused_;
  // Whoever holds something keeps its account.
  absl::flat_hash_map<std::string, std::weak_ptr<ClientAccount>> accounts_;
  size_t sweep_at_ = 64;
};

}  // namespace tributary::service
