#include "service/coordinator/group_setup.h"

#include <algorithm>
#include <utility>

#include "base/status/rpc_errors.h"

namespace tributary::service {
namespace {

// How long after workers refused their set-up it is tried again.
constexpr std::chrono::seconds kRetryPause{1};

// The most page numbers in one SetTables command. It bounds the size of the command however many
// sequences are open.
constexpr size_t kPagesPerCommand = 1 << 18;

// Cuts tables into commands; a long table may span several.
std::vector<std::vector<worker::PageUpdate>> Chunks(std::vector<worker::PageUpdate> tables) {
  std::vector<std::vector<worker::PageUpdate>> chunks;
  size_t room = 0;
  for (worker::PageUpdate& table : tables) {
    if (table.pages.size() > room) {
      chunks.emplace_back();
      room = std::max(kPagesPerCommand, table.pages.size());
    }
    room -= table.pages.size();
    chunks.back().push_back(std::move(table));
  }
  return chunks;
}

}  // namespace

GroupSetup::GroupSetup(const CoordinatorOptions& options, const telemetry::Logger& log,
                       Observer& observer, CoordinatorLock& lock, ServingState& serving,
                       GroupCommands& commands, CallOrder& order, CacheRegistry& caches,
                       RegisteredRegions& regions, Sessions& sessions)
    : options_(options),
      log_(log),
      observer_(observer),
      lock_(lock),
      serving_(serving),
      commands_(commands),
      order_(order),
      caches_(caches),
      regions_(regions),
      sessions_(sessions) {}

// --------------------------------------------------------------------------------- generations

void GroupSetup::OnFormed(uint64_t epoch, const std::vector<bool>& fresh) {
  log_.Info("group formed",
            {{"epoch", epoch}, {"fresh", std::count(fresh.begin(), fresh.end(), true)}});
  const CriticalSection section(lock_);
  serving_.BeginEpoch(epoch);
  caches_.MarkLost(fresh);
  BeginRound();
}

void GroupSetup::OnBroken(const std::string& reason) {
  const CriticalSection section(lock_);
  const uint64_t epoch = serving_.epoch();
  log_.Warning("group broken", {{"epoch", epoch}, {"reason", reason}});
  retry_at_.reset();
  serving_.SetNotReady(ServingState::Phase::kForming, reason);
  order_.FailAll(serving_.Check());
  sessions_.OnGroupBroken(serving_.Check());
  lock_.Defer([this, epoch, reason] { observer_.OnGroupBroken(epoch, reason); });
}

// ------------------------------------------------------------------------------- set-up rounds

void GroupSetup::BeginRound() {
  retry_at_.reset();
  serving_.SetNotReady(ServingState::Phase::kSettingUp,
                       "bringing caches and tables to the workers");
  unanswered_ = 1;  // the deferred call below
  caches_.DropAgain();
  regions_.CloseAgain();
  for (const auto& [name, cache] : caches_.all()) {
    if (cache->created) SendCache(*cache);
  }
  lock_.Defer([this, epoch = serving_.epoch()] { OnAnswer(epoch, absl::OkStatus()); });
}

void GroupSetup::SendCache(Cache& cache) {
  const std::vector<worker::SequenceId> undropped = std::exchange(cache.undropped, {});
  for (int32_t group = 0; group < cache.table.groups().size(); ++group) {
    const worker::CacheId id = cache.ids[group];
    SendCounted(id, worker::CreateCacheCommand{cache.GroupSpec(group)});
    if (!undropped.empty()) SendCounted(id, worker::DropTablesCommand{undropped});
    for (auto& tables : Chunks(cache.table.Snapshot(group))) {
      SendCounted(id, worker::SetTablesCommand{std::move(tables)});
    }
  }
}

void GroupSetup::SendCounted(worker::CacheId cache, GroupCommands::Body body) {
  ++unanswered_;
  commands_.SendBody(cache, std::move(body),
                     [this, epoch = serving_.epoch()](const Outcome& outcome) {
                       OnAnswer(epoch, outcome.status);
                     });
}

void GroupSetup::OnAnswer(uint64_t epoch, const absl::Status& status) {
  const CriticalSection section(lock_);
  if (epoch != serving_.epoch() || serving_.phase() != ServingState::Phase::kSettingUp) return;
  if (FromOutcome(status, options_.retry_delay).code() == absl::StatusCode::kAborted) {
    return;  // the group is about to say that it broke
  }
  if (!status.ok()) {
    log_.Error("workers refused their set-up", {{"epoch", epoch}, {"error", status.message()}});
    serving_.SetNotReady(ServingState::Phase::kSettingUp, std::string(status.message()));
    retry_at_ = CoordinatorLock::Clock::now() + kRetryPause;
  }
  if (--unanswered_ > 0 || retry_at_.has_value()) return;
  ++formations_;
  log_.Info("ready", {{"epoch", epoch}, {"caches", caches_.all().size()}});
  lock_.Defer([this, epoch] { observer_.OnGroupReady(epoch); });
  serving_.SetReady();
}

void GroupSetup::RetryIfDue(CoordinatorLock::Clock::time_point now) {
  if (retry_at_.has_value() && *retry_at_ <= now) BeginRound();
}

}  // namespace tributary::service
