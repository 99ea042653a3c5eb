#include "worker/device_sessions.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status/errors.h"
#include "base/status/status_macros.h"
#include "worker/plan_cache.h"
#include "worker/step_check.h"

namespace tributary::worker {
namespace {

// Makes `step` the step of one layer, whose tensors lie in the slot of layer number `count`.
void SetLayer(const CacheShard& cache, int32_t layer, uint32_t count, const DeviceSession& session,
              StepCommand* step) {
  int32_t rows = 0;
  int32_t tokens = 0;
  for (const StepEntry& entry : step->entries) {
    rows += entry.query_rows;
    tokens += entry.new_tokens;
  }
  step->layer = layer;
  const LayerGeometry geometry =
      GeometryOf(cache.spec, cache.spec.layers[static_cast<size_t>(layer)]);
  const DeviceSession::SlotTensors tensors = session.TensorsOf(geometry, count, rows, tokens);
  if (rows > 0) step->q = tensors.q;
  if (tokens > 0) {
    step->k = tensors.k;
    step->v = tensors.v;
  }
}

}  // namespace

DeviceSessions::DeviceSessions(Backend& backend, CacheShards& caches, StepPlanner& planner,
                               OnSessionNews on_news)
    : backend_(backend), caches_(caches), planner_(planner), on_news_(std::move(on_news)) {}

absl::Status DeviceSessions::Open(const OpenSessionCommand& command, collective::Communicator& comm,
                                  collective::Deadline deadline, Reply* reply) {
  if (sessions_.contains(command.session)) {
    return absl::AlreadyExistsError(absl::StrCat("session ", command.session, " is open"));
  }
  if (sessions_.size() >= kMostDeviceSessions) {
    return FieldError(absl::StatusCode::kResourceExhausted, "open.memory",
                      absl::StrCat("a GPU serves ", kMostDeviceSessions,
                                   " sessions at a time; HOST serves more"));
  }
  TRIBUTARY_ASSIGN_OR_RETURN(std::unique_ptr<DeviceSession> session,
                             backend_.OpenSession(command, comm, deadline, on_news_));
  reply->mailbox = session->mailbox();
  sessions_.emplace(command.session, Opened{std::move(session), {}});
  return absl::OkStatus();
}

void DeviceSessions::Close(const CloseSessionCommand& command) {
  const auto it = sessions_.find(command.session);
  if (it == sessions_.end()) return;
  it->second.session->End(command.status);
  sessions_.erase(it);
}

absl::Status DeviceSessions::Step(const SessionStepCommand& command, collective::Communicator& comm,
                                  collective::Deadline deadline) {
  const auto found = sessions_.find(command.session);
  if (found == sessions_.end()) {
    return absl::NotFoundError(absl::StrCat("session ", command.session, " is not open"));
  }
  Opened& opened = found->second;
  StepCommand step{.kind = command.kind, .entries = command.entries};
  TRIBUTARY_RETURN_IF_ERROR(Check(command, *opened.session, &step));
  for (const PageChanges& changes : command.changes) {
    CacheShard& cache = *caches_.at(changes.cache);
    opened.caches.insert(changes.cache);
    TRIBUTARY_RETURN_IF_ERROR(opened.session->CopyPages(*cache.shard, changes.page_copies));
    for (const PageUpdate& update : changes.page_updates) cache.tables.Update(update);
  }
  std::vector<Shard*> shards;
  std::vector<PlannedStep> layers;
  absl::flat_hash_set<const StepPlan*> plans;
  shards.reserve(command.layers.size());
  layers.reserve(command.layers.size());
  uint32_t count = command.first_count;
  for (const SessionLayer& place : command.layers) {
    CacheShard& cache = *caches_.at(place.cache);
    opened.caches.insert(place.cache);
    SetLayer(cache, place.layer, count++, *opened.session, &step);
    // Layers of one kind have one plan, which is found, not made.
    const StepPlan& plan = planner_.Plan(cache, step);
    if (plans.insert(&plan).second && plans.size() > PlanCache::kPlans) {
      return InvalidField("layers", absl::StrCat("have more than ", PlanCache::kPlans,
                                                 " kinds of masks: submit fewer at a time"));
    }
    layers.push_back(Planned(cache, step, plan, comm, deadline));
    shards.push_back(cache.shard.get());
  }
  return opened.session->Enqueue(layers, shards, command.first_count, command.waiting);
}

absl::Status DeviceSessions::Check(const SessionStepCommand& command, const DeviceSession& session,
                                   StepCommand* step) const {
  absl::flat_hash_set<CacheId> checked;
  for (const SessionLayer& place : command.layers) {
    TRIBUTARY_ASSIGN_OR_RETURN(const CacheShard* const cache, FindShard(caches_, place.cache));
    if (place.layer < 0 || place.layer >= static_cast<int32_t>(cache->spec.layers.size())) {
      return InvalidField("layers", absl::StrCat("layer ", place.layer, " is not in the cache"));
    }
    if (!checked.insert(place.cache).second) continue;
    if (cache->replicas.bytes() > 0) {
      if (cache->spec.replica_stride == 0) {
        return absl::UnavailableError(
            "a worker hands its tokens over: tokens of a mailbox on a GPU "
            "are not kept meanwhile");
      }
      return absl::FailedPreconditionError("tokens of a mailbox on a GPU are not kept in replicas");
    }
    for (const PageChanges& changes : command.changes) {
      if (changes.cache != place.cache) continue;
      step->page_copies = changes.page_copies;
      step->page_updates = changes.page_updates;
    }
    SetLayer(*cache, place.layer, command.first_count, session, step);
    TRIBUTARY_RETURN_IF_ERROR(CheckStep(cache->spec, cache->layout.size, cache->tables, *step));
    step->page_copies.clear();
    step->page_updates.clear();
  }
  for (const PageChanges& changes : command.changes) {
    if (checked.contains(changes.cache)) continue;
    TRIBUTARY_ASSIGN_OR_RETURN(const CacheShard* const cache, FindShard(caches_, changes.cache));
    PageTables::Sizes updated;
    TRIBUTARY_RETURN_IF_ERROR(cache->tables.Check(changes.page_updates, "changes", &updated));
  }
  return absl::OkStatus();
}

void DeviceSessions::EndOn(CacheId cache) {
  absl::erase_if(sessions_,
                 [cache](const auto& opened) { return opened.second.caches.contains(cache); });
}

}  // namespace tributary::worker
