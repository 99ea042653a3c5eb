#include "service/coordinator/resizing.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status/errors.h"
#include "base/status/rpc_errors.h"
#include "base/status/status_macros.h"
#include "service/coordinator/table_commands.h"
#include "service/workers/leaving.h"
#include "worker/cache_spec.h"
#include "worker/redeal.h"
#include "worker/rpc/protocol.h"

namespace tributary::service {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr seconds kWorkerPatience{60};   // for workers that are missing
constexpr milliseconds kCountAgain{50};  // between two times that they are counted
constexpr seconds kFormPatience{60};     // for a group whose workers are all there
constexpr seconds kSettlePatience{10};
// Of one command that moves tokens, on a rank. Two are under way at a time.
constexpr size_t kBytesOfMove = size_t{8} << 20;
constexpr int kUnderWay = 2;

std::string ReasonOf(int from, int to) {
  return absl::StrCat(kNumberChanges, " from ", from, " to ", to);
}

}  // namespace

Resizing::Resizing(const CoordinatorOptions& options, const telemetry::Logger& log,
                   WorkerGroup& group, CoordinatorLock& lock, ServingState& serving,
                   GroupCommands& commands, CallOrder& order, CacheRegistry& caches,
                   const StepRunner& steps)
    : options_(options),
      log_(log),
      group_(group),
      lock_(lock),
      serving_(serving),
      commands_(commands),
      order_(order),
      caches_(caches),
      steps_(steps) {}

// ---------------------------------------------------------------------------- asking, and the end

void Resizing::Ask(const v1::ChangeWorkersRequest& request, Done<v1::ChangeWorkersReply> done) {
  const int workers = request.workers();
  if (workers < 1) {
    return done(InvalidField("workers", absl::StrCat("must be >= 1, is ", workers)));
  }
  if (absl::Status may = group_.CheckResize(); !may.ok()) return done(std::move(may));
  const milliseconds patience = request.patience_ms() > 0 ? milliseconds(request.patience_ms())
                                                          : milliseconds(kWorkerPatience);
  {
    const CriticalSection section(lock_);
    if (stopping_) {
      return lock_.Defer([done = std::move(done), delay = options_.retry_delay] {
        done(Unavailable("DRAINING", "the service is shutting down", delay));
      });
    }
    if (asked_ != 0 && asked_ != workers) {
      return lock_.Defer([done = std::move(done), asked = asked_] {
        done(FieldError(absl::StatusCode::kFailedPrecondition, "workers",
                        absl::StrCat("a change to ", asked, " is under way")));
      });
    }
    waiting_.push_back(std::move(done));
    if (std::exchange(asked_, workers) == workers) return;
  }
  const Clock::time_point until = Clock::now() + patience;
  {
    const MutexLock lock(thread_mutex_);
    if (!stopped_) {
      if (thread_.joinable()) thread_.join();  // it has answered, and ends
      thread_ = std::thread([this, workers, until] { Run(workers, until); });
      return;
    }
  }
  Run(workers, until);  // which ends at once, with the answer
}

void Resizing::BeginStop() {
  stopping_ = true;
  changed_.NotifyAll();
}

void Resizing::Stop() {
  {
    const CriticalSection section(lock_);
    BeginStop();
  }
  const MutexLock lock(thread_mutex_);
  stopped_ = true;
  if (thread_.joinable()) thread_.join();
}

void Resizing::Run(int workers, Clock::time_point patience) {
  absl::StatusOr<v1::ChangeWorkersReply> changed = Change(workers, patience);
  pairs_.clear();
  if (!changed.ok()) {
    log_.Warning("the number of workers has not changed",
                 {{"asked", workers}, {"error", changed.status().message()}});
  }
  const CriticalSection section(lock_);
  asked_ = 0;
  for (auto& done : std::exchange(waiting_, {})) {
    lock_.Defer([done = std::move(done), changed] { done(changed); });
  }
}

absl::StatusOr<v1::ChangeWorkersReply> Resizing::Change(int workers, Clock::time_point patience) {
  const int from = group_.size();
  v1::ChangeWorkersReply reply;
  reply.set_workers_before(from);
  reply.set_workers(workers);
  if (workers == from) return reply;
  log_.Info("the number of workers is to change", {{"from", from}, {"to", workers}});
  const int places = std::max(from, workers);
  group_.Expect(places);
  absl::Status may;
  Clock::time_point begun;
  do {
    may = AwaitWorkers(workers, places, patience);
    begun = Clock::now();
    if (may.ok()) may = Pause(from, workers);
  } while (absl::IsUnavailable(may) && begun < patience && Rest());
  if (!may.ok()) {
    group_.Expect(from);
    return may;
  }
  // From here on the group is broken, and is formed again in any case.
  uint64_t bytes = 0;
  absl::Status status = FormAll(from, workers);
  if (status.ok()) status = MakeCaches(workers);
  if (status.ok()) status = MoveTokens(from, workers, &bytes);
  if (status.ok()) status = TellTables();
  if (status.ok()) status = Commit(workers);
  FormWith(status.ok() ? workers : from, from, workers);
  const CriticalSection section(lock_);
  const absl::Status ready =
      Await(Clock::now() + kFormPatience, [this]() TRIBUTARY_LOCKED { return serving_.ready(); });
  if (!status.ok()) return status;
  const std::chrono::duration<double> took = Clock::now() - begun;
  log_.Info("the number of workers has changed", {{"from", from},
                                                  {"to", workers},
                                                  {"bytes", bytes},
                                                  {"seconds", took.count()},
                                                  {"ready", ready.ok()}});
  reply.set_caches(static_cast<int64_t>(pairs_.size()));
  reply.set_bytes_moved(bytes);
  reply.set_seconds(took.count());
  return reply;
}

// -------------------------------------------------------------------------------------------
// stages

absl::Status Resizing::AwaitWorkers(int workers, int places, Clock::time_point patience) {
  for (;;) {
    int there = 0;
    std::string old_build;
    for (const Member& member : group_.members()) {
      if (member.rank >= places || !member.connected) continue;
      ++there;
      if (member.protocol < worker::kRankChangeProtocol) {
        old_build = absl::StrCat("the worker of rank ", member.rank, " (", member.build,
                                 ") speaks version ", member.protocol, " of the protocol, and ",
                                 worker::kRankChangeProtocol, " is needed: upgrade it first");
      }
    }
    if (!old_build.empty()) return absl::FailedPreconditionError(old_build);
    if (there == places) return absl::OkStatus();
    if (Clock::now() >= patience) {
      return Unavailable(
          "WORKERS_MISSING",
          absl::StrCat("workers: ", there, " of ", places, " are there; to change to ", workers,
                       ", start the others and ask again"),
          options_.retry_delay);
    }
    if (!Rest()) return absl::UnavailableError("the service is stopping");
  }
}

bool Resizing::Rest() {
  const CriticalSection section(lock_);
  if (!stopping_) lock_.Wait(changed_, Clock::now() + kCountAgain);
  return !stopping_;
}

std::vector<std::string> Resizing::HostsOf(int ranks) const {
  std::vector<std::string> hosts;
  for (const Member& member : group_.members()) {
    if (member.rank < ranks) hosts.push_back(member.host);
  }
  return hosts;
}

absl::Status Resizing::PairUp(const std::vector<std::string>& hosts) {
  pairs_.clear();
  for (const auto& [name, cache] : caches_.all()) {
    Pair& pair = pairs_.emplace_back();
    pair.old = cache;
    TRIBUTARY_ASSIGN_OR_RETURN(pair.made, caches_.MakeFor(*cache, hosts));
    TRIBUTARY_ASSIGN_OR_RETURN(pair.pages, cache->table.RedealInto(&pair.made->table));
  }
  return absl::OkStatus();
}

absl::Status Resizing::Pause(int from, int to) {
  const std::vector<std::string> hosts = HostsOf(to);
  const CriticalSection section(lock_);
  TRIBUTARY_RETURN_IF_ERROR(serving_.Check());
  for (const auto& [name, cache] : caches_.all()) {
    if (!cache->created) {
      return Unavailable("CACHE_NOT_WHOLE", absl::StrCat("cache '", name, "' is being created"),
                         options_.retry_delay);
    }
    TRIBUTARY_RETURN_IF_ERROR(cache->not_held);
    if (cache->table.missing(PagePlace::kRank) + cache->table.missing(PagePlace::kReplica) > 0) {
      return Unavailable(
          "CACHE_NOT_WHOLE",
          absl::StrCat("cache '", name, "': pages are being restored, or replicas made again"),
          options_.retry_delay);
    }
  }
  // What can be known of it before anybody has to wait. Calls that are under way are no matter yet.
  if (absl::Status may = PairUp(hosts); absl::IsFailedPrecondition(may)) return may;
  failed_ = absl::OkStatus();
  formed_ = false;
  regrouped_ = false;
  group_before_ = from;
  unanswered_ = 0;
  ++change_;
  // Calls that wait are refused as those that come are. Steps that have begun are carried out.
  serving_.SetNotReady(ServingState::Phase::kSettingUp, ReasonOf(from, to));
  order_.FailAll(serving_.Check());
  const absl::Status idle = Await(Clock::now() + options_.step_timeout,
                                  [this]() TRIBUTARY_LOCKED { return steps_.in_flight() == 0; });
  static_cast<void>(idle);  // what is left is aborted with the group
  takes_group_ = true;
  expected_break_ = ReasonOf(from, to);
  return absl::OkStatus();
}

absl::Status Resizing::FormAll(int from, int to) {
  group_.Regroup({.size = std::max(from, to),
                  .shard_ranks = from,
                  .once = true,
                  .reason = ReasonOf(from, to)});
  const CriticalSection section(lock_);
  return Await(Clock::now() + kFormPatience, [this]() TRIBUTARY_LOCKED { return formed_; });
}

absl::Status Resizing::MakeCaches(int to) {
  const std::vector<std::string> hosts = HostsOf(to);
  {
    const CriticalSection section(lock_);
    // What the old group had under way is being settled, on other threads.
    absl::Status may;
    const absl::Status settled = Await(Clock::now() + kSettlePatience, [&]() TRIBUTARY_LOCKED {
      may = absl::OkStatus();
      for (const auto& [name, cache] : caches_.all()) may.Update(cache->table.CheckMayRedeal());
      return !absl::IsUnavailable(may);
    });
    TRIBUTARY_RETURN_IF_ERROR(may);
    TRIBUTARY_RETURN_IF_ERROR(settled);
    TRIBUTARY_RETURN_IF_ERROR(PairUp(hosts));
    for (const Pair& pair : pairs_) {
      for (int32_t group = 0; group < pair.made->table.groups().size(); ++group) {
        ++unanswered_;
        commands_.CreateCache(
            pair.made->ids[static_cast<size_t>(group)],
            {.spec = pair.made->GroupSpec(group), .existing = false, .ranks = to},
            [this, change = change_](const absl::Status& status) { OnAnswer(change, status); });
      }
    }
  }
  return AwaitAnswers(0);
}

absl::Status Resizing::MoveTokens(int from, int to, uint64_t* bytes) {
  for (const Pair& pair : pairs_) {
    const int32_t stride = pair.made->spec.replica_stride;
    for (size_t group = 0; group < pair.pages.size(); ++group) {
      const std::vector<worker::MovedPage>& pages = pair.pages[group];
      const size_t page_bytes = [&] {
        const CriticalSection section(lock_);
        return static_cast<size_t>(pair.made->PageBytes(static_cast<int32_t>(group)));
      }();
      const size_t most = std::clamp<size_t>(kBytesOfMove / page_bytes, 1, 1 << 14);
      for (size_t begin = 0; begin < pages.size(); begin += most) {
        const size_t end = std::min(pages.size(), begin + most);
        worker::MoveTokensCommand move{.from_cache = pair.old->ids[group],
                                       .ranks = {from, to},
                                       .pages = {pages.begin() + static_cast<ptrdiff_t>(begin),
                                                 pages.begin() + static_cast<ptrdiff_t>(end)}};
        TRIBUTARY_RETURN_IF_ERROR(Send(pair.made->ids[group], move, kUnderWay - 1));
        *bytes += (end - begin) * page_bytes * static_cast<size_t>(to);
        if (stride == 0) continue;
        move.keeper_stride = stride;
        TRIBUTARY_RETURN_IF_ERROR(Send(pair.made->ids[group], std::move(move), kUnderWay - 1));
        *bytes += (end - begin) * page_bytes * static_cast<size_t>(to);
      }
    }
  }
  return AwaitAnswers(0);
}

absl::Status Resizing::TellTables() {
  for (const Pair& pair : pairs_) {
    for (int32_t group = 0; group < static_cast<int32_t>(pair.made->ids.size()); ++group) {
      std::vector<worker::SetTablesCommand> tables;
      {
        const CriticalSection section(lock_);
        tables = TableCommands(pair.made->table.Snapshot(group));
      }
      for (worker::SetTablesCommand& table : tables) {
        TRIBUTARY_RETURN_IF_ERROR(
            Send(pair.made->ids[static_cast<size_t>(group)], std::move(table), kUnderWay - 1));
      }
    }
  }
  return AwaitAnswers(0);
}

absl::Status Resizing::Commit(int to) {
  {
    const CriticalSection section(lock_);
    TRIBUTARY_RETURN_IF_ERROR(failed_);
  }
  if (options_.journal != nullptr) {
    std::vector<JournaledCache> caches;
    for (const Pair& pair : pairs_) {
      const CriticalSection section(lock_);
      caches.push_back({.name = pair.made->name,
                        .owner = pair.made->owner,
                        .first_id = pair.made->id(),
                        .spec = pair.made->asked});
    }
    absl::Status written = absl::UnknownError("");
    bool answered = false;
    options_.journal->ChangeRanks(to, caches, [&](const absl::Status& status) {
      const CriticalSection section(lock_);
      written = status;
      answered = true;
      changed_.NotifyAll();
    });
    const CriticalSection section(lock_);
    // Bounded by the disk alone: it is either written or not, and only the journal knows.
    while (!answered) lock_.Wait(changed_, Clock::time_point::max());
    if (!written.ok()) {
      return absl::UnavailableError(
          absl::StrCat("the journal cannot be written: ", written.message()));
    }
  }
  const CriticalSection section(lock_);
  std::vector<CachePtr> made;
  for (const Pair& pair : pairs_) made.push_back(pair.made);
  caches_.Replace(made);
  return absl::OkStatus();
}

void Resizing::FormWith(int ranks, int from, int to) {
  {
    const CriticalSection section(lock_);
    takes_group_ = false;
    failed_ = absl::OkStatus();
    ++change_;
  }
  group_.Regroup({.size = ranks, .shard_ranks = ranks, .reason = ReasonOf(from, to)});
}

// -------------------------------------------------------------------------------------------
// waiting

void Resizing::OnFormed(const std::vector<bool>& fresh) {
  if (!regrouped_) return;  // the group broke by itself, and is formed once more as it was
  const auto end = fresh.begin() + std::min<ptrdiff_t>(group_before_, std::ssize(fresh));
  if (std::find(fresh.begin(), end, true) != end) {
    failed_.Update(
        Unavailable("GROUP_FORMING", "a worker was replaced meanwhile", options_.retry_delay));
  }
  formed_ = true;
  changed_.NotifyAll();
}

absl::Status Resizing::Broke(absl::string_view reason) const {
  return Unavailable("GROUP_FORMING", absl::StrCat("the group broke meanwhile: ", reason),
                     options_.retry_delay);
}

void Resizing::OnBroken(const std::string& reason) {
  if (!takes_group_) return;
  if (!regrouped_ && reason == expected_break_) {
    regrouped_ = true;
    return;
  }
  failed_.Update(Broke(reason));
  changed_.NotifyAll();
}

absl::Status Resizing::Send(worker::CacheId cache, GroupCommands::Body body, int most) {
  {
    const CriticalSection section(lock_);
    TRIBUTARY_RETURN_IF_ERROR(failed_);
    ++unanswered_;
    commands_.SendBody(cache, std::move(body), [this, change = change_](const Outcome& outcome) {
      OnAnswer(change, outcome.status);
    });
  }
  return AwaitAnswers(most);
}

void Resizing::OnAnswer(uint64_t change, const absl::Status& status) {
  const CriticalSection section(lock_);
  if (change != change_) return;
  --unanswered_;
  failed_.Update(absl::IsAborted(status) ? Broke(status.message())
                                         : FromOutcome(status, options_.retry_delay));
  changed_.NotifyAll();
}

absl::Status Resizing::AwaitAnswers(int most) {
  const CriticalSection section(lock_);
  // Every command is answered by its deadline.
  return Await(Clock::time_point::max(),
               [this, most]() TRIBUTARY_LOCKED { return unanswered_ <= most; });
}

absl::Status Resizing::Await(Clock::time_point until, const std::function<bool()>& fulfilled) {
  for (;;) {
    TRIBUTARY_RETURN_IF_ERROR(failed_);
    if (fulfilled()) return absl::OkStatus();
    if (stopping_) return absl::UnavailableError("the service is stopping");
    const Clock::time_point now = Clock::now();
    if (now >= until) {
      return Unavailable("GROUP_FORMING", "it took too long", options_.retry_delay);
    }
    lock_.Wait(changed_, std::min(until, now + kCountAgain));
  }
}

}  // namespace tributary::service
