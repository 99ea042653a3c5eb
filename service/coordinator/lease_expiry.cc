#include "service/coordinator/lease_expiry.h"

#include <algorithm>
#include <string>
#include <utility>

#include "base/status/status_macros.h"

namespace tributary::service {
namespace {

// Until it is looked again for sequences that may be left.
constexpr std::chrono::seconds kLookAgain{1};
// That are looked at without letting go of the lock.
constexpr size_t kLookedAtTogether = 256;

// Calls visit(cache, sequence), with the lock held, for all sequences of all caches.
template <typename Visit>
void VisitSequences(CoordinatorLock& lock, const CacheRegistry& caches,
                    const Visit& visit) TRIBUTARY_UNLOCKED {
  std::vector<CachePtr> all;
  {
    const ReadSection section(lock);
    for (const auto& [name, cache] : caches.all()) all.push_back(cache);
  }
  std::sort(all.begin(), all.end(),
            [](const CachePtr& one, const CachePtr& other) { return one->name < other->name; });
  for (const CachePtr& cache : all) {
    worker::SequenceId last = 0;
    for (size_t seen = kLookedAtTogether; seen == kLookedAtTogether;) {
      const ReadSection section(lock);
      const std::vector<const Sequence*> some = cache->table.Next(last, kLookedAtTogether);
      seen = some.size();
      for (const Sequence* sequence : some) {
        last = sequence->id;
        visit(*cache, *sequence);
      }
    }
  }
}

}  // namespace

absl::StatusOr<v1::RenewLeaseReply> LeaseExpiry::Renew(const v1::RenewLeaseRequest& request) {
  TRIBUTARY_RETURN_IF_ERROR(Leases::CheckName(request.lease(), "lease"));
  const Leases::HolderPtr holder = leases_.Present(request.lease());
  v1::RenewLeaseReply reply;
  reply.set_timeout_seconds(std::chrono::duration<double>(leases_.timeout()).count());
  if (!request.with_sequences()) return reply;
  VisitSequences(lock_, caches_, [&](const Cache& cache, const Sequence& sequence) {
    if (sequence.lease != holder->lease()) return;
    v1::LeasedSequence* told = reply.add_sequences();
    told->set_cache_id(cache.name);
    told->set_sequence_id(sequence.id);
    told->set_length(LeastLength(sequence));
    told->set_lost(sequence.lost);
  });
  return reply;
}

CoordinatorLock::Clock::time_point LeaseExpiry::NextDue() const {
  return std::min(next_look_, leases_.NextLook());
}

void LeaseExpiry::ActIfDue(CoordinatorLock::Clock::time_point now) {
  for (LeasePtr& lease : leases_.TakeEnded(now)) {
    ended_.push_back(std::move(lease));
    next_look_ = now;
  }
  if (now < next_look_) return;
  next_look_ = CoordinatorLock::Clock::time_point::max();
  lock_.Defer([this, ended = ended_] { CloseSequencesOf(ended); });
}

void LeaseExpiry::CloseSequencesOf(const std::vector<LeasePtr>& ended) {
  struct Left {
    std::string cache;
    worker::SequenceId id = 0;
    LeasePtr lease;
  };
  std::vector<Left> left;
  VisitSequences(lock_, caches_, [&](const Cache& cache, const Sequence& sequence) {
    if (std::find(ended.begin(), ended.end(), sequence.lease) == ended.end()) return;
    left.push_back({cache.name, sequence.id, sequence.lease});
  });
  for (const LeasePtr& lease : ended) {
    const auto of_lease = std::count_if(left.begin(), left.end(),
                                        [&](const Left& one) { return one.lease == lease; });
    if (of_lease == 0) continue;
    log_.Info("a lease has ended: its sequences are closed", {{"sequences", of_lease}});
  }
  for (const Left& one : left) sequences_.CloseLeased(one.cache, one.id, one.lease);
  const CriticalSection section(lock_);
  std::erase_if(ended_, [&](const LeasePtr& lease) {
    return std::find(ended.begin(), ended.end(), lease) != ended.end() &&
           std::none_of(left.begin(), left.end(),
                        [&](const Left& one) { return one.lease == lease; });
  });
  if (!ended_.empty()) next_look_ = CoordinatorLock::Clock::now() + kLookAgain;
}

}  // namespace tributary::service
