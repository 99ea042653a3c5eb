#include "service/coordinator/group_setup.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status/rpc_errors.h"
#include "service/coordinator/table_commands.h"
#include "service/workers/builds.h"
#include "service/workers/leaving.h"

namespace tributary::service {
namespace {

// How long after workers refused a cache they are asked again, the first time and at most.
constexpr std::chrono::seconds kFirstPause{1};
constexpr std::chrono::seconds kLongestPause{30};

}  // namespace

GroupSetup::GroupSetup(const CoordinatorOptions& options, const telemetry::Logger& log,
                       Observer& observer, const WorkerGroup& group, CoordinatorLock& lock,
                       ServingState& serving, GroupCommands& commands, CallOrder& order,
                       CacheRegistry& caches, RegisteredRegions& regions, Sessions& sessions,
                       Restoration& restoration, Resizing& resizing)
    : options_(options),
      log_(log),
      observer_(observer),
      group_(group),
      lock_(lock),
      serving_(serving),
      commands_(commands),
      order_(order),
      caches_(caches),
      regions_(regions),
      sessions_(sessions),
      restoration_(restoration),
      resizing_(resizing) {}

// --------------------------------------------------------------------------------- generations

void GroupSetup::OnFormed(uint64_t epoch, const std::vector<bool>& fresh) {
  log_.Info("group formed",
            {{"epoch", epoch}, {"fresh", std::count(fresh.begin(), fresh.end(), true)}});
  const std::string others = OtherBuilds(group_.members(), options_.build_version);
  if (!others.empty()) {
    log_.Warning("workers are of other builds than the coordinator",
                 {{"epoch", epoch}, {"coordinator", options_.build_version}, {"workers", others}});
  }
  const CriticalSection section(lock_);
  serving_.BeginEpoch(epoch);
  caches_.MarkLost(fresh);
  if (resizing_.takes_group()) return resizing_.OnFormed(fresh);
  BeginRound();
}

void GroupSetup::OnAdopted(const std::vector<std::optional<worker::Holdings>>& held) {
  const CriticalSection section(lock_);
  caches_.Adopt(held);
}

void GroupSetup::OnBroken(const std::string& reason) {
  const CriticalSection section(lock_);
  const uint64_t epoch = serving_.epoch();
  const auto level =
      BrokeInOrder(reason) ? telemetry::LogLevel::kInfo : telemetry::LogLevel::kWarning;
  log_.Write(level, "group broken", {{"epoch", epoch}, {"reason", reason}});
  ++round_;
  retry_at_.reset();
  serving_.SetNotReady(ServingState::Phase::kForming, reason);
  restoration_.OnBroken();
  resizing_.OnBroken(reason);
  order_.FailAll(serving_.Check());
  sessions_.OnGroupBroken(serving_.Check());
  lock_.Defer([this, epoch, reason] { observer_.OnGroupBroken(epoch, reason); });
}

bool GroupSetup::OnLeaving(int rank) {
  const CriticalSection section(lock_);
  return restoration_.OnLeaving(rank);
}

// ------------------------------------------------------------------------------- set-up rounds

void GroupSetup::BeginRound() {
  ++round_;
  retry_at_.reset();
  retry_pause_ = kFirstPause;
  serving_.SetNotReady(ServingState::Phase::kSettingUp,
                       "bringing caches and tables to the workers");
  unsettled_ = 1;  // the deferred call below
  caches_.DropAgain();
  regions_.CloseAgain();
  for (const auto& [name, cache] : caches_.all()) {
    if (cache->created) SendCache(cache);
  }
  lock_.Defer([this, round = round_] {
    const CriticalSection section(lock_);
    if (round == round_) OnSettled();
  });
}

void GroupSetup::SendCache(const CachePtr& cache) {
  ++unsettled_;
  const auto attempt = std::make_shared<Attempt>(Attempt{.round = round_, .cache = cache});
  attempt->undropped = std::exchange(cache->undropped, {});
  for (int32_t group = 0; group < cache->table.groups().size(); ++group) {
    ++attempt->unanswered;
    commands_.CreateCache(
        cache->ids[group], {cache->GroupSpec(group), /*existing=*/true},
        [this, attempt, group](const absl::Status& status) { OnHeld(attempt, group, status); });
  }
}

void GroupSetup::OnHeld(const AttemptPtr& attempt, int32_t group, const absl::Status& status) {
  {
    const CriticalSection section(lock_);
    if (attempt->round != round_) return;
    const worker::CacheId id = attempt->cache->ids[group];
    if (status.ok() && !attempt->undropped.empty()) {
      SendCounted(attempt, id, worker::DropTablesCommand{attempt->undropped});
    }
    if (status.ok()) {
      for (auto& tables : TableCommands(attempt->cache->table.Snapshot(group))) {
        SendCounted(attempt, id, std::move(tables));
      }
    }
  }
  OnAnswer(attempt, status);
}

void GroupSetup::SendCounted(const AttemptPtr& attempt, worker::CacheId cache,
                             GroupCommands::Body body) {
  ++attempt->unanswered;
  commands_.SendBody(cache, std::move(body), [this, attempt](const Outcome& outcome) {
    OnAnswer(attempt, outcome.status);
  });
}

void GroupSetup::OnAnswer(const AttemptPtr& attempt, const absl::Status& status) {
  const CriticalSection section(lock_);
  if (attempt->round != round_) return;
  if (FromOutcome(status, options_.retry_delay).code() == absl::StatusCode::kAborted) {
    return;  // the group is about to say that it broke
  }
  attempt->failure.Update(status);
  if (--attempt->unanswered > 0) return;
  Conclude(*attempt);
  OnSettled();
}

void GroupSetup::Conclude(const Attempt& attempt) {
  Cache& cache = *attempt.cache;
  if (attempt.failure.ok()) {
    if (!cache.not_held.ok()) log_.Info("the workers hold a cache again", {{"cache", cache.name}});
    cache.not_held = absl::OkStatus();
    return;
  }
  const std::string reason(attempt.failure.message());
  if (cache.not_held.ok()) {
    log_.Error("the workers cannot hold a cache", {{"cache", cache.name}, {"error", reason}});
  }
  cache.not_held = Unavailable(
      "CACHE_NOT_HELD", absl::StrCat("the workers cannot hold cache '", cache.name, "': ", reason),
      std::chrono::duration_cast<std::chrono::milliseconds>(retry_pause_));
}

void GroupSetup::OnSettled() {
  if (--unsettled_ > 0) return;
  if (!serving_.ready()) {
    ++formations_;
    const uint64_t epoch = serving_.epoch();
    log_.Info("ready", {{"epoch", epoch}, {"caches", caches_.all().size()}});
    lock_.Defer([this, epoch] { observer_.OnGroupReady(epoch); });
    serving_.SetReady();
    restoration_.OnReady();
  }
  const bool all_held =
      std::all_of(caches_.all().begin(), caches_.all().end(),
                  [](const auto& named) TRIBUTARY_LOCKED { return named.second->not_held.ok(); });
  if (all_held) return;
  retry_at_ = CoordinatorLock::Clock::now() + retry_pause_;
  retry_pause_ = std::min(2 * retry_pause_, kLongestPause);
}

void GroupSetup::RetryIfDue(CoordinatorLock::Clock::time_point now) {
  if (!retry_at_.has_value() || *retry_at_ > now) return;
  retry_at_.reset();
  for (const auto& [name, cache] : caches_.all()) {
    if (!cache->not_held.ok()) SendCache(cache);
  }
}

}  // namespace tributary::service
