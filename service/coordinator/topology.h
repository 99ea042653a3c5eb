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

// Adds the caches that the request asks for, by name, and the tokens that each worker holds.
// NOT_FOUND when the request names a cache that does not exist.
absl::Status AddCaches(const CacheRegistry::ByName& caches, const v1::GetTopologyRequest& request,
                       v1::GetTopologyReply* reply) TRIBUTARY_LOCKED;

// Adds the sums over all caches.
void CountCaches(const CacheRegistry::ByName& caches, Snapshot* snapshot) TRIBUTARY_LOCKED;

}  // namespace tributary::service
