#include "service/coordinator/coordinator.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "base/status/errors.h"
#include "base/status/rpc_errors.h"
#include "base/status/status_macros.h"
#include "service/coordinator/topology.h"
#include "service/data/shared_memory.h"

namespace tributary::service {

Coordinator::Coordinator(CoordinatorOptions options, std::unique_ptr<WorkerGroup> group,
                         std::shared_ptr<const telemetry::Logger> log)
    : options_(std::move(options)),
      log_(std::move(log)),
      observer_(options_.observer != nullptr ? options_.observer : std::make_shared<Observer>()),
      group_(std::move(group)),
      lock_(this),
      leases_(options_.lease_timeout),
      serving_(lock_, options_.retry_delay, options_.on_readiness),
      commands_(group_.get(), lock_, serving_, options_.step_timeout),
      order_(options_.max_call_timeout),
      caches_(options_, *log_, *group_, lock_, serving_, commands_, order_, leases_,
              [this](ClientLimit limit) { observer_->OnLimitReached(limit); }),
      regions_(options_, *log_, *group_, lock_, serving_, commands_),
      sequences_(options_, *log_, lock_, caches_, commands_, order_,
                 [this](ClientLimit limit) { observer_->OnLimitReached(limit); }),
      lease_expiry_(*log_, lock_, caches_, sequences_, leases_),
      steps_(options_, *observer_, lock_, serving_, commands_, order_, caches_, regions_, *group_),
      sessions_(options_, *log_, *group_, lock_, serving_, commands_, order_, caches_, sequences_,
                mailboxes_, [this](ClientLimit limit) { observer_->OnLimitReached(limit); }),
      restoration_(*log_, *group_, lock_, serving_, commands_, caches_,
                   options_.journal != nullptr),
      resizing_(options_, *log_, *group_, lock_, serving_, commands_, order_, caches_, steps_),
      setup_(options_, *log_, *observer_, *group_, lock_, serving_, commands_, order_, caches_,
             regions_, sessions_, restoration_, resizing_),
      timer_(
          lock_, [this]() TRIBUTARY_LOCKED { return NextDue(); },
          [this](Clock::time_point now) TRIBUTARY_LOCKED { ActOnTime(now); }) {}

Coordinator::~Coordinator() { Stop(); }

// ------------------------------------------------------------------------------------- lifecycle

absl::Status Coordinator::Start() {
  timer_.Start();
  return group_->Start(&setup_);
}

void Coordinator::StartDraining() {
  const CriticalSection section(lock_);
  serving_.StartDraining();
  sessions_.StartDraining();
  resizing_.BeginStop();
}

bool Coordinator::WaitIdle(Clock::time_point until) { return lock_.WaitIdle(until); }

void Coordinator::Stop() {
  StartDraining();
  {
    const CriticalSection section(lock_);
    if (std::exchange(stopped_, true)) return;
    timer_.Stop();
    const absl::Status why =
        Unavailable("STOPPING", "the service is stopping", options_.retry_delay);
    order_.FailAll(why);
    sessions_.EndAll(why);
  }
  resizing_.Stop();
  group_->Stop();
  if (options_.journal != nullptr) options_.journal->Flush();  // it calls parts of this
  sessions_.Join();
  timer_.Join();
  const CriticalSection section(lock_);
  regions_.OnWorkersGone();
}

bool Coordinator::ready() const {
  const ReadSection section(lock_);
  return serving_.ready() && !serving_.draining();
}

void Coordinator::BeforeRelease() {
  steps_.BeginSteps();
  timer_.Reconsider();
}

void Coordinator::AfterRelease() { commands_.Submit(); }

Coordinator::Clock::time_point Coordinator::NextDue() const {
  return std::min({order_.NextDeadline(), setup_.NextDue(), steps_.NextDue(), regions_.NextSweep(),
                   sessions_.NextDue(), restoration_.NextDue(), commands_.NextDue(),
                   lease_expiry_.NextDue()});
}

void Coordinator::ActOnTime(Clock::time_point now) {
  order_.FailExpired(now);
  setup_.RetryIfDue(now);
  regions_.SweepIfDue(now);
  restoration_.ActIfDue(now);
  commands_.ActIfDue();
  sessions_.FailExpired(now);
  lease_expiry_.ActIfDue(now);
}

// ----------------------------------------------------------------------------------------- calls

void Coordinator::CreateCache(const v1::CreateCacheRequest& request, const CallContext& call,
                              Done<v1::CreateCacheReply> done) {
  caches_.Create(request, call, std::move(done));
}

void Coordinator::DeleteCache(const v1::DeleteCacheRequest& request, const CallContext& call,
                              Done<v1::DeleteCacheReply> done) {
  {
    const CriticalSection section(lock_);
    const absl::StatusOr<CachePtr> found = caches_.FindToDelete(request.cache_id(), call);
    if (found.ok()) sessions_.EndAllOf(**found, absl::NotFoundError("the cache was deleted"));
  }
  caches_.Delete(request, call, std::move(done));
}

void Coordinator::OpenSequence(const v1::OpenSequenceRequest& request, const CallContext& call,
                               Done<v1::OpenSequenceReply> done) {
  sequences_.Open(request, call, std::move(done));
}

void Coordinator::ForkSequence(const v1::ForkSequenceRequest& request, const CallContext& call,
                               Done<v1::ForkSequenceReply> done) {
  sequences_.Fork(request, call, std::move(done));
}

void Coordinator::TruncateSequence(const v1::TruncateSequenceRequest& request,
                                   const CallContext& call, Done<v1::TruncateSequenceReply> done) {
  sequences_.Truncate(request, call, std::move(done));
}

void Coordinator::CloseSequence(const v1::CloseSequenceRequest& request, const CallContext& call,
                                Done<v1::CloseSequenceReply> done) {
  sequences_.Close(request, call, std::move(done));
}

void Coordinator::UpdateSequences(const v1::UpdateSequencesRequest& request,
                                  const CallContext& call, Done<v1::UpdateSequencesReply> done) {
  sequences_.Update(request, call, std::move(done));
}

void Coordinator::Append(std::shared_ptr<const v1::AppendRequest> request, const CallContext& call,
                         Done<v1::AppendReply> done) {
  steps_.Append(std::move(request), call, std::move(done));
}

void Coordinator::Attend(std::shared_ptr<const v1::AttendRequest> request, const CallContext& call,
                         Done<v1::AttendReply> done) {
  steps_.Attend(std::move(request), call, std::move(done));
}

void Coordinator::RegisterSharedMemory(const v1::RegisterSharedMemoryRequest& request,
                                       const CallContext& call,
                                       Done<v1::RegisterSharedMemoryReply> done) {
  if (!call.shares_memory) return done(NotOnThisMachine("kind"));
  regions_.Register(request, std::move(done));
}

void Coordinator::UnregisterSharedMemory(const v1::UnregisterSharedMemoryRequest& request,
                                         const CallContext& call,
                                         Done<v1::UnregisterSharedMemoryReply> done) {
  if (!call.shares_memory) return done(NotOnThisMachine("name"));
  regions_.Unregister(request, std::move(done));
}

// ----------------------------------------------------------------------------------------- state

v1::Statistics Coordinator::Statistics() const {
  v1::Statistics statistics = steps_.statistics();
  statistics.set_group_formations(setup_.formations());
  return statistics;
}

absl::StatusOr<v1::GetTopologyReply> Coordinator::GetTopology(const v1::GetTopologyRequest& request,
                                                              const CallContext& call) const {
  if (request.max_sequences() < 0) {
    return InvalidField("max_sequences", "must be >= 0");
  }
  v1::GetTopologyReply reply;
  reply.set_version(options_.build_version);
  AddWorkers(group_->members(), &reply);
  reply.set_exchange(group_->exchange());
  std::vector<CachePtr> caches;
  {
    const ReadSection section(lock_);
    reply.set_epoch(serving_.epoch());
    reply.set_state(serving_.ready() ? v1::GROUP_STATE_READY : v1::GROUP_STATE_FORMING);
    v1::Statistics* statistics = reply.mutable_statistics();
    *statistics = Statistics();
    statistics->set_uptime_seconds(std::chrono::duration<double>(Clock::now() - started_).count());
    statistics->set_calls_open(static_cast<uint64_t>(lock_.open_calls()));
    observer_->Fill(statistics);
    caches = caches_.VisibleTo(call);
  }
  TRIBUTARY_RETURN_IF_ERROR(AddCaches(lock_, caches, request, &reply));
  if (!request.cache_id().empty()) {
    std::erase_if(caches, [&](const CachePtr& c) { return c->name != request.cache_id(); });
  }
  const ReadSection section(lock_);
  sessions_.AddTo(caches, &reply);
  return reply;
}

Snapshot Coordinator::TakeSnapshot() const {
  Snapshot snapshot;
  snapshot.members = group_->members();
  snapshot.build_version = options_.build_version;
  const ReadSection section(lock_);
  snapshot.epoch = serving_.epoch();
  snapshot.ready = serving_.ready();
  snapshot.draining = serving_.draining();
  snapshot.calls_open = lock_.open_calls();
  snapshot.calls_queued = order_.waiting();
  snapshot.steps_in_flight = steps_.in_flight();
  snapshot.statistics = Statistics();
  CountCaches(caches_.all(), &snapshot);
  snapshot.leases = static_cast<int64_t>(leases_.size());
  snapshot.closed_by_leases = sequences_.closed_by_leases();
  snapshot.bytes_restored = restoration_.bytes_restored();
  snapshot.bytes_replicated = restoration_.bytes_replicated();
  return snapshot;
}

}  // namespace tributary::service
