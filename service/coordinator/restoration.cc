#include "service/coordinator/restoration.h"

#include <algorithm>
#include <utility>
#include <vector>

namespace tributary::service {
namespace {

using Clock = CoordinatorLock::Clock;

// Of one transfer. A rank that lacks pages keeps callers waiting, and so does one that leaves: as
// many bytes at a time as take a few milliseconds, which steps that come in between wait for. A
// replica that lacks some keeps nobody waiting, and these steps are to notice little of it.
constexpr int64_t kLeastBytes = int64_t{8} << 20;
constexpr int64_t kMostBytes = int64_t{64} << 20;
constexpr int64_t kFewBytes = int64_t{2} << 20;
constexpr std::chrono::milliseconds kQuick{6};
constexpr std::chrono::milliseconds kSlow{20};
// How long until pages that had to wait for steps, or whose transfer failed, are tried again.
constexpr std::chrono::milliseconds kPause{200};
constexpr std::chrono::seconds kTellEvery{5};

// [groups of layers]
std::vector<int32_t> MostPages(const Cache& cache, int64_t bytes) TRIBUTARY_LOCKED {
  std::vector<int32_t> most;
  for (int32_t group = 0; group < cache.table.groups().size(); ++group) {
    const int64_t pages = bytes / cache.PageBytes(group);
    most.push_back(static_cast<int32_t>(std::clamp<int64_t>(pages, 1, 1 << 16)));
  }
  return most;
}

}  // namespace

void Restoration::OnReady() {
  under_way_ = 0;
  bytes_at_once_ = kLeastBytes;
  Advance();
}

void Restoration::OnBroken() {
  under_way_ = 0;
  let_go_ = false;
  leaving_.clear();
  look_again_.reset();
  for (const auto& [name, cache] : caches_.all()) cache->table.StopTransfers();
}

void Restoration::ActIfDue(Clock::time_point now) {
  if (!look_again_.has_value() || *look_again_ > now) return;
  look_again_.reset();
  Advance();
}

int64_t Restoration::Missing(PagePlace place) const {
  int64_t pages = 0;
  for (const auto& [name, cache] : caches_.all()) pages += cache->table.missing(place);
  return pages;
}

void Restoration::Advance() {
  if (!serving_.ready() || let_go_) return;
  if (HandOver()) return;  // the group is about to break
  // Replicas are made again when no rank lacks anything: callers come first.
  for (const PagePlace to : kPagePlaces) {
    const bool hurries = to == PagePlace::kRank || !leaving_.empty();
    while (under_way_ < (hurries ? 2 : 1) && SendNext(to, hurries ? bytes_at_once_ : kFewBytes)) {
    }
    if (Missing(to) > 0) break;
  }
  Tell();
  const bool waits =
      Missing(PagePlace::kRank) + Missing(PagePlace::kReplica) > 0 || !leaving_.empty();
  if (under_way_ == 0 && waits) look_again_ = Clock::now() + kPause;
}

bool Restoration::SendNext(PagePlace to, int64_t bytes) {
  for (const auto& [name, cache] : caches_.all()) {
    if (!cache->created || !cache->not_held.ok()) continue;
    const std::vector<int32_t> most = MostPages(*cache, bytes);
    std::optional<PageTransfer> transfer = cache->table.NextTransfer(to, most);
    while (transfer.has_value() && transfer->complete && !confirms_ && !transfer->ends_hand_over) {
      transfer = cache->table.NextTransfer(to, most);
    }
    if (!transfer.has_value()) continue;
    ++under_way_;
    commands_.SendBody(cache->ids[transfer->group],
                       worker::TransferPagesCommand{.rank = transfer->rank,
                                                    .restore = to == PagePlace::kRank,
                                                    .pages = transfer->pages,
                                                    .complete = transfer->complete},
                       [this, cache = cache, transfer = *transfer, epoch = serving_.epoch(),
                        bytes = bytes, began = Clock::now()](const Outcome& outcome) {
                         OnDone(cache, transfer, epoch, {bytes, began}, outcome.status);
                       });
    return true;
  }
  return false;
}

void Restoration::OnDone(const CachePtr& cache, const PageTransfer& transfer, uint64_t epoch,
                         const Sent& sent, const absl::Status& status) {
  const CriticalSection section(lock_);
  // When the group broke, all its transfers were stopped.
  if (epoch != serving_.epoch() || !serving_.ready()) return;
  --under_way_;
  cache->table.EndTransfer(transfer, status.ok());
  if (!status.ok()) {
    log_.Warning("pages could not be brought to a worker",
                 {{"cache", cache->name}, {"rank", transfer.rank}, {"error", status.message()}});
    look_again_ = Clock::now() + kPause;
    return;
  }
  bytes_[static_cast<size_t>(transfer.to)] +=
      transfer.pages.size() * static_cast<uint64_t>(cache->PageBytes(transfer.group));
  // The last one of a cache has fewer pages than it might.
  const Clock::duration took = Clock::now() - sent.began;
  if (sent.bytes == bytes_at_once_ && !transfer.pages.empty()) {
    if (took < kQuick) bytes_at_once_ = std::min(2 * bytes_at_once_, kMostBytes);
    if (took > kSlow) bytes_at_once_ = std::max(bytes_at_once_ / 2, kLeastBytes);
  }
  Advance();
}

// -------------------------------------------------------------------------------------- hand-over

bool Restoration::OnLeaving(int rank) {
  if (group_.size() == 1) return false;
  leaving_.push_back({.rank = rank,
                      .began = Clock::now(),
                      .bytes_before = bytes_replicated(),
                      .asked = {},
                      .given_up = {}});
  log_.Info("a worker leaves", {{"rank", rank}});
  Advance();
  return true;
}

bool Restoration::HandOver() {
  if (leaving_.empty()) return false;
  Leaving& leaving = leaving_.front();
  bool all = true;
  for (const auto& [name, cache] : caches_.all()) all &= HandedOver(cache, &leaving);
  if (!all) return false;
  const auto ms =
      std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - leaving.began);
  log_.Info("a worker is let go", {{"rank", leaving.rank},
                                   {"handed_over_bytes", bytes_replicated() - leaving.bytes_before},
                                   {"milliseconds", ms.count()}});
  let_go_ = true;
  lock_.Defer([this, rank = leaving.rank] { group_.LetGo(rank); });
  // The group breaks now. Others that leave have their turn when it has formed again.
  leaving_.clear();
  return true;
}

bool Restoration::HandedOver(const CachePtr& cache, Leaving* leaving) {
  if (!cache->created || !cache->not_held.ok() || leaving->given_up.contains(cache.get())) {
    return true;
  }
  if (cache->table.MayLeave(leaving->rank)) return true;
  if (cache->spec.replica_stride > 0 || cache->table.KeptForHandOver(leaving->rank)) return false;
  int32_t used = 0;
  for (int32_t group = 0; group < cache->table.groups().size(); ++group) {
    used += cache->table.pages(group).used();
  }
  if (used == 0 || !cache->backends.first()->replicas) return true;
  if (leaving->asked.insert(cache.get()).second) AskKeeper(cache, leaving->rank, 0);
  return false;
}

void Restoration::AskKeeper(const CachePtr& cache, int rank, int32_t group) {
  commands_.SendBody(cache->ids[group],
                     worker::TransferPagesCommand{.rank = rank, .restore = false, .pages = {}},
                     [this, cache, rank, group, epoch = serving_.epoch()](const Outcome& outcome) {
                       OnKeeperAnswer(cache, rank, group, epoch, outcome);
                     });
}

void Restoration::OnKeeperAnswer(const CachePtr& cache, int rank, int32_t group, uint64_t epoch,
                                 const Outcome& outcome) {
  const CriticalSection section(lock_);
  if (epoch != serving_.epoch() || !serving_.ready()) return;
  const bool more = outcome.status.ok() &&
                    std::any_of(outcome.replies.begin(), outcome.replies.end(),
                                [](const worker::Reply& reply) { return reply.more_memory; });
  if (more) return AskKeeper(cache, rank, group);
  if (!outcome.status.ok()) {
    log_.Warning("tokens of a worker that leaves are lost: no other worker can keep them",
                 {{"cache", cache->name}, {"rank", rank}, {"error", outcome.status.message()}});
    if (!leaving_.empty() && leaving_.front().rank == rank) {
      leaving_.front().given_up.insert(cache.get());
    }
  } else if (group + 1 < cache->table.groups().size()) {
    return AskKeeper(cache, rank, group + 1);
  } else {
    cache->table.KeepForHandOver(rank);
  }
  Advance();
}

// --------------------------------------------------------------------------------------- progress

void Restoration::Tell() {
  const Clock::time_point now = Clock::now();
  std::optional<PagePlace> place;
  if (Missing(PagePlace::kReplica) > 0) place = PagePlace::kReplica;
  if (Missing(PagePlace::kRank) > 0) place = PagePlace::kRank;
  const auto what = [](PagePlace of) {
    return of == PagePlace::kRank ? "restoring pages from replicas" : "making replicas again";
  };
  if (telling_.has_value() && place != telling_) {
    const auto ms = std::chrono::duration_cast<std::chrono::milliseconds>(now - began_);
    log_.Info(
        *telling_ == PagePlace::kRank ? "pages restored from replicas" : "replicas are made again",
        {{"bytes", bytes_[static_cast<size_t>(*telling_)] - bytes_before_},
         {"milliseconds", ms.count()}});
    telling_.reset();
  }
  if (!place.has_value() || (telling_.has_value() && now < told_ + kTellEvery)) return;
  const auto index = static_cast<size_t>(*place);
  if (!telling_.has_value()) {
    began_ = now;
    bytes_before_ = bytes_[index];
  }
  told_ = now;
  telling_ = place;
  log_.Info(what(*place),
            {{"pages", Missing(*place)}, {"bytes_so_far", bytes_[index] - bytes_before_}});
}

}  // namespace tributary::service
