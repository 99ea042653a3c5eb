// What a rank holds of one cache: its pages, page tables and plans, and a peer's replica.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "worker/backend.h"
#include "worker/cache_spec.h"
#include "worker/holdings.h"
#include "worker/page_tables.h"
#include "worker/plan.h"
#include "worker/plan_cache.h"
#include "worker/replica_keeper.h"

namespace tributary::worker {

// One cache on this rank.
struct CacheShard {
  CacheShard(const CacheSpec& spec_in, DcpLayout layout_in, std::unique_ptr<Shard> shard_in,
             bool shares_pages)
      : spec(spec_in),
        layout(layout_in),
        shard(std::move(shard_in)),
        replicas(spec_in, layout_in),
        tables(spec_in.num_pages,
               shares_pages ? static_cast<int32_t>(kSharedSlots / spec_in.page_size) : 0),
        records(static_cast<int32_t>(spec_in.layers.size())),
        rows_per_pass(RowsPerPass(spec_in)) {}

  CacheSpec spec;
  DcpLayout layout;
  std::unique_ptr<Shard> shard;
  ReplicaKeeper replicas;
  PageTables tables;
  SequenceRecords records;  // kept up to date if ExecutorOptions says so
  PlanCache plans;
  const int32_t rows_per_pass;
  bool complete = false;  // shard and replica have all their memory

  size_t bytes() const { return shard->bytes() + replicas.bytes(); }
};

// By cache; none is null. Owned by the rank's executor.
using CacheShards = absl::flat_hash_map<CacheId, std::unique_ptr<CacheShard>>;

// kNotFound unless the cache is there and has all its memory.
absl::StatusOr<CacheShard*> FindShard(const CacheShards& caches, CacheId id);

}  // namespace tributary::worker
