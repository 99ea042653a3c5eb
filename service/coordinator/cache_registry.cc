#include "service/coordinator/cache_registry.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status/errors.h"
#include "base/status/rpc_errors.h"
#include "base/status/status_macros.h"
#include "service/data/resolve_spec.h"
#include "service/data/shared_memory.h"

namespace tributary::service {
namespace {

TableGeometry GeometryOf(const std::string& name, worker::CacheId id, const ResolvedSpec& resolved,
                         int ranks, int32_t max_sequences) {
  const worker::CacheSpec& spec = resolved.spec;
  return {.layers = static_cast<int32_t>(spec.layers.size()),
          .ranks = ranks,
          .page_size = spec.page_size,
          .interleave = spec.interleave,
          .pages = spec.num_pages,
          .max_sequences = max_sequences,
          .name = name,
          .first_id = id,
          .window_left = WindowsOf(spec),
          .rollback_tokens = resolved.terms.rollback_tokens,
          .window_pages = resolved.terms.window_pages};
}

v1::CreateCacheReply CreatedReply(const Cache& cache) {
  v1::CreateCacheReply reply;
  *reply.mutable_spec() = cache.public_spec;
  reply.set_ranks(cache.ranks);
  reply.set_backend(cache.backends.first()->name);
  return reply;
}

// A cache is usable when every mode of attention that was asked for has a backend or, if none was
// asked for, when some mode has one. If it is not, every mode without a backend gives its reasons.
absl::Status CheckBackends(const worker::CacheBackends& backends, const CacheTerms& terms) {
  const auto supported = [&](worker::AttentionMode mode) { return backends.of(mode).ok(); };
  const bool usable = terms.modes.empty()
                          ? backends.first() != nullptr
                          : std::all_of(terms.modes.begin(), terms.modes.end(), supported);
  if (usable) return absl::OkStatus();
  std::vector<std::string> reasons;
  for (const worker::AttentionMode mode : worker::kAttentionModes) {
    if (!terms.Allow(mode)) continue;
    for (const std::string& refusal : backends.of(mode).refusals) {
      reasons.push_back(absl::StrCat(Name(mode), ": ", refusal));
    }
  }
  return Unsupported("spec", reasons);
}

}  // namespace

CacheRegistry::CacheRegistry(const CoordinatorOptions& options, const telemetry::Logger& log,
                             const WorkerGroup& group, CoordinatorLock& lock,
                             const ServingState& serving, GroupCommands& commands, CallOrder& order)
    : options_(options),
      log_(log),
      group_(group),
      lock_(lock),
      serving_(serving),
      commands_(commands),
      order_(order) {}

absl::StatusOr<CachePtr> CacheRegistry::Find(const std::string& name) const {
  TRIBUTARY_RETURN_IF_ERROR(serving_.Check());
  const auto it = caches_.find(name);
  if (it == caches_.end() || !it->second->created) return NotFound("cache", name, "cache_id");
  return it->second;
}

// ----------------------------------------------------------------------------------------- create

void CacheRegistry::Create(const v1::CreateCacheRequest& request, Done<v1::CreateCacheReply> done) {
  absl::Status named = CheckName("cache_id", request.cache_id());
  if (!named.ok()) return done(std::move(named));
  absl::StatusOr<ResolvedSpec> resolved = ResolveSpec(request.spec(), group_.size());
  if (!resolved.ok()) return done(resolved.status());
  worker::CacheBackends backends(
      options_.backends, resolved->spec,
      {.device = group_.device(), .batch_invariant = options_.deterministic});
  absl::Status usable = CheckBackends(backends, resolved->terms);
  if (!usable.ok()) return done(std::move(usable));

  const CriticalSection section(lock_);
  lock_.AcceptCall();
  if (absl::Status serving = serving_.Check(); !serving.ok()) {
    return lock_.Answer([done, serving] { done(serving); });
  }
  if (const auto it = caches_.find(request.cache_id()); it != caches_.end()) {
    const CachePtr cache = it->second;
    if (!worker::SameSpec(cache->spec, resolved->spec) || !(cache->terms == resolved->terms)) {
      return lock_.Answer([done, cache] {
        done(Conflict("cache_id",
                      absl::StrCat("cache '", cache->name, "' exists with another spec")));
      });
    }
    if (cache->created) return lock_.Answer([done, cache] { done(CreatedReply(*cache)); });
    cache->creators.push_back(std::move(done));
    return;
  }
  const CachePtr cache = Add(request.cache_id(), *std::move(resolved), std::move(backends));
  cache->creators.push_back(std::move(done));
  commands_.SendToLayerGroups(
      *cache,
      [&cache](int32_t group)
          TRIBUTARY_LOCKED { return worker::CreateCacheCommand{cache->GroupSpec(group)}; },
      [this, cache](const absl::Status& status) { OnCreated(cache, status); });
}

CachePtr CacheRegistry::Add(const std::string& name, ResolvedSpec resolved,
                            worker::CacheBackends backends) {
  const TableGeometry geometry =
      GeometryOf(name, next_id_, resolved, group_.size(), options_.max_sequences);
  auto cache =
      std::make_shared<Cache>(name, next_id_, std::move(resolved), std::move(backends), geometry);
  next_id_ += static_cast<worker::CacheId>(cache->ids.size());
  caches_.emplace(cache->name, cache);
  return cache;
}

void CacheRegistry::OnCreated(const CachePtr& cache, const absl::Status& status) {
  const CriticalSection section(lock_);
  const absl::Status failure = FromOutcome(status, options_.retry_delay);
  if (failure.ok()) {
    cache->created = true;
    log_.Info("cache created", {{"cache", cache->name},
                                {"pages", cache->spec.num_pages},
                                {"layers", cache->spec.layers.size()},
                                {"backend", cache->backends.first()->name}});
  } else {
    caches_.erase(cache->name);
    // Some ranks may have it.
    if (serving_.ready()) {
      Drop(*cache, [] {});
    } else {
      undropped_.insert(undropped_.end(), cache->ids.begin(), cache->ids.end());
    }
    log_.Warning("cache not created", {{"cache", cache->name}, {"error", failure.message()}});
  }
  for (auto& creator : std::exchange(cache->creators, {})) {
    lock_.Answer([creator = std::move(creator), cache, failure] {
      if (failure.ok()) {
        creator(CreatedReply(*cache));
      } else {
        creator(failure);
      }
    });
  }
}

// ----------------------------------------------------------------------------------------- delete

void CacheRegistry::Delete(const v1::DeleteCacheRequest& request, Done<v1::DeleteCacheReply> done) {
  const CriticalSection section(lock_);
  lock_.AcceptCall();
  const absl::StatusOr<CachePtr> found = Find(request.cache_id());
  if (!found.ok()) {
    return lock_.Answer([done, status = found.status()] { done(status); });
  }
  const CachePtr& cache = *found;
  caches_.erase(request.cache_id());
  order_.FailAllOf(*cache, NotFound("cache", request.cache_id(), "cache_id"));
  cache->table.DisownAll();
  Drop(*cache,
       [this, done]() TRIBUTARY_LOCKED { lock_.Answer([done] { done(v1::DeleteCacheReply()); }); });
}

void CacheRegistry::Drop(const Cache& cache, std::function<void()> done) {
  commands_.SendToLayerGroups(
      cache, [](int32_t) { return worker::DropCacheCommand{}; },
      [this, ids = cache.ids, done = std::move(done)](const absl::Status& status) {
        const CriticalSection section(lock_);
        if (!status.ok()) undropped_.insert(undropped_.end(), ids.begin(), ids.end());
        done();
      });
}

// ------------------------------------------------------------------------------------- new groups

void CacheRegistry::MarkLost(const std::vector<bool>& fresh) {
  for (const auto& [name, cache] : caches_) {
    if (!cache->created) continue;
    const int64_t lost_before = cache->table.lost();
    cache->table.MarkLostOn(fresh);
    const int64_t lost = cache->table.lost() - lost_before;
    if (lost > 0) log_.Warning("sequences lost", {{"cache", name}, {"sequences", lost}});
  }
}

void CacheRegistry::DropAgain() {
  for (const worker::CacheId id : std::exchange(undropped_, {})) {
    commands_.SendBody(id, worker::DropCacheCommand{}, [this, id](const Outcome& outcome) {
      if (outcome.status.ok()) return;
      const CriticalSection section(lock_);
      undropped_.push_back(id);
    });
  }
}

}  // namespace tributary::service
