#include "service/coordinator/topology.h"

#include <algorithm>

#include "base/status/errors.h"
#include "base/status/rpc_errors.h"

namespace tributary::service {
namespace {

constexpr int32_t kDefaultSequences = 100;

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

// The first sequences by id.
std::vector<const Sequence*> FirstById(const SequenceTable& table, size_t count) {
  std::vector<const Sequence*> all;
  for (const auto& [id, sequence] : table.sequences()) all.push_back(sequence.get());
  count = std::min(count, all.size());
  std::partial_sort(all.begin(), all.begin() + count, all.end(),
                    [](const Sequence* a, const Sequence* b) { return a->id < b->id; });
  all.resize(count);
  return all;
}

// The tokens that each rank holds of a cache.
void AddTokens(const Cache& cache, v1::GetTopologyReply* reply) TRIBUTARY_LOCKED {
  for (const auto& [id, sequence] : cache.table.sequences()) {
    if (sequence->lost) continue;
    const int64_t length = LeastLength(*sequence);
    for (v1::WorkerInfo& worker : *reply->mutable_workers()) {
      worker.set_tokens(worker.tokens() +
                        cache.table.LocalTokens(worker.rank(), *sequence, length));
    }
  }
}

void FillCache(const Cache& cache, const v1::GetTopologyRequest& request,
               v1::CacheInfo* info) TRIBUTARY_LOCKED {
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
  if (!request.with_sequences()) return;
  const int32_t most = request.max_sequences() == 0 ? kDefaultSequences : request.max_sequences();
  for (const Sequence* sequence : FirstById(cache.table, most)) {
    FillSequence(cache.table, *sequence, info->add_sequence());
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
    worker->set_memory_bytes(member.memory_bytes);
    worker->set_busy_seconds(member.busy_seconds);
  }
}

absl::Status AddCaches(const CacheRegistry::ByName& all, const v1::GetTopologyRequest& request,
                       v1::GetTopologyReply* reply) {
  std::vector<const Cache*> caches;
  for (const auto& [name, cache] : all) {
    if (cache->created) caches.push_back(cache.get());
  }
  std::sort(caches.begin(), caches.end(),
            [](const Cache* a, const Cache* b) { return a->name < b->name; });
  bool found = request.cache_id().empty();
  for (const Cache* cache : caches) {
    AddTokens(*cache, reply);
    if (!request.cache_id().empty() && cache->name != request.cache_id()) continue;
    found = true;
    FillCache(*cache, request, reply->add_caches());
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
  }
}

}  // namespace tributary::service
