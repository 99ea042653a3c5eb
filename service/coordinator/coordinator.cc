#include "service/coordinator/coordinator.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status/errors.h"
#include "base/status/rpc_errors.h"
#include "base/status/status_macros.h"
#include "service/coordinator/operation.h"
#include "service/data/resolve_spec.h"

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
  reply.set_ranks(cache.table.geometry().ranks);
  reply.set_backend(cache.backends.first()->name);
  return reply;
}

// A cache is of use when all modes of attention that were asked for have a backend, or, where none
// was, some mode has. Otherwise every reason is told, of every mode that has none.
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

// Fills a reply whose only field is the sequence's id.
template <typename Reply>
Reply SequenceReply(worker::SequenceId id) {
  Reply reply;
  reply.set_sequence_id(id);
  return reply;
}

}  // namespace

const char* Version() { return "0.1.0"; }

// ------------------------------------------------------------------------------------- the lock

Coordinator::Turn::~Turn() {
  coordinator_.BeginSteps(*this);
  if (coordinator_.NextWake() < coordinator_.timer_sleeps_until_) {
    coordinator_.timer_wake_.notify_one();
  }
  lock_.unlock();
  coordinator_.commands_.Drain();
  for (const auto& call : after_) call();
  if (answered_ == 0) return;
  lock_.lock();
  coordinator_.open_calls_ -= answered_;
  if (coordinator_.open_calls_ == 0) coordinator_.idle_.notify_all();
}

void Coordinator::Turn::Answer(std::function<void()> call) {
  ++answered_;
  After(std::move(call));
}

// ------------------------------------------------------------------------------------- lifecycle

Coordinator::Coordinator(CoordinatorOptions options, std::unique_ptr<WorkerGroup> group,
                         std::shared_ptr<const telemetry::Logger> log)
    : options_(std::move(options)),
      log_(std::move(log)),
      observer_(options_.observer != nullptr ? options_.observer : std::make_shared<Observer>()),
      regions_(options_.shared_memory_prefixes),
      group_(std::move(group)),
      commands_(group_.get()),
      clients_(options_.client_limits,
               [this](ClientLimit limit) { observer_->OnLimitReached(limit); }),
      batcher_(options_.batch) {}

Coordinator::~Coordinator() { Stop(); }

absl::Status Coordinator::Start() {
  timer_ = std::thread([this] { RunTimer(); });
  return group_->Start(this);
}

void Coordinator::StartDraining() {
  Turn turn(this);
  if (draining_) return;
  draining_ = true;
  turn.After([this] {
    if (options_.on_readiness) options_.on_readiness(false);
  });
}

bool Coordinator::WaitIdle(Clock::time_point until) {
  std::unique_lock lock(mutex_);
  return idle_.wait_until(lock, until, [&] { return open_calls_ == 0; });
}

void Coordinator::Stop() {
  StartDraining();
  {
    Turn turn(this);
    if (stopped_) return;
    stopped_ = true;
    timer_wake_.notify_all();
    FailWaiting(Unavailable("STOPPING", "the service is stopping", options_.retry_delay), nullptr,
                turn);
  }
  group_->Stop();
  if (timer_.joinable()) timer_.join();
  Turn turn(this);  // the workers are gone, and what they had open with them
  for (const DeviceRegionPtr& region : std::exchange(unclosed_regions_, {})) {
    AnswerWaiting(region.get(), absl::OkStatus(), turn);
  }
}

bool Coordinator::ready() const {
  std::lock_guard lock(mutex_);
  return state_ == State::kReady && !draining_;
}

absl::Status Coordinator::CheckServing() const {
  if (draining_) {
    return Unavailable("DRAINING", "the service is shutting down", options_.retry_delay);
  }
  if (state_ != State::kReady) {
    return Unavailable("GROUP_FORMING",
                       absl::StrCat("the group of workers is not ready: ", not_ready_),
                       options_.retry_delay);
  }
  return absl::OkStatus();
}

void Coordinator::RunTimer() {
  while (true) {
    {
      std::unique_lock lock(mutex_);
      if (stopped_) return;
      timer_sleeps_until_ = NextWake();
      if (timer_sleeps_until_ == Clock::time_point::max()) {
        timer_wake_.wait(lock);
      } else {
        timer_wake_.wait_until(lock, timer_sleeps_until_);
      }
      timer_sleeps_until_ = Clock::time_point::min();
      if (stopped_) return;
    }
    Turn turn(this);  // its end begins batches whose window has closed
    const Clock::time_point now = Clock::now();
    while (!waiting_.empty() && waiting_.begin()->first.first <= now) {
      Fail(waiting_.begin()->second,
           absl::DeadlineExceededError("the call waited for its turn until its deadline"), turn);
    }
    if (setup_retry_.has_value() && *setup_retry_ <= now) SetUp(turn);
  }
}

Coordinator::Clock::time_point Coordinator::NextWake() const {
  Clock::time_point next = Clock::time_point::max();
  if (!waiting_.empty()) next = waiting_.begin()->first.first;
  if (setup_retry_.has_value()) next = std::min(next, *setup_retry_);
  if (options_.batch.window.count() > 0 && steps_in_flight_ < options_.pipeline_depth) {
    if (const auto due = batcher_.NextDue()) next = std::min(next, *due);
  }
  return next;
}

void Coordinator::Send(worker::CacheId cache, std::function<void(worker::Command*)> fill,
                       WorkerGroup::Done done, Turn& turn) {
  commands_.Enqueue(
      [cache, epoch = epoch_, timeout = options_.step_timeout,
       fill = std::move(fill)](uint64_t number) {
        worker::Command command;
        command.number = number;
        command.cache = cache;
        command.epoch = epoch;
        command.deadline = Clock::now() + timeout;
        fill(&command);
        return command;
      },
      std::move(done));
}

void Coordinator::Undropped(const std::vector<worker::CacheId>& ids) {
  undropped_caches_.insert(undropped_caches_.end(), ids.begin(), ids.end());
}

void Coordinator::SendToGroups(const Cache& cache, const std::function<Body(int32_t)>& body,
                               std::function<void(const absl::Status&)> done, Turn& turn) {
  struct Answers {
    std::mutex mutex;
    size_t missing = 0;
    absl::Status first_failure;
  };
  auto answers = std::make_shared<Answers>();
  answers->missing = cache.ids.size();
  const auto answered = [answers, done = std::move(done)](const Outcome& outcome) {
    absl::Status failure;
    {
      std::lock_guard lock(answers->mutex);
      answers->first_failure.Update(outcome.status);
      if (--answers->missing > 0) return;
      failure = answers->first_failure;
    }
    done(failure);
  };
  for (size_t group = 0; group < cache.ids.size(); ++group) {
    Send(
        cache.ids[group],
        [told = body(static_cast<int32_t>(group))](worker::Command* command) {
          command->body = told;
        },
        answered, turn);
  }
}

// ---------------------------------------------------------------------------------------- caches

absl::StatusOr<Coordinator::CachePtr> Coordinator::FindCache(const std::string& name) const {
  TRIBUTARY_RETURN_IF_ERROR(CheckServing());
  const auto it = caches_.find(name);
  if (it == caches_.end() || !it->second->created) return NotFound("cache", name, "cache_id");
  return it->second;
}

void Coordinator::CreateCache(const v1::CreateCacheRequest& request,
                              Done<v1::CreateCacheReply> done) {
  absl::Status named = CheckName("cache_id", request.cache_id());
  if (!named.ok()) return done(std::move(named));
  absl::StatusOr<ResolvedSpec> resolved = ResolveSpec(request.spec(), group_->size());
  if (!resolved.ok()) return done(resolved.status());
  worker::CacheBackends backends(
      options_.backends, resolved->spec,
      {.device = group_->device(), .batch_invariant = options_.deterministic});
  absl::Status usable = CheckBackends(backends, resolved->terms);
  if (!usable.ok()) return done(std::move(usable));

  Turn turn(this);
  ++open_calls_;
  if (absl::Status serving = CheckServing(); !serving.ok()) {
    return turn.Answer([done, serving] { done(serving); });
  }
  if (const auto it = caches_.find(request.cache_id()); it != caches_.end()) {
    const CachePtr cache = it->second;
    if (!worker::SameSpec(cache->spec, resolved->spec) || !(cache->terms == resolved->terms)) {
      return turn.Answer([done, cache] {
        done(Conflict("cache_id",
                      absl::StrCat("cache '", cache->name, "' exists with another spec")));
      });
    }
    if (cache->created) return turn.Answer([done, cache] { done(CreatedReply(*cache)); });
    cache->creators.push_back(std::move(done));
    return;
  }
  const TableGeometry geometry = GeometryOf(request.cache_id(), next_cache_, *resolved,
                                            group_->size(), options_.max_sequences);
  auto cache = std::make_shared<Cache>(request.cache_id(), next_cache_, *std::move(resolved),
                                       std::move(backends), geometry);
  next_cache_ += static_cast<worker::CacheId>(cache->ids.size());
  cache->creators.push_back(std::move(done));
  caches_.emplace(cache->name, cache);
  SendToGroups(
      *cache,
      [cache](int32_t group) { return worker::CreateCacheCommand{cache->GroupSpec(group)}; },
      [this, cache](const absl::Status& status) { OnCacheCreated(cache, status); }, turn);
}

void Coordinator::OnCacheCreated(const CachePtr& cache, const absl::Status& status) {
  Turn turn(this);
  const absl::Status failure = FromOutcome(status, options_.retry_delay);
  if (failure.ok()) {
    cache->created = true;
    log_->Info("cache created", {{"cache", cache->name},
                                 {"pages", cache->spec.num_pages},
                                 {"layers", cache->spec.layers.size()},
                                 {"backend", cache->backends.first()->name}});
  } else {
    caches_.erase(cache->name);
    // Some ranks may have them.
    if (state_ == State::kReady) {
      DropGroups(
          *cache, [](Turn&) {}, turn);
    } else {
      Undropped(cache->ids);
    }
    log_->Warning("cache not created", {{"cache", cache->name}, {"error", failure.message()}});
  }
  for (auto& creator : std::exchange(cache->creators, {})) {
    turn.Answer([creator = std::move(creator), cache, failure] {
      if (failure.ok()) {
        creator(CreatedReply(*cache));
      } else {
        creator(failure);
      }
    });
  }
}

void Coordinator::DeleteCache(const v1::DeleteCacheRequest& request,
                              Done<v1::DeleteCacheReply> done) {
  Turn turn(this);
  ++open_calls_;
  absl::StatusOr<CachePtr> cache = FindCache(request.cache_id());
  if (!cache.ok()) {
    return turn.Answer([done, status = cache.status()] { done(status); });
  }
  caches_.erase(request.cache_id());
  FailWaiting(NotFound("cache", request.cache_id(), "cache_id"), cache->get(), turn);
  (*cache)->table.Disown();
  DropGroups(
      **cache, [done](Turn& later) { later.Answer([done] { done(v1::DeleteCacheReply()); }); },
      turn);
}

// They are gone whatever comes of the command: workers that miss it are told again.
void Coordinator::DropGroups(const Cache& cache, std::function<void(Turn&)> done, Turn& turn) {
  SendToGroups(
      cache, [](int32_t) { return worker::DropCacheCommand{}; },
      [this, ids = cache.ids, done = std::move(done)](const absl::Status& status) {
        Turn later(this);
        if (!status.ok()) Undropped(ids);
        done(later);
      },
      turn);
}

// ------------------------------------------------------------------------------------- sequences

void Coordinator::InOrder(const std::string& cache_name, const CallContext& call,
                          std::vector<worker::SequenceId> sequences,
                          std::function<void(Cache&, Turn&)> apply,
                          std::function<void(absl::Status)> fail) {
  Turn turn(this);
  ++open_calls_;
  absl::StatusOr<CachePtr> cache = FindCache(cache_name);
  if (!cache.ok()) {
    return turn.Answer([fail, status = cache.status()] { fail(status); });
  }
  auto operation = std::make_shared<Operation>();
  operation->sequences = std::move(sequences);
  operation->cache = *cache;
  operation->call = call;
  operation->apply = std::move(apply);
  operation->failed = std::move(fail);
  Accept(std::move(operation), turn);
}

void Coordinator::OpenSequence(const v1::OpenSequenceRequest& request, const CallContext& call,
                               Done<v1::OpenSequenceReply> done) {
  const worker::SequenceId id = request.sequence_id();
  std::vector<worker::SequenceId> order;
  if (id != 0) order.push_back(id);
  InOrder(
      request.cache_id(), call, std::move(order),
      [this, id, caller = call.caller, done](Cache& cache, Turn& turn) {
        bool reopened = false;
        const absl::StatusOr<worker::SequenceId> opened =
            cache.table.Open(id, &reopened, clients_.Of(caller));
        turn.Answer([done, opened] {
          if (!opened.ok()) return done(opened.status());
          done(SequenceReply<v1::OpenSequenceReply>(*opened));
        });
      },
      done);
}

void Coordinator::ForkSequence(const v1::ForkSequenceRequest& request, const CallContext& call,
                               Done<v1::ForkSequenceReply> done) {
  const int64_t length = request.has_length() ? request.length() : -1;
  if (request.has_length() && length < 0) {
    return done(InvalidField("length", absl::StrCat("must be >= 0, is ", length)));
  }
  std::vector<worker::SequenceId> order = {request.parent_id()};
  if (request.sequence_id() != 0 && request.sequence_id() != request.parent_id()) {
    order.push_back(request.sequence_id());
  }
  const auto apply = [this, request, length, caller = call.caller, done](Cache& cache, Turn& turn) {
    const absl::StatusOr<Sequence*> forked =
        cache.table.Fork(request.parent_id(), request.sequence_id(), length, clients_.Of(caller));
    if (!forked.ok()) {
      return turn.Answer([done, status = forked.status()] { done(status); });
    }
    const Sequence& child = **forked;
    // Later commands come after this one, so the caller need not wait for it. If the group breaks
    // first, the next one is told all tables.
    const CachePtr held = caches_.at(cache.name);
    SendToGroups(
        cache,
        [&child](int32_t group) {
          return worker::SetTablesCommand{
              {{child.id, 0, SequenceTable::ToldPages(child.groups[group])}}};
        },
        [this, held, id = child.id](const absl::Status& status) {
          if (FromOutcome(status, options_.retry_delay).code() == absl::StatusCode::kAborted) {
            return;
          }
          if (status.ok()) return;
          log_->Error("workers refused a fork's table", {{"error", status.message()}});
          Turn later(this);
          if (Sequence* s = held->table.Find(id)) held->table.MarkLost(s);
        },
        turn);
    v1::ForkSequenceReply reply = SequenceReply<v1::ForkSequenceReply>(child.id);
    reply.set_length(child.fork_length);
    turn.Answer([done, reply] { done(reply); });
  };
  InOrder(request.cache_id(), call, std::move(order), apply, done);
}

void Coordinator::TruncateSequence(const v1::TruncateSequenceRequest& request,
                                   const CallContext& call, Done<v1::TruncateSequenceReply> done) {
  if (request.length() < 0) {
    return done(InvalidField("length", absl::StrCat("must be >= 0, is ", request.length())));
  }
  InOrder(
      request.cache_id(), call, {request.sequence_id()},
      [request, done](Cache& cache, Turn& turn) {
        const absl::StatusOr<int64_t> held =
            cache.table.Truncate(request.sequence_id(), request.length());
        turn.Answer([done, held] {
          if (!held.ok()) return done(held.status());
          v1::TruncateSequenceReply reply;
          reply.set_length(*held);
          done(reply);
        });
      },
      done);
}

void Coordinator::CloseSequence(const v1::CloseSequenceRequest& request, const CallContext& call,
                                Done<v1::CloseSequenceReply> done) {
  const worker::SequenceId id = request.sequence_id();
  const auto apply = [this, id, done](Cache& cache, Turn& turn) {
    const absl::Status closed = cache.table.Close(id);
    if (!closed.ok()) return turn.Answer([done, closed] { done(closed); });
    // As with a fork, nobody need wait for the workers.
    const CachePtr held = caches_.at(cache.name);
    SendToGroups(
        cache, [id](int32_t) { return worker::DropTablesCommand{{id}}; },
        [this, held, id](const absl::Status& status) {
          if (status.ok()) return;
          Turn later(this);
          held->undropped.push_back(id);
        },
        turn);
    turn.Answer([done] { done(v1::CloseSequenceReply()); });
  };
  InOrder(request.cache_id(), call, {id}, apply, done);
}

}  // namespace tributary::service
