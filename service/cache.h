// A cache as the coordinator knows it.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "service/resolve_spec.h"
#include "service/sequence_order.h"
#include "service/sequence_table.h"
#include "tributary/v1/attention.pb.h"
#include "worker/backends.h"
#include "worker/cache_spec.h"
#include "worker/command.h"

namespace tributary::service {

struct Cache {
  Cache(std::string cache_name, worker::CacheId cache_id, worker::CacheSpec cache_spec,
        CacheTerms cache_terms, v1::CacheSpec shown, worker::CacheBackends cache_backends,
        const TableGeometry& geometry)
      : name(std::move(cache_name)),
        id(cache_id),
        spec(std::move(cache_spec)),
        terms(std::move(cache_terms)),
        public_spec(std::move(shown)),
        backends(std::move(cache_backends)),
        table(geometry) {}

  // Fixed, and so read without the coordinator's lock.
  const std::string name;
  const worker::CacheId id;  // never used again
  const worker::CacheSpec spec;
  const CacheTerms terms;
  const v1::CacheSpec public_spec;
  const worker::CacheBackends backends;

  // Under the coordinator's lock.
  SequenceTable table;
  SequenceOrder order;
  bool created = false;  // every rank has it
  // Callers that wait until it is.
  std::vector<std::function<void(absl::StatusOr<v1::CreateCacheReply>)>> creators;
  // Closed sequences that workers may still hold tables of.
  std::vector<worker::SequenceId> undropped;
};

}  // namespace tributary::service
