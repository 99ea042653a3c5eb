// What the service says of its caches and workers when it is asked.
#pragma once

#include <vector>

#include "absl/status/status.h"
#include "service/coordinator/cache_registry.h"
#include "service/coordinator/critical_section.h"
#include "service/observe/snapshot.h"
#include "service/workers/worker_group.h"
#include "tributary/v1/attention.pb.h"

namespace tributary::service {

// Adds the workers, one per rank.
void AddWorkers(const std::vector<Member>& members, v1::GetTopologyReply* reply);

// Adds those of `caches` that the request asks for, in their order, and the tokens of all of them
// that each worker holds. The lock is taken for some sequences at a time, so that calls of hosts
// come in between. NOT_FOUND when the request names a cache that is not among them.
absl::Status AddCaches(CoordinatorLock& lock, const std::vector<CachePtr>& caches,
                       const v1::GetTopologyRequest& request,
                       v1::GetTopologyReply* reply) TRIBUTARY_UNLOCKED;

// Adds the sums over all caches.
void CountCaches(const CacheRegistry::ByName& caches, Snapshot* snapshot) TRIBUTARY_LOCKED;

}  // namespace tributary::service
