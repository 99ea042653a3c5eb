#include "service/coordinator/adopt_sequences.h"

#include <algorithm>
#include <map>

#include "service/schedule/reconcile.h"
#include "worker/replica.h"

namespace tributary::service {
namespace {

// What a rank reports of one cache. Null: the rank does not have the cache.
const worker::HeldCache* ReportOf(worker::CacheId id, const worker::Holdings& held) {
  const auto is = [id](const worker::HeldCache& cache) { return cache.id == id; };
  const auto found = std::find_if(held.caches.begin(), held.caches.end(), is);
  return found == held.caches.end() ? nullptr : &*found;
}

// The reports of ranks that have all that they should have. What the others have they were told,
// or took from replicas, while the group formed, and it may be anything less.
std::vector<const worker::HeldCache*> ReportsOf(
    worker::CacheId id, const std::vector<std::optional<worker::Holdings>>& held, bool replicas) {
  std::vector<const worker::HeldCache*> reports;
  for (const std::optional<worker::Holdings>& holdings : held) {
    if (!holdings.has_value()) continue;
    const worker::HeldCache* report = ReportOf(id, *holdings);
    if (report == nullptr ? replicas : report->lacks_pages) continue;
    reports.push_back(report);
  }
  return reports;
}

// Pages that ranks lacked when the coordinator's last life ended.
void AddMissing(Cache& cache,
                const std::vector<std::optional<worker::Holdings>>& held) TRIBUTARY_LOCKED {
  const int32_t stride = cache.spec.replica_stride;
  for (int rank = 0; rank < static_cast<int>(held.size()); ++rank) {
    if (!held[rank].has_value()) continue;
    for (int32_t group = 0; group < cache.table.groups().size(); ++group) {
      const worker::HeldCache* report = ReportOf(cache.ids[group], *held[rank]);
      if (report == nullptr || report->lacks_pages) {
        cache.table.AddMissing(group, PagePlace::kRank, rank);
      }
      if (stride > 0 && (report == nullptr || report->replica_lacks_pages)) {
        cache.table.AddMissing(group, PagePlace::kReplica,
                               worker::WardOf(rank, stride, cache.ranks));
      }
    }
  }
}

Sequence Empty(worker::SequenceId id, const SequenceTable& table) {
  Sequence sequence;
  sequence.id = id;
  sequence.lengths.assign(table.geometry().layers, 0);
  sequence.last_step.assign(table.geometry().layers, 0);
  sequence.groups.resize(table.groups().size());
  return sequence;
}

// Puts what a group of layers holds into the sequence.
void Put(const worker::HeldSequence& held, int32_t group, const SequenceTable& table,
         Sequence* sequence) {
  const std::vector<int32_t>& layers = table.groups()[group].layers;
  for (size_t i = 0; i < layers.size() && i < held.lengths.size(); ++i) {
    sequence->lengths[layers[i]] = std::max<int64_t>(0, held.lengths[i]);
    sequence->last_step[layers[i]] = i < held.last_step.size() ? held.last_step[i] : 0;
  }
  PageList& list = sequence->groups[group];
  list.pages = held.pages;
  list.given_up = held.given_up;
  std::fill_n(list.pages.begin(), list.given_up, kNoPage);
}

}  // namespace

AdoptedSequences AdoptSequences(Cache& cache,
                                const std::vector<std::optional<worker::Holdings>>& held) {
  AdoptedSequences adopted;
  std::vector<const worker::Holdings*> ranks;
  for (const auto& holdings : held) {
    // A rank that has carried out nothing holds nothing that others could be ahead of.
    const bool counts = holdings.has_value() && holdings->last != worker::CommandMark();
    ranks.push_back(counts ? &*holdings : nullptr);
  }
  const worker::CommandMark last = LastOfAll(ranks);
  std::map<worker::SequenceId, Sequence> sequences;
  std::map<worker::SequenceId, std::string> lost;
  std::vector<worker::SequenceId> absent;
  for (int32_t group = 0; group < cache.table.groups().size(); ++group) {
    const auto reports = ReportsOf(cache.ids[group], held, cache.spec.replica_stride > 0);
    const worker::CacheSpec spec = cache.GroupSpec(group);
    const bool other = std::any_of(reports.begin(), reports.end(), [&spec](const auto* report) {
      return report != nullptr && !worker::SameSpec(report->spec, spec);
    });
    if (other) return adopted;
    ReconciledCache reconciled = Reconcile(reports, last, cache.table.page_tokens());
    for (const worker::HeldSequence& sequence : reconciled.whole) {
      auto [it, fresh] = sequences.try_emplace(sequence.id, Empty(sequence.id, cache.table));
      Put(sequence, group, cache.table, &it->second);
    }
    for (ReconciledCache::Lost& sequence : reconciled.lost) {
      lost.emplace(sequence.sequence.id, std::move(sequence.why));
    }
    absent.insert(absent.end(), reconciled.absent.begin(), reconciled.absent.end());
  }
  // A fork or a close that had reached some groups of layers, or some ranks, had been answered to
  // nobody.
  std::sort(absent.begin(), absent.end());
  absent.erase(std::unique(absent.begin(), absent.end()), absent.end());
  for (const worker::SequenceId id : absent) {
    sequences.erase(id);
    lost.erase(id);
  }
  for (const auto& [id, why] : lost) {
    Sequence sequence = Empty(id, cache.table);
    sequence.lost = true;
    sequences.insert_or_assign(id, std::move(sequence));
  }
  adopted.whole = static_cast<int64_t>(sequences.size() - lost.size());
  for (auto& [id, sequence] : sequences) cache.table.Restore(std::move(sequence));
  cache.table.FinishRestoring();
  AddMissing(cache, held);
  adopted.lost.assign(lost.begin(), lost.end());
  adopted.absent = std::move(absent);
  return adopted;
}

}  // namespace tributary::service
