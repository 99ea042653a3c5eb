#include "service/coordinator/cache_registry.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "base/status/errors.h"
#include "base/status/rpc_errors.h"
#include "base/status/status_macros.h"
#include "service/coordinator/adopt_sequences.h"
#include "service/data/resolve_spec.h"
#include "service/data/shared_memory.h"
#include "worker/replica.h"

namespace tributary::service {
namespace {

TableGeometry GeometryOf(const std::string& name, worker::CacheId id, const ResolvedSpec& resolved,
                         int ranks, const CoordinatorOptions& options) {
  const worker::CacheSpec& spec = resolved.spec;
  return {.layers = static_cast<int32_t>(spec.layers.size()),
          .ranks = ranks,
          .page_size = spec.page_size,
          .interleave = spec.interleave,
          .pages = spec.num_pages,
          .max_sequences = options.max_sequences,
          .name = name,
          .first_id = id,
          .window_left = WindowsOf(spec),
          .rollback_tokens = resolved.terms.rollback_tokens,
          .window_pages = resolved.terms.window_pages,
          .replica_stride = spec.replica_stride,
          .retry_delay = options.retry_delay};
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

// The replica stride of a cache, as the workers that have it report it.
std::optional<int32_t> HeldStride(worker::CacheId id,
                                  const std::vector<std::optional<worker::Holdings>>& held) {
  for (const std::optional<worker::Holdings>& holdings : held) {
    if (!holdings.has_value()) continue;
    for (const worker::HeldCache& cache : holdings->caches) {
      if (cache.id == id && cache.spec.replica_stride > 0) return cache.spec.replica_stride;
    }
  }
  return std::nullopt;
}

}  // namespace

CacheRegistry::CacheRegistry(const CoordinatorOptions& options, const telemetry::Logger& log,
                             const WorkerGroup& group, CoordinatorLock& lock,
                             const ServingState& serving, GroupCommands& commands, CallOrder& order,
                             Leases& leases, OnRefused on_refused)
    : options_(options),
      log_(log),
      group_(group),
      lock_(lock),
      serving_(serving),
      commands_(commands),
      order_(order),
      leases_(leases),
      on_refused_(std::move(on_refused)) {}

absl::StatusOr<CachePtr> CacheRegistry::Find(const std::string& name) const {
  TRIBUTARY_ASSIGN_OR_RETURN(CachePtr cache, Lookup(name));
  TRIBUTARY_RETURN_IF_ERROR(cache->not_held);
  return cache;
}

absl::StatusOr<CachePtr> CacheRegistry::Lookup(const std::string& name) const {
  TRIBUTARY_RETURN_IF_ERROR(serving_.Check());
  const auto it = caches_.find(name);
  if (it == caches_.end() || !it->second->created) return NotFound("cache", name, "cache_id");
  return it->second;
}

absl::StatusOr<CachePtr> CacheRegistry::FindToDelete(const std::string& name,
                                                     const CallContext& call) const {
  TRIBUTARY_ASSIGN_OR_RETURN(CachePtr cache, Lookup(name));
  if (!cache->VisibleTo(call)) return NotFound("cache", name, "cache_id");
  if (call.manages_all || call.caller == cache->owner) return cache;
  return FieldError(absl::StatusCode::kPermissionDenied, "cache_id",
                    absl::StrCat("cache '", name, "' was created by another client"));
}

std::vector<CachePtr> CacheRegistry::VisibleTo(const CallContext& call) const {
  std::vector<CachePtr> caches;
  for (const auto& [name, cache] : caches_) {
    if (cache->created && cache->VisibleTo(call)) caches.push_back(cache);
  }
  std::sort(caches.begin(), caches.end(),
            [](const CachePtr& a, const CachePtr& b) { return a->name < b->name; });
  return caches;
}

// ----------------------------------------------------------------------------------------- create

void CacheRegistry::Create(const v1::CreateCacheRequest& request, const CallContext& call,
                           Done<v1::CreateCacheReply> done) {
  absl::Status named = CheckName("cache_id", request.cache_id());
  if (!named.ok()) return done(std::move(named));
  v1::CacheSpec asked = request.spec();
  if (!asked.has_replicas()) asked.set_replicas(options_.replicas);
  absl::StatusOr<ResolvedSpec> resolved = ResolveSpec(asked, group_.size());
  if (!resolved.ok()) return done(resolved.status());
  if (resolved->spec.replica_stride > 0) resolved->spec.replica_stride = StrideOfReplicas();
  worker::CacheBackends backends = BackendsFor(*resolved);
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
    cache->users.insert(call.caller);
    if (!cache->not_held.ok()) {
      return lock_.Answer([done, status = cache->not_held] { done(status); });
    }
    if (cache->created) return lock_.Answer([done, cache] { done(CreatedReply(*cache)); });
    cache->creators.push_back(std::move(done));
    return;
  }
  const absl::StatusOr<CachePtr> added =
      Admit(request.cache_id(), call.caller, *std::move(resolved), std::move(backends));
  if (!added.ok()) {
    return lock_.Answer([done, status = added.status()] { done(status); });
  }
  const CachePtr cache = *added;
  cache->asked = std::move(asked);
  cache->creators.push_back(std::move(done));
  CreateGroup(cache, 0);
}

void CacheRegistry::CreateGroup(const CachePtr& cache, int32_t group) {
  commands_.CreateCache(cache->ids[group], {cache->GroupSpec(group), /*existing=*/false},
                        [this, cache, next = group + 1](const absl::Status& status) {
                          if (!status.ok() || next == static_cast<int32_t>(cache->ids.size())) {
                            return OnCreated(cache, status);
                          }
                          const CriticalSection section(lock_);
                          CreateGroup(cache, next);
                        });
}

int CacheRegistry::StrideOfReplicas() const {
  std::vector<std::string> hosts;
  for (const Member& member : group_.members()) hosts.push_back(member.host);
  return worker::ReplicaStride(hosts);
}

worker::CacheBackends CacheRegistry::BackendsFor(const ResolvedSpec& resolved) const {
  return {options_.backends,
          resolved.spec,
          {.device = group_.device(), .batch_invariant = options_.deterministic}};
}

absl::StatusOr<CachePtr> CacheRegistry::Make(const std::string& name, const std::string& client,
                                             worker::CacheId first_id, ResolvedSpec resolved,
                                             worker::CacheBackends backends, int ranks) const {
  const TableGeometry geometry = GeometryOf(name, first_id, resolved, ranks, options_);
  auto cache = std::make_shared<Cache>(name, client, first_id, std::move(resolved),
                                       std::move(backends), geometry);
  for (int32_t group = 0; group < cache->table.groups().size(); ++group) {
    TRIBUTARY_ASSIGN_OR_RETURN(const size_t bytes, worker::ShardBytes(cache->GroupSpec(group)));
    const int copies = cache->spec.replica_stride > 0 ? 2 : 1;
    cache->bytes += uint64_t{bytes} * static_cast<uint64_t>(cache->ranks * copies);
  }
  cache->users.insert(client);
  return cache;
}

absl::StatusOr<CachePtr> CacheRegistry::Admit(const std::string& name, const std::string& client,
                                              ResolvedSpec resolved,
                                              worker::CacheBackends backends) {
  TRIBUTARY_ASSIGN_OR_RETURN(CachePtr cache, Make(name, client, next_id_, std::move(resolved),
                                                  std::move(backends), group_.size()));
  TRIBUTARY_RETURN_IF_ERROR(CheckLimits(client, cache->bytes));
  next_id_ += static_cast<worker::CacheId>(cache->ids.size());
  caches_.emplace(cache->name, cache);
  return cache;
}

absl::Status CacheRegistry::CheckLimits(const std::string& client, uint64_t bytes) const {
  const ClientLimits& limits = options_.client_limits;
  int64_t count = 0;
  uint64_t held = 0;
  for (const auto& [name, cache] : caches_) {
    if (cache->owner != client) continue;
    ++count;
    held += cache->bytes;
  }
  const auto refuse = [&](ClientLimit limit, int64_t has, int64_t wanted, int64_t most) {
    if (on_refused_) on_refused_(limit);
    return LimitReached(client, limit, has, wanted, most);
  };
  if (limits.caches > 0 && count >= limits.caches) {
    return refuse(ClientLimit::kCaches, count, 1, limits.caches);
  }
  if (limits.cache_bytes > 0 && held + bytes > static_cast<uint64_t>(limits.cache_bytes)) {
    return refuse(ClientLimit::kCacheBytes, static_cast<int64_t>(held), static_cast<int64_t>(bytes),
                  limits.cache_bytes);
  }
  return absl::OkStatus();
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
    if (options_.journal == nullptr) return AnswerCreators(cache, failure);
    // If the journal cannot write it, the log says so, and it is tried again: until then the cache
    // lasts as long as this process.
    options_.journal->PutCache(
        {.name = cache->name, .owner = cache->owner, .first_id = cache->id(), .spec = cache->asked},
        [this, cache](const absl::Status&) {
          const CriticalSection written(lock_);
          AnswerCreators(cache, absl::OkStatus());
        });
    return;
  }
  caches_.erase(cache->name);
  // Some ranks may have it.
  if (serving_.ready()) {
    Drop(*cache, [] {});
  } else {
    undropped_.insert(undropped_.end(), cache->ids.begin(), cache->ids.end());
  }
  log_.Warning("cache not created", {{"cache", cache->name}, {"error", failure.message()}});
  AnswerCreators(cache, failure);
}

void CacheRegistry::AnswerCreators(const CachePtr& cache, const absl::Status& failure) {
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

void CacheRegistry::Delete(const v1::DeleteCacheRequest& request, const CallContext& call,
                           Done<v1::DeleteCacheReply> done) {
  const CriticalSection section(lock_);
  lock_.AcceptCall();
  const absl::StatusOr<CachePtr> found = FindToDelete(request.cache_id(), call);
  if (!found.ok()) {
    return lock_.Answer([done, status = found.status()] { done(status); });
  }
  const CachePtr& cache = *found;
  caches_.erase(request.cache_id());
  cache->deleted = true;
  order_.FailAllOf(*cache, NotFound("cache", request.cache_id(), "cache_id"));
  cache->table.DisownAll();
  const auto answer = [this, done]() TRIBUTARY_LOCKED {
    lock_.Answer([done] { done(v1::DeleteCacheReply()); });
  };
  if (options_.journal == nullptr) return Drop(*cache, answer);
  Drop(*cache, [this, answer, name = cache->name]() {
    options_.journal->DropCache(name, [this, answer](const absl::Status&) {
      const CriticalSection written(lock_);
      answer();
    });
  });
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

absl::StatusOr<CachePtr> CacheRegistry::AddAgain(
    const JournaledCache& journaled, const std::vector<std::optional<worker::Holdings>>& held) {
  TRIBUTARY_ASSIGN_OR_RETURN(ResolvedSpec resolved, ResolveSpec(journaled.spec, group_.size()));
  if (resolved.spec.replica_stride > 0) {
    resolved.spec.replica_stride = HeldStride(journaled.first_id, held).value_or(1);
  }
  worker::CacheBackends backends = BackendsFor(resolved);
  TRIBUTARY_RETURN_IF_ERROR(CheckBackends(backends, resolved.terms));
  TRIBUTARY_ASSIGN_OR_RETURN(
      CachePtr cache, Make(journaled.name, journaled.owner, journaled.first_id, std::move(resolved),
                           std::move(backends), group_.size()));
  cache->asked = journaled.spec;
  cache->created = true;
  next_id_ = std::max(next_id_, cache->ids.back() + 1);
  caches_.emplace(cache->name, cache);
  return cache;
}

void CacheRegistry::Adopt(const std::vector<std::optional<worker::Holdings>>& held) {
  if (options_.journal == nullptr) return;
  for (const JournaledCache& journaled : options_.journal->caches()) {
    const absl::StatusOr<CachePtr> cache = AddAgain(journaled, held);
    if (!cache.ok()) {
      log_.Error("a cache of the journal cannot be made again",
                 {{"cache", journaled.name}, {"error", cache.status().message()}});
      continue;
    }
    const AdoptedSequences adopted = AdoptSequences(**cache, held);
    (*cache)->undropped = adopted.absent;
    log_.Info("cache adopted", {{"cache", journaled.name},
                                {"sequences", adopted.whole},
                                {"lost", adopted.lost.size()},
                                {"forgotten", adopted.absent.size()}});
    for (const auto& [sequence, why] : adopted.lost) {
      log_.Warning("sequence lost",
                   {{"cache", journaled.name}, {"sequence", sequence}, {"reason", why}});
    }
  }
  RestoreLeases();
  LeaveOthers(held);
}

void CacheRegistry::RestoreLeases() {
  const auto now = CoordinatorLock::Clock::now();
  for (const JournaledLease& journaled : options_.journal->leases()) {
    const auto cache = caches_.find(journaled.cache);
    Sequence* sequence =
        cache == caches_.end() ? nullptr : cache->second->table.Find(journaled.sequence);
    if (sequence == nullptr) {
      options_.journal->DropLease(journaled.cache, journaled.sequence);
    } else {
      sequence->lease = leases_.Restore(journaled.lease, now);
    }
  }
}

void CacheRegistry::LeaveOthers(const std::vector<std::optional<worker::Holdings>>& held) {
  absl::flat_hash_set<worker::CacheId> ours;
  for (const auto& [name, cache] : caches_) ours.insert(cache->ids.begin(), cache->ids.end());
  for (const std::optional<worker::Holdings>& holdings : held) {
    if (!holdings.has_value()) continue;
    for (const worker::HeldCache& cache : holdings->caches) {
      next_id_ = std::max(next_id_, cache.id + 1);
      if (ours.insert(cache.id).second) undropped_.push_back(cache.id);
    }
  }
}

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

// ------------------------------------------------------------------------- another number of ranks

absl::StatusOr<CachePtr> CacheRegistry::MakeFor(const Cache& cache,
                                                const std::vector<std::string>& hosts) {
  const int ranks = static_cast<int>(hosts.size());
  absl::StatusOr<ResolvedSpec> resolved = ResolveSpec(cache.asked, ranks);
  if (!resolved.ok()) {
    return absl::FailedPreconditionError(
        absl::StrCat("cache '", cache.name, "': ", resolved.status().message()));
  }
  if (resolved->spec.replica_stride > 0) {
    resolved->spec.replica_stride = worker::ReplicaStride(hosts);
  }
  worker::CacheBackends backends = BackendsFor(*resolved);
  TRIBUTARY_RETURN_IF_ERROR(CheckBackends(backends, resolved->terms));
  TRIBUTARY_ASSIGN_OR_RETURN(CachePtr made, Make(cache.name, cache.owner, next_id_,
                                                 *std::move(resolved), std::move(backends), ranks));
  next_id_ += static_cast<worker::CacheId>(made->ids.size());
  made->asked = cache.asked;
  made->users = cache.users;
  made->created = true;
  return made;
}

void CacheRegistry::Replace(const std::vector<CachePtr>& caches) {
  for (const CachePtr& cache : caches) {
    CachePtr& known = caches_[cache->name];
    cache->table.TakeOwners(&known->table);
    known = cache;
  }
}

}  // namespace tributary::service
