#include "service/schedule/client_quota.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "base/status/rpc_errors.h"

namespace tributary::service {

absl::Status LimitReached(const std::string& client, ClientLimit limit, int64_t held,
                          int64_t wanted, int64_t most) {
  return Exhausted(
      absl::StrCat("client:", client, " ", Name(limit)),
      absl::StrCat("'", client, "' holds ", held, " and needs ", wanted, " more; ", most,
                   " is the most a client may hold (max_", Name(limit), "_per_client)"));
}

absl::Status ClientAccount::Refuse(ClientLimit limit, int64_t held, int64_t wanted,
                                   int64_t most) const {
  if (on_refused_) on_refused_(limit);
  return LimitReached(client_, limit, held, wanted, most);
}

absl::Status ClientAccount::TakeSequence() {
  if (limits_.sequences > 0 && sequences_ >= limits_.sequences) {
    return Refuse(ClientLimit::kSequences, sequences_, 1, limits_.sequences);
  }
  ++sequences_;
  return absl::OkStatus();
}

absl::Status ClientAccount::CheckRoom(int64_t more) const {
  if (limits_.pages == 0 || more <= limits_.pages - pages()) return absl::OkStatus();
  return Refuse(ClientLimit::kPages, pages(), more, limits_.pages);
}

int64_t ClientAccount::CountNew(worker::CacheId cache, absl::Span<const int32_t> pages) const {
  if (limits_.pages == 0) return 0;
  return std::count_if(pages.begin(), pages.end(), [&](int32_t page) {
    return !holds_.contains({cache, page});
  });
}

void ClientAccount::Hold(worker::CacheId cache, int32_t page) {
  if (limits_.pages > 0) ++holds_[{cache, page}];
}

void ClientAccount::Release(worker::CacheId cache, int32_t page) {
  const auto held = holds_.find({cache, page});
  if (held != holds_.end() && --held->second == 0) holds_.erase(held);
}

void ClientAccount::ForgetPages(worker::CacheId cache) {
  absl::erase_if(holds_, [cache](const auto& held) { return held.first.first == cache; });
}

ClientAccountPtr ClientQuota::Of(const std::string& client) {
  if (limits_.sequences == 0 && limits_.pages == 0) return nullptr;
  if (const auto found = accounts_.find(client); found != accounts_.end()) {
    if (ClientAccountPtr account = found->second.lock()) return account;
  }
  if (accounts_.size() >= sweep_at_) Sweep();
  auto account = std::make_shared<ClientAccount>(client, &limits_, on_refused_);
  accounts_[client] = account;
  return account;
}

// Seldom enough that an account costs a constant: names may be many where certificates are issued
// under a wildcard.
void ClientQuota::Sweep() {
  absl::erase_if(accounts_, [](const auto& account) { return account.second.expired(); });
  sweep_at_ = std::max<size_t>(64, 2 * accounts_.size());
}

}  // namespace tributary::service
