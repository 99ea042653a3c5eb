// What the coordinator does when its group of workers breaks and forms again.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status/rpc_errors.h"
#include "service/coordinator/coordinator.h"
#include "service/coordinator/operation.h"

namespace tributary::service {
namespace {

// Page numbers of one SetTables command: bounds its size however many sequences are open.
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

void Coordinator::OnFormed(uint64_t epoch, const std::vector<bool>& fresh) {
  log_->Info("group formed",
             {{"epoch", epoch}, {"fresh", std::count(fresh.begin(), fresh.end(), true)}});
  Turn turn(this);
  epoch_ = epoch;
  for (auto& [name, cache] : caches_) {
    if (!cache->created) continue;
    const int64_t lost_before = cache->table.lost();
    cache->table.MarkLost(fresh);
    const int64_t lost = cache->table.lost() - lost_before;
    if (lost > 0) log_->Warning("sequences lost", {{"cache", name}, {"sequences", lost}});
  }
  SetUp(turn);
}

void Coordinator::OnBroken(const std::string& reason) {
  log_->Warning("group broken", {{"epoch", epoch_}, {"reason", reason}});
  Turn turn(this);
  not_ready_ = reason;
  setup_retry_.reset();
  SetState(State::kForming, turn);
  FailWaiting(CheckServing(), nullptr, turn);
  turn.After([this, epoch = epoch_, reason] { observer_->OnGroupBroken(epoch, reason); });
}

void Coordinator::SetState(State state, Turn& turn) {
  const bool was_ready = state_ == State::kReady;
  state_ = state;
  const bool is_ready = state_ == State::kReady;
  if (was_ready == is_ready || draining_ || !options_.on_readiness) return;
  turn.After([this, is_ready] { options_.on_readiness(is_ready); });
}

// Brings every worker to what the coordinator knows; then the group is ready.
void Coordinator::SetUp(Turn& turn) {
  setup_retry_.reset();
  not_ready_ = "bringing caches and tables to the workers";
  SetState(State::kSettingUp, turn);
  setup_left_ = 1;  // this function's own
  for (const worker::CacheId id : std::exchange(undropped_caches_, {})) {
    Send(
        id, [](worker::Command* command) { command->body = worker::DropCacheCommand{}; },
        [this, id](Outcome outcome) {
          if (outcome.status.ok()) return;
          Turn later(this);
          undropped_caches_.push_back(id);
        },
        turn);
  }
  for (const DeviceRegionPtr& region : std::exchange(unclosed_regions_, {})) {
    CloseRegion(region, turn);
  }
  for (const auto& [name, cache] : caches_) {
    if (cache->created) SendSetup(cache, turn);
  }
  turn.After([this, epoch = epoch_] { OnSetup(epoch, absl::OkStatus()); });
}

void Coordinator::SendSetup(const CachePtr& cache, Turn& turn) {
  const auto done = [this, epoch = epoch_](Outcome outcome) { OnSetup(epoch, outcome.status); };
  const std::vector<worker::SequenceId> undropped = std::exchange(cache->undropped, {});
  for (int32_t group = 0; group < cache->table.groups().size(); ++group) {
    const auto send = [&](Body body) {
      ++setup_left_;
      Send(
          cache->ids[group],
          [body = std::move(body)](worker::Command* command) { command->body = body; }, done, turn);
    };
    send(worker::CreateCacheCommand{cache->GroupSpec(group)});
    if (!undropped.empty()) send(worker::DropTablesCommand{undropped});
    for (auto& tables : Chunks(cache->table.Snapshot(group))) {
      send(worker::SetTablesCommand{std::move(tables)});
    }
  }
}

void Coordinator::OnSetup(uint64_t epoch, const absl::Status& status) {
  Turn turn(this);
  if (epoch != epoch_ || state_ != State::kSettingUp) return;
  if (FromOutcome(status, options_.retry_delay).code() == absl::StatusCode::kAborted) {
    return;  // the group is about to say that it broke
  }
  if (!status.ok()) {
    log_->Error("workers refused their set-up", {{"epoch", epoch}, {"error", status.message()}});
    not_ready_ = std::string(status.message());
    setup_retry_ = Clock::now() + std::chrono::seconds(1);
  }
  if (--setup_left_ > 0 || setup_retry_.has_value()) return;
  statistics_.set_group_formations(statistics_.group_formations() + 1);
  log_->Info("ready", {{"epoch", epoch}, {"caches", caches_.size()}});
  turn.After([this, epoch] { observer_->OnGroupReady(epoch); });
  SetState(State::kReady, turn);
}

}  // namespace tributary::service
