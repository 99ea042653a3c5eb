#include "worker/executor.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <new>
#include <string>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "base/status/errors.h"
#include "base/status/status_macros.h"
#include "base/sync/mutex.h"
#include "worker/agreement.h"
#include "worker/cache_shard.h"
#include "worker/cpu_backend.h"
#include "worker/device_sessions.h"
#include "worker/holdings.h"
#include "worker/status_conversion.h"
#include "worker/step_check.h"
#include "worker/step_output.h"
#include "worker/step_planner.h"
#include "worker/step_run.h"
#include "worker/token_mover.h"

namespace tributary::worker {
namespace {

// Where the rows of a step go, those that go into the reply having their place in it.
std::vector<StepOutput> PlaceOutputs(std::vector<StepOutput> outputs, const LayerGeometry& geometry,
                                     int32_t query_rows, Reply* reply) {
  if (outputs.empty()) {
    const size_t row_heads =
        static_cast<size_t>(query_rows) * static_cast<size_t>(geometry.q_heads);
    reply->o.resize(row_heads * static_cast<size_t>(geometry.kv.value_dim));
    reply->lse.resize(row_heads);
    return {{.rows = query_rows,
             .o = {.data = reinterpret_cast<std::byte*>(reply->o.data())},
             .lse = {.data = reinterpret_cast<std::byte*>(reply->lse.data())}}};
  }
  reply->result = ResultBytes(BytesInReply(outputs, geometry));
  std::byte* next = reply->result.data();
  const auto place = [&next](OutputPlace& in, size_t bytes) {
    if (!in.in_reply) return;
    in.data = next;
    next += bytes;
  };
  for (StepOutput& output : outputs) {
    place(output.o, OutputBytesOf(output, geometry));
    place(output.lse, LseBytesOf(output, geometry));
  }
  return outputs;
}

}  // namespace

class Executor::Impl {
 public:
  Impl(ExecutorOptions options, std::unique_ptr<Backend> backend)
      : options_(options),
        backend_(std::move(backend)),
        planner_(options.rows_per_pass),
        sessions_(*backend_, caches_, planner_, options.on_session_news),
        parcels_(*backend_, options.least_lane_bytes) {}

  void Join(std::unique_ptr<collective::Communicator> comm) {
    sessions_.EndAll();
    backend_->Leave();
    const int size = comm->size();
    Use(std::move(comm), size, /*lanes=*/true);
  }

  absl::Status Join(std::unique_ptr<collective::Communicator> comm,
                    collective::Rendezvous& rendezvous, collective::Deadline deadline,
                    int shard_ranks, bool lanes) {
    sessions_.EndAll();
    backend_->Leave();
    TRIBUTARY_ASSIGN_OR_RETURN(std::unique_ptr<collective::Communicator> joined,
                               backend_->Join(std::move(comm), rendezvous, deadline));
    const int ranks = shard_ranks > 0 ? shard_ranks : joined->size();
    Use(std::move(joined), ranks, lanes);
    return absl::OkStatus();
  }

  void Use(std::unique_ptr<collective::Communicator> comm, int shard_ranks, bool lanes) {
    DropOthers(comm->rank(), shard_ranks);
    apart_.clear();
    parcels_.Reset();
    parcels_.set_lanes(lanes);
    // The old communicator closes its connections as it goes, which may take a while: not under the
    // lock.
    const std::shared_ptr<collective::Communicator> last = comm_;
    comm_ = std::move(comm);
    const MutexLock lock(comm_mutex_);
    shared_comm_ = comm_;
  }

  std::shared_ptr<collective::Communicator> communicator() const {
    const MutexLock lock(comm_mutex_);
    return shared_comm_;
  }

  Reply Execute(const Command& command) {
    Reply reply;
    reply.epoch = command.epoch;
    reply.number = command.number;
    reply.rank = comm_ == nullptr ? 0 : comm_->rank();
    if (options_.keeps_records) {
      for (auto& [id, cache] : caches_) cache->records.SettleUpTo({command.epoch, command.settled});
    }
    reply.status = Guarded(command, &reply);
    // A command that failed here may have been carried out elsewhere; the next ones fail, too.
    if (reply.status.ok()) last_ = {command.epoch, command.number};
    return reply;
  }

  Holdings Report() const {
    Holdings holdings;
    if (comm_ == nullptr || !lost_.ok()) return holdings;
    holdings.rank = comm_->rank();
    holdings.joined_epoch = comm_->epoch();
    holdings.last = last_;
    for (const auto& [id, cache] : caches_) {
      HeldCache held{.id = id,
                     .spec = cache->spec,
                     .lacks_pages = cache->replicas.lacks_pages(),
                     .replica_lacks_pages = cache->replicas.replica_lacks_pages(),
                     .sequences = {},
                     .undo = {}};
      cache->records.Report(cache->tables, &held);
      holdings.caches.push_back(std::move(held));
    }
    return holdings;
  }

  size_t memory_used() const { return memory_used_.load(std::memory_order_relaxed); }

  PlanCounts plan_counts() const {
    PlanCounts counts = dropped_counts_;
    for (const auto& [id, cache] : caches_) {
      counts.made += cache->plans.made();
      counts.reused += cache->plans.reused();
    }
    return counts;
  }

 private:
  // A rank that fails where its peers do not must not leave them waiting in the collective:
  // whatever goes wrong once a step has begun aborts the group's communicator.
  absl::Status Guarded(const Command& command, Reply* reply) {
    absl::Status status;
    try {
      status = Dispatch(command, reply);
    } catch (const std::bad_alloc&) {
      status = absl::ResourceExhaustedError("out of memory");
    } catch (const std::exception& error) {
      status = absl::InternalError(absl::StrCat("unexpected: ", error.what()));
    }
    // A device that lost its memory has lost it for good: nothing is computed over what is left.
    if (absl::IsDataLoss(status)) lost_ = status;
    if (step_begun_ && !status.ok()) {
      comm_->Abort(absl::StrCat("rank ", comm_->rank(), ": ",
                                absl::StatusCodeToString(status.code()), ": ", status.message()));
    }
    step_begun_ = false;
    if (!status.ok()) {
      reply->conflicts.clear();
      reply->result = {};
      reply->o.clear();
      reply->lse.clear();
    }
    return status;
  }

  absl::Status Dispatch(const Command& command, Reply* reply) {
    if (!lost_.ok()) return lost_;
    if (comm_ == nullptr) return absl::AbortedError("this worker is in no group");
    if (command.epoch != comm_->epoch()) {
      return absl::AbortedError(absl::StrCat("command of epoch ", command.epoch,
                                             ", this worker is in epoch ", comm_->epoch()));
    }
    if (const auto* create = std::get_if<CreateCacheCommand>(&command.body)) {
      const absl::Status created = CreateCache(command.cache, *create, reply);
      TRIBUTARY_RETURN_IF_ERROR(AwaitPeersMemory(command.deadline));
      return created;
    }
    if (std::holds_alternative<DropCacheCommand>(command.body)) {
      Drop(command.cache);
      return AwaitPeersMemory(command.deadline);
    }
    if (const auto* open = std::get_if<OpenRegionCommand>(&command.body)) {
      const absl::Status opened = backend_->OpenRegion(open->region, open->memory);
      TRIBUTARY_RETURN_IF_ERROR(AwaitPeersMemory(command.deadline));
      return opened;
    }
    if (const auto* close = std::get_if<CloseRegionCommand>(&command.body)) {
      TRIBUTARY_RETURN_IF_ERROR(backend_->CloseRegion(close->region, command.deadline));
      return AwaitPeersMemory(command.deadline);
    }
    if (const auto* open = std::get_if<OpenSessionCommand>(&command.body)) {
      return sessions_.Open(*open, *comm_, command.deadline, reply);
    }
    if (const auto* close = std::get_if<CloseSessionCommand>(&command.body)) {
      sessions_.Close(*close);
      return absl::OkStatus();
    }
    if (const auto* step = std::get_if<SessionStepCommand>(&command.body)) {
      return sessions_.Step(*step, *comm_, command.deadline);
    }
    if (const auto* move = std::get_if<MoveTokensCommand>(&command.body)) {
      return Move(command.cache, *move, command.deadline);
    }
    if (apart_.contains(command.cache)) return absl::OkStatus();
    if (const auto* drop = std::get_if<DropTablesCommand>(&command.body)) {
      if (const auto it = caches_.find(command.cache); it != caches_.end()) {
        for (const SequenceId sequence : drop->sequences) {
          it->second->tables.Drop(sequence);
          it->second->records.Drop(sequence);
        }
      }
      return absl::OkStatus();
    }
    TRIBUTARY_ASSIGN_OR_RETURN(CacheShard* const cache, FindShard(caches_, command.cache));
    if (const auto* set = std::get_if<SetTablesCommand>(&command.body)) {
      return SetTables(*cache, *set);
    }
    if (const auto* transfer = std::get_if<TransferPagesCommand>(&command.body)) {
      return Transfer(command.cache, *cache, *transfer, command.deadline, reply);
    }
    return Step(*cache, std::get<StepCommand>(command.body), command, reply);
  }

  absl::Status CreateCache(CacheId id, const CreateCacheCommand& create, Reply* reply) {
    const CacheSpec& spec = create.spec;
    TRIBUTARY_RETURN_IF_ERROR(ValidateCacheSpec(spec));
    if (create.ranks < 0 || create.ranks > comm_->size()) {
      return InvalidField("ranks",
                          absl::StrCat("must be 0 to ", comm_->size(), ", is ", create.ranks));
    }
    const int ranks = create.ranks > 0 ? create.ranks : comm_->size();
    if (comm_->rank() >= ranks) {
      apart_.insert(id);
      return absl::OkStatus();
    }
    const auto it = caches_.find(id);
    if (it == caches_.end()) {
      TRIBUTARY_RETURN_IF_ERROR(AddCache(id, spec, ranks));
      if (create.existing) caches_.at(id)->replicas.JoinedLate();
    } else if (!SameSpec(it->second->spec, spec)) {
      return absl::AlreadyExistsError(absl::StrCat("cache ", id, " exists with another spec"));
    }
    CacheShard& cache = *caches_.at(id);
    if (cache.complete) return absl::OkStatus();
    const absl::StatusOr<bool> complete = TakeMemory(cache);
    if (!complete.ok()) {
      Drop(id);
      return complete.status();
    }
    cache.complete = *complete;
    reply->more_memory = !*complete;
    return absl::OkStatus();
  }

  absl::StatusOr<bool> TakeMemory(CacheShard& cache) const {
    const auto until = EndOfTurn();
    TRIBUTARY_ASSIGN_OR_RETURN(const bool complete, cache.shard->TakeMemory(until));
    return complete ? cache.replicas.TakeMemory(until) : false;
  }

  // How long a command may take memory before it replies.
  std::chrono::steady_clock::time_point EndOfTurn() const {
    return std::chrono::steady_clock::now() + options_.memory_slice;
  }
  ReplicaKeeper::Memory MemoryOfReplicas() const {
    return {*backend_, AvailableForReplicas(), options_.page_fill};
  }

  absl::Status AddCache(CacheId id, const CacheSpec& spec, int size) {
    const int rank = comm_->rank();
    if (spec.replica_stride < 0 || (spec.replica_stride > 0 && spec.replica_stride >= size)) {
      return InvalidField("replica_stride", absl::StrCat("must be below the number of ranks, ",
                                                         size, ", is ", spec.replica_stride));
    }
    TRIBUTARY_ASSIGN_OR_RETURN(std::unique_ptr<Shard> shard,
                               backend_->CreateShard(spec, AvailableMemory(), options_.page_fill));
    auto made =
        std::make_unique<CacheShard>(spec, DcpLayout{rank, size, spec.interleave}, std::move(shard),
                                     backend_->capabilities().shares_pages);
    CacheShard& cache = *made;
    caches_.emplace(id, std::move(made));
    memory_used_.fetch_add(cache.bytes(), std::memory_order_relaxed);
    if (spec.replica_stride == 0) return absl::OkStatus();
    const absl::Status begun = cache.replicas.Begin(MemoryOfReplicas());
    memory_used_.fetch_add(cache.replicas.bytes(), std::memory_order_relaxed);
    if (!begun.ok()) Drop(id);
    return begun;
  }

  // Whatever came of it on this rank: all ranks get the command, and all of them wait.
  absl::Status AwaitPeersMemory(collective::Deadline deadline) {
    if (!backend_->MemoryHoldsUpPeers()) return absl::OkStatus();
    return CollectiveStatus(comm_->Barrier(deadline));
  }

  size_t AvailableMemory() const {
    const size_t device = backend_->AvailableMemory();
    if (options_.memory_limit == 0) return device;
    size_t used = 0;
    for (const auto& [id, cache] : caches_) {
      used += cache->shard->bytes();
      if (!backend_->ReplicasApart()) used += cache->replicas.bytes();
    }
    return std::min(device, options_.memory_limit - std::min(options_.memory_limit, used));
  }
  // The limit is of the device.
  size_t AvailableForReplicas() const {
    return backend_->ReplicasApart() ? backend_->AvailableForReplicas() : AvailableMemory();
  }

  void Drop(CacheId id) {
    apart_.erase(id);
    const auto it = caches_.find(id);
    if (it == caches_.end()) return;
    // What works on its pages ends first.
    sessions_.EndOn(id);
    dropped_counts_.made += it->second->plans.made();
    dropped_counts_.reused += it->second->plans.reused();
    memory_used_.fetch_sub(it->second->bytes(), std::memory_order_relaxed);
    caches_.erase(it);
  }

  // Drops the caches of another place: what they hold means nothing here.
  void DropOthers(int rank, int shard_ranks) {
    std::vector<CacheId> others;
    for (const auto& [id, cache] : caches_) {
      if (cache->layout.rank != rank || cache->layout.size != shard_ranks) others.push_back(id);
    }
    for (const CacheId id : others) Drop(id);
  }

  // --------------------------------------------------------------------------------- tables, steps

  absl::Status SetTables(CacheShard& cache, const SetTablesCommand& command) {
    TRIBUTARY_RETURN_IF_ERROR(cache.tables.CheckReplace(command.tables, "tables"));
    TRIBUTARY_RETURN_IF_ERROR(cache.records.Check(command.standings, "standings"));
    for (const PageUpdate& table : command.tables) cache.tables.Replace(table);
    if (!options_.keeps_records) return absl::OkStatus();
    for (const PageUpdate& table : command.tables) cache.records.Settle(table.sequence);
    // Lengths are told of sequences that no command in flight changes.
    for (const Standing& standing : command.standings) {
      if (!standing.lengths.empty()) cache.records.Settle(standing.sequence);
    }
    cache.records.Tell(command.standings);
    return absl::OkStatus();
  }

  absl::Status Step(CacheShard& cache, const StepCommand& step, const Command& command,
                    Reply* reply) {
    const collective::Deadline deadline = command.deadline;
    const CommandMark mark{command.epoch, command.number};
    step_begun_ = true;
    const absl::Status check = Check(cache, step);
    if (!check.ok()) {
      step_begun_ = false;  // every rank refuses, none waits
      return check;
    }
    StepResults results;
    std::optional<PlannedStep> planned;
    absl::Status status;
    try {
      status = Prepare(cache, step, command, reply, &planned);
    } catch (const std::bad_alloc&) {
      status = absl::ResourceExhaustedError("out of memory");
    }
    const bool memory = status.ok() || absl::IsResourceExhausted(status);
    const bool on_cpu = backend_->capabilities().device == Device::kCpu;  // GPUs do it in Run
    if (memory && on_cpu && comm_->size() > 1 && IsLarge(cache, step)) {
      status = AgreeOnMemory(*comm_, status, deadline, &results.refused_by_all);
    }
    results.times = reply->times;
    if (status.ok()) status = cache.shard->Run(*planned, &results);
    if (results.refused_by_all) step_begun_ = false;  // none waits for another
    TRIBUTARY_RETURN_IF_ERROR(status);
    if (options_.keeps_records) cache.records.AfterStep(mark, step);
    reply->conflicts = std::move(results.conflicts);
    reply->times = results.times;
    return absl::OkStatus();
  }

  // Whether the step may be refused memory, as all ranks tell alike. Below, what it takes is not
  // worth a message between them.
  static bool IsLarge(const CacheShard& cache, const StepCommand& step) {
    constexpr int64_t kLargeBytes = int64_t{8} << 20;
    const LayerGeometry g =
        GeometryOf(cache.spec, cache.spec.layers[static_cast<size_t>(step.layer)]);
    int64_t units = 0;
    for (const StepEntry& entry : step.entries) {
      units += std::max(entry.query_rows, entry.new_tokens);
    }
    const int64_t row = int64_t{g.q_heads} * (g.kv.key_dim + g.kv.value_dim);
    return units > kLargeBytes / static_cast<int64_t>(sizeof(float)) / row;
  }

  // Everything of a step before ranks wait for each other: tables, the plan, where results go, and
  // memory. May throw std::bad_alloc.
  absl::Status Prepare(CacheShard& cache, const StepCommand& step, const Command& command,
                       Reply* reply, std::optional<PlannedStep>* planned) {
    const TimedSection timed(reply->times.plan);
    TRIBUTARY_RETURN_IF_ERROR(cache.shard->CopyPages(step.page_copies));
    TRIBUTARY_RETURN_IF_ERROR(cache.replicas.CopyPages(step.page_copies));
    if (options_.keeps_records) {
      cache.records.Tell(step.standings);
      cache.records.BeforeUpdates({command.epoch, command.number}, step.page_updates, cache.tables);
    }
    for (const PageUpdate& update : step.page_updates) cache.tables.Update(update);
    const StepPlan& plan = planner_.Plan(cache, step);
    planned->emplace(Planned(cache, step, plan, *comm_, command.deadline));
    if (comm_->rank() == 0 && plan.query_rows > 0) {
      outputs_ = PlaceOutputs(step.outputs, (*planned)->geometry(), plan.query_rows, reply);
      (*planned)->outputs = outputs_;
    }
    return cache.shard->Reserve(**planned);
  }

  absl::Status Transfer(CacheId id, CacheShard& cache, const TransferPagesCommand& transfer,
                        collective::Deadline deadline, Reply* reply) {
    ReplicaKeeper& replicas = cache.replicas;
    TRIBUTARY_RETURN_IF_ERROR(replicas.Check(transfer));
    if (!transfer.pages.empty()) {
      step_begun_ = true;  // whoever fails alone leaves nobody waiting
      return replicas.Pass(transfer, *cache.shard, parcels_, *comm_, deadline);
    }
    if (transfer.complete) parcels_.Reset();
    // What a host's layer writes when its time has come, nobody would keep.
    if (!transfer.complete && !transfer.restore) sessions_.EndOn(id);
    const size_t before = replicas.bytes();
    const absl::StatusOr<bool> complete = replicas.Turn(transfer, MemoryOfReplicas(), EndOfTurn());
    memory_used_.fetch_add(replicas.bytes(), std::memory_order_relaxed);
    memory_used_.fetch_sub(before, std::memory_order_relaxed);
    TRIBUTARY_RETURN_IF_ERROR(AwaitPeersMemory(deadline));
    if (!complete.ok()) return complete.status();
    reply->more_memory = !*complete;
    return absl::OkStatus();
  }

  // Whatever goes wrong on one rank alone leaves nobody waiting.
  absl::Status Move(CacheId to, const MoveTokensCommand& move, collective::Deadline deadline) {
    step_begun_ = true;
    CacheShard* const source = FindShard(caches_, move.from_cache).value_or(nullptr);
    CacheShard* const place = FindShard(caches_, to).value_or(nullptr);
    MoveEnds ends;
    if (source != nullptr) {
      ends.from = source->shard.get();
      ends.from_spec = &source->spec;
    }
    if (place != nullptr) {
      ends.to = move.keeper_stride > 0 ? place->replicas.kept() : place->shard.get();
      ends.to_spec = &place->spec;
    }
    return MoveTokens(move, ends, parcels_, *comm_, deadline);
  }

  absl::Status Check(const CacheShard& cache, const StepCommand& step) const {
    TRIBUTARY_RETURN_IF_ERROR(CheckStep(cache.spec, cache.layout.size, cache.tables, step));
    TRIBUTARY_RETURN_IF_ERROR(cache.records.Check(step.standings, "step.standings"));
    return CheckStepRegions(cache.spec, step,
                            [this](const RegionPart& part) { return backend_->Reaches(part); });
  }

  const ExecutorOptions options_;
  const std::unique_ptr<Backend> backend_;  // before the shards, which use it

  std::shared_ptr<collective::Communicator> comm_;  // used by the executing thread only
  // The same communicator, for other threads that want to abort it.
  mutable Mutex comm_mutex_;
  std::shared_ptr<collective::Communicator> shared_comm_ TRIBUTARY_GUARDED_BY(comm_mutex_);

  CacheShards caches_;
  StepPlanner planner_;
  DeviceSessions sessions_;  // of this epoch; after what they use
  // Caches that this rank holds nothing of, because it is beyond their ranks (CreateCacheCommand).
  absl::flat_hash_set<CacheId> apart_;
  ParcelCarrier parcels_;  // of this epoch
  std::atomic<size_t> memory_used_ = 0;
  PlanCounts dropped_counts_;

  std::vector<StepOutput> outputs_;  // of the step under way
  CommandMark last_;                 // that was carried out
  bool step_begun_ = false;
  absl::Status lost_;  // why every command fails, once the device failed
};

Executor::Executor(ExecutorOptions options, std::unique_ptr<Backend> backend)
    : impl_(std::make_unique<Impl>(options, std::move(backend))) {}

Executor::Executor(ExecutorOptions options, std::shared_ptr<cpu::ThreadPool> pool)
    : Executor(options, CreateCpuBackend(std::move(pool), options.strategy)) {}

Executor::~Executor() = default;

void Executor::Join(std::unique_ptr<collective::Communicator> comm) {
  impl_->Join(std::move(comm));
}

absl::Status Executor::Join(std::unique_ptr<collective::Communicator> comm,
                            collective::Rendezvous& rendezvous, collective::Deadline deadline,
                            int shard_ranks, bool lanes) {
  return impl_->Join(std::move(comm), rendezvous, deadline, shard_ranks, lanes);
}

std::shared_ptr<collective::Communicator> Executor::communicator() const {
  return impl_->communicator();
}

Reply Executor::Execute(const Command& command) { return impl_->Execute(command); }

Holdings Executor::Report() const { return impl_->Report(); }

size_t Executor::memory_used() const { return impl_->memory_used(); }

PlanCounts Executor::plan_counts() const { return impl_->plan_counts(); }

}  // namespace tributary::worker
