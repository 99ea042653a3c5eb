#include "service/coordinator/topology.h"

#include <algorithm>

#include "base/status/errors.h"
#include "base/status/rpc_errors.h"

namespace tributary::service {
namespace {

constexpr int32_t kDefaultSequences = 100;
// That are looked at without letting go of the lock.
constexpr size_t kSequencesAtATime = 256;

void FillSequence(const SequenceTable& table, const Sequence& sequence, v1::SequenceInfo* info) {
  const int64_t length = LeastLength(sequence);
  info->set_sequence_id(sequence.id);
  info->set_length(length);
  for (const PageList& list : sequence.groups) info->set_pages(info->pages() + list.held());
  info->set_held_from(table.HeldFrom(sequence));
  info->set_lost(sequence.lost);
  for (int rank = 0; rank < table.geometry().ranks; ++rank) {
    info->add_local_lengths(sequence.lost ? 0 : table.LocalTokens(rank, sequence, length));
  }
}

// The tokens of a sequence that each rank holds.
void AddTokens(const SequenceTable& table, const Sequence& sequence, v1::GetTopologyReply* reply) {
  if (sequence.lost) return;
  const int64_t length = LeastLength(sequence);
  for (v1::WorkerInfo& worker : *reply->mutable_workers()) {
    if (worker.rank() >= table.geometry().ranks) continue;  // of a larger group that is to be
    worker.set_tokens(worker.tokens() + table.LocalTokens(worker.rank(), sequence, length));
  }
}

void FillCache(const Cache& cache, v1::CacheInfo* info) TRIBUTARY_LOCKED {
  info->set_cache_id(cache.name);
  *info->mutable_spec() = cache.public_spec;
  for (int32_t group = 0; group < cache.table.groups().size(); ++group) {
    const PageAllocator& pages = cache.table.pages(group);
    info->set_pages_total(info->pages_total() + pages.total());
    info->set_pages_used(info->pages_used() + pages.used());
    info->set_pages_shared(info->pages_shared() + pages.shared());
    if (group == 0) continue;
    info->set_window_pages_total(pages.total());
    info->set_window_pages_used(pages.used());
  }
  info->set_sequences(static_cast<int64_t>(cache.table.sequences().size()));
  info->set_sequences_lost(cache.table.lost());
  info->set_pages_given_up(cache.table.given_up());
  info->set_pages_restoring(cache.table.missing(PagePlace::kRank));
  info->set_pages_without_replica(cache.table.missing(PagePlace::kReplica));
  info->set_not_held_because(std::string(cache.not_held.message()));
}

// All sequences of a cache, by id. The first `most` are listed in `info`, unless that is null.
void AddSequences(CoordinatorLock& lock, const Cache& cache, int32_t most, v1::CacheInfo* info,
                  v1::GetTopologyReply* reply) TRIBUTARY_UNLOCKED {
  worker::SequenceId last = 0;
  for (size_t seen = kSequencesAtATime; seen == kSequencesAtATime;) {
    const ReadSection section(lock);
    const SequenceTable& table = cache.table;
    const std::vector<const Sequence*> some = table.Next(last, kSequencesAtATime);
    seen = some.size();
    for (const Sequence* sequence : some) {
      last = sequence->id;
      AddTokens(table, *sequence, reply);
      if (info != nullptr && info->sequence_size() < most) {
        FillSequence(table, *sequence, info->add_sequence());
      }
    }
  }
}

}  // namespace

void AddWorkers(const std::vector<Member>& members, v1::GetTopologyReply* reply) {
  for (const Member& member : members) {
    v1::WorkerInfo* worker = reply->add_workers();
    worker->set_rank(member.rank);
    worker->set_address(member.address);
    worker->set_backend(member.backend);
    worker->set_connected(member.connected);
    worker->set_version(member.build.empty() ? reply->version() : member.build);
    worker->set_protocol_version(member.protocol);
    worker->set_memory_bytes(member.memory_bytes);
    worker->set_busy_seconds(member.busy_seconds);
  }
}

absl::Status AddCaches(CoordinatorLock& lock, const std::vector<CachePtr>& caches,
                       const v1::GetTopologyRequest& request, v1::GetTopologyReply* reply) {
  const int32_t most = request.max_sequences() == 0 ? kDefaultSequences : request.max_sequences();
  bool found = request.cache_id().empty();
  for (const CachePtr& cache : caches) {
    v1::CacheInfo* info = nullptr;
    if (request.cache_id().empty() || cache->name == request.cache_id()) {
      found = true;
      info = reply->add_caches();
      const ReadSection section(lock);
      FillCache(*cache, info);
    }
    AddSequences(lock, *cache, most, request.with_sequences() ? info : nullptr, reply);
  }
  if (!found) return NotFound("cache", request.cache_id(), "cache_id");
  return absl::OkStatus();
}

void CountCaches(const CacheRegistry::ByName& all, Snapshot* snapshot) {
  for (const auto& [name, cache] : all) {
    if (!cache->created) continue;
    ++snapshot->caches;
    for (int32_t group = 0; group < cache->table.groups().size(); ++group) {
      const PageAllocator& pages = cache->table.pages(group);
      snapshot->pages_total += pages.total();
      snapshot->pages_used += pages.used();
      snapshot->pages_shared += pages.shared();
      snapshot->fullest_cache =
          std::max(snapshot->fullest_cache,
                   static_cast<double>(pages.used()) / std::max<double>(pages.total(), 1));
    }
    snapshot->sequences += static_cast<int64_t>(cache->table.sequences().size());
    snapshot->sequences_lost += cache->table.lost();
    snapshot->pages_restoring += cache->table.missing(PagePlace::kRank);
    snapshot->pages_without_replica += cache->table.missing(PagePlace::kReplica);
  }
}

}  // namespace tributary::service
