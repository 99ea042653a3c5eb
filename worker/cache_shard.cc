#include "worker/cache_shard.h"

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace tributary::worker {

absl::StatusOr<CacheShard*> FindShard(const CacheShards& caches, CacheId id) {
  const auto it = caches.find(id);
  if (it == caches.end() || !it->second->complete) {
    return absl::NotFoundError(absl::StrCat("cache ", id, " is unknown"));
  }
  return it->second.get();
}

}  // namespace tributary::worker
