#include "service/client/groups/group_table.h"

#include <algorithm>
#include <functional>
#include <optional>
#include <utility>

#include "absl/random/random.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/rpc/connection_failure.h"
#include "base/status/errors.h"
#include "base/status/grpc_status.h"
#include "base/status/rpc_errors.h"
#include "service/client/connect.h"
#include "service/client/groups/one_group.h"

namespace tributary::client {
namespace {

using SystemClock = std::chrono::system_clock;
using SteadyClock = std::chrono::steady_clock;

// While no group answers, they are asked again as soon as this.
constexpr std::chrono::milliseconds kSoon{100};

// Beyond the timeout of calls, by when calls to an address that is gone have ended.
constexpr std::chrono::milliseconds kGrace{10'000};

// Bits that no sequence of the same tag is likely to have had.
uint64_t RandomBits() {
  thread_local absl::BitGen dice;
  return absl::Uniform<uint64_t>(absl::IntervalClosed, dice, 0, UINT64_MAX);
}

size_t RandomBelow(size_t n) {
  thread_local absl::BitGen dice;
  return absl::Uniform<size_t>(dice, 0, n);
}

std::map<std::string, GroupLoad> LoadsOf(const v1::GetTopologyReply& topology) {
  std::map<std::string, GroupLoad> loads;
  for (const v1::CacheInfo& cache : topology.caches()) {
    loads[cache.cache_id()] = {.free_pages = cache.pages_total() - cache.pages_used(),
                               .used_pages = cache.pages_used(),
                               .sequences = cache.sequences()};
  }
  return loads;
}

}  // namespace

// What one group is asked in a round.
struct GroupTable::Probe {
  GroupPtr group;
  const v1::GetLimitsRequest limits_request;
  const v1::GetTopologyRequest topology_request;
  v1::GetLimitsReply limits;
  v1::GetTopologyReply topology;
  grpc::Status limits_status, topology_status;
};

uint64_t GroupTable::Group::NewSequenceId() const {
  return SequenceIdFor(tag.load(std::memory_order_relaxed), RandomBits());
}

absl::StatusOr<std::unique_ptr<GroupTable>> GroupTable::Create(const GroupTableOptions& options) {
  if (absl::Status status = CheckConnectOptions(options.connect); !status.ok()) return status;
  absl::StatusOr<GroupTargets> targets = ParseGroupTargets(options.connect.target);
  if (!targets.ok()) return targets.status();
  // Files that cannot be used are told now, of an address that need not exist.
  ConnectOptions checked = options.connect;
  checked.target = targets->fixed.empty() ? "ipv4:127.0.0.1:1" : targets->fixed.front();
  if (const auto channel = MakeChannel(checked); !channel.ok()) return channel.status();
  return std::unique_ptr<GroupTable>(new GroupTable(options, *std::move(targets)));
}

GroupTable::GroupTable(const GroupTableOptions& options, GroupTargets targets)
    : options_(options), targets_(std::move(targets)) {
  {
    const MutexLock lock(mutex_);
    AdoptTargets(targets_.fixed);
  }
  thread_ = std::thread([this] { Run(); });
}

GroupTable::~GroupTable() {
  {
    const MutexLock lock(mutex_);
    stopping_ = true;
    changed_.NotifyAll();
  }
  questions_.Cancel();
  thread_.join();
  creations_.Cancel();
}

absl::Status GroupTable::Start() {
  const auto deadline = SteadyClock::now() + options_.connect.timeout;
  const MutexLock lock(mutex_);
  for (;;) {
    const bool some = std::any_of(states_.begin(), states_.end(),
                                  [](const State& state) { return state.answers; });
    if (some) return absl::OkStatus();
    const bool asked_once = rounds_ > 0 && !options_.connect.wait_for_service;
    if (asked_once || !changed_.WaitUntil(mutex_, deadline)) {
      std::vector<std::string> reasons;
      if (!why_unresolved_.empty()) reasons.push_back(why_unresolved_);
      for (const State& state : states_) reasons.push_back(WhyNot(state));
      return absl::UnavailableError(
          absl::StrCat("no group answers: ", absl::StrJoin(reasons, "; ")));
    }
  }
}

std::string GroupTable::WhyNot(const State& state) const {
  return absl::StrCat(state.group->target, ": ", state.why);
}

absl::StatusOr<GroupTable::GroupPtr> GroupTable::Of(uint64_t sequence_id,
                                                    const std::string& field) const {
  const MutexLock lock(mutex_);
  const auto found = by_tag_.find(TagOfSequence(sequence_id));
  if (found != by_tag_.end()) return found->second;
  std::vector<std::string> unknown;
  for (const State& state : states_) {
    if (state.id == 0) unknown.push_back(WhyNot(state));
  }
  if (unknown.empty()) return NotFound("sequence", absl::StrCat(sequence_id), field);
  return FieldError(
      absl::StatusCode::kUnavailable, field,
      absl::StrCat("sequence ", sequence_id,
                   " lives in none of the groups that have answered; these have not: ",
                   absl::StrJoin(unknown, "; ")));
}

std::vector<GroupTable::GroupPtr> GroupTable::PlacementFor(const std::string& cache_id) const {
  const MutexLock lock(mutex_);
  std::vector<std::optional<GroupLoad>> loads(states_.size());
  bool any = false;
  for (size_t i = 0; i < states_.size(); ++i) {
    const auto cache = states_[i].caches.find(cache_id);
    if (!states_[i].answers || cache == states_[i].caches.end()) continue;
    loads[i] = cache->second;
    any = true;
  }
  // A cache that was created a moment ago, or that this caller may not look at: any group.
  for (size_t i = 0; !any && i < states_.size(); ++i) {
    if (states_[i].answers) loads[i] = GroupLoad();
  }
  std::vector<GroupPtr> order;
  for (const size_t i : PlacementOrder(loads, RandomBelow)) order.push_back(states_[i].group);
  return order;
}

void GroupTable::Placed(const Group& group, const std::string& cache_id) {
  const MutexLock lock(mutex_);
  State* state = Find(group);
  if (state == nullptr) return;
  const auto cache = state->caches.find(cache_id);
  if (cache != state->caches.end()) ++cache->second.placed;
}

std::vector<GroupTable::GroupPtr> GroupTable::Answering() const {
  const MutexLock lock(mutex_);
  std::vector<GroupPtr> groups;
  for (const State& state : states_) {
    if (state.answers) groups.push_back(state.group);
  }
  return groups;
}

void GroupTable::Remember(const std::string& cache_id, const v1::CacheSpec& spec) {
  const MutexLock lock(mutex_);
  remembered_[cache_id] = spec;
}

void GroupTable::Forget(const std::string& cache_id) {
  const MutexLock lock(mutex_);
  remembered_.erase(cache_id);
}

GroupTable::State* GroupTable::Find(const Group& group) {
  const auto found = std::find_if(states_.begin(), states_.end(),
                                  [&](const State& state) { return state.group.get() == &group; });
  return found == states_.end() ? nullptr : &*found;
}

GroupTable::GroupPtr GroupTable::MakeGroup(const std::string& target) const {
  ConnectOptions options = options_.connect;
  options.target = target;
  NameServer(targets_.name, &options.security);
  auto group = std::make_shared<Group>();
  group->target = target;
  auto channel = MakeChannel(options);
  if (!channel.ok()) return nullptr;
  group->channel = *std::move(channel);
  group->stub = v1::AttentionService::NewStub(group->channel);
  group->lease = options.lease;
  // The client does not outlive its group.
  group->client =
      MakeClient(options, group->channel, [raw = group.get()] { return raw->NewSequenceId(); });
  return group;
}

void GroupTable::AdoptTargets(const std::vector<std::string>& targets) {
  const auto gone = std::stable_partition(states_.begin(), states_.end(), [&](const State& state) {
    return state.answers ||
           std::find(targets.begin(), targets.end(), state.group->target) != targets.end();
  });
  const auto until = SteadyClock::now() + options_.connect.timeout + kGrace;
  for (auto state = gone; state != states_.end(); ++state)
    retired_.push_back({state->group, until});
  states_.erase(gone, states_.end());
  for (const std::string& target : targets) {
    const bool known = std::any_of(states_.begin(), states_.end(), [&](const State& state) {
      return state.group->target == target;
    });
    if (known) continue;
    State state;
    state.group = MakeGroup(target);
    if (state.group != nullptr) states_.push_back(std::move(state));
  }
}

void GroupTable::ResolveAgain() {
  if (targets_.name.empty()) return;
  const absl::StatusOr<std::vector<std::string>> found =
      options_.resolve(targets_.name, targets_.port);
  const MutexLock lock(mutex_);
  why_unresolved_ = found.ok() ? "" : std::string(found.status().message());
  if (found.ok()) AdoptTargets(*found);
}

GroupTable::Round GroupTable::Ask() {
  Round round;
  {
    const MutexLock lock(mutex_);
    if (stopping_) return round;
    for (const State& state : states_) {
      round.push_back(std::make_unique<Probe>());
      round.back()->group = state.group;
    }
  }
  const auto deadline = SystemClock::now() + options_.answer_within;
  const auto begin = [&] {
    auto call = std::make_shared<grpc::ClientContext>();
    call->set_deadline(deadline);
    questions_.Begin(call);
    return call;
  };
  for (const std::unique_ptr<Probe>& held : round) {
    Probe* probe = held.get();  // until its calls have ended
    auto call = begin();
    probe->group->stub->async()->GetLimits(call.get(), &probe->limits_request, &probe->limits,
                                           [this, call, probe](grpc::Status status) {
                                             probe->limits_status = std::move(status);
                                             questions_.End(call);
                                           });
    call = begin();
    probe->group->stub->async()->GetTopology(call.get(), &probe->topology_request, &probe->topology,
                                             [this, call, probe](grpc::Status status) {
                                               probe->topology_status = std::move(status);
                                               questions_.End(call);
                                             });
  }
  questions_.Wait();
  return round;
}

void GroupTable::TakeAnswers(const Round& round) {
  const MutexLock lock(mutex_);
  for (const std::unique_ptr<Probe>& probe : round) {
    State* state = Find(*probe->group);
    if (state == nullptr) continue;
    const grpc::Status& status =
        probe->limits_status.ok() ? probe->topology_status : probe->limits_status;
    state->answers = status.ok();
    if (!status.ok()) {
      state->why = status.error_code() == grpc::StatusCode::UNAVAILABLE
                       ? ExplainConnectionFailure(state->group->target, options_.connect.security,
                                                  status.error_message())
                       : StatusText(FromGrpcStatus(status));
      continue;
    }
    const uint64_t id = probe->limits.group_id();
    const uint32_t tag = TagOfGroup(id);
    if (state->id != 0 && state->id != id) by_tag_.erase(TagOfGroup(state->id));
    GroupPtr& of_tag = by_tag_[tag];
    State* other = of_tag == nullptr || of_tag == state->group ? nullptr : Find(*of_tag);
    if (id == 0 || (other != nullptr && other->answers)) {
      // Two addresses of one group serve as one. Two groups with one tag cannot be told apart.
      if (of_tag == nullptr) by_tag_.erase(tag);
      state->answers = false;
      state->why = id == 0           ? "its version is too old to be one of several groups"
                   : other->id == id ? absl::StrCat("is the group at ", other->group->target)
                                     : absl::StrCat("has the tag of ", other->group->target,
                                                    "; start one of them with another state");
      continue;
    }
    of_tag = state->group;
    state->id = id;
    state->group->tag.store(tag, std::memory_order_relaxed);
    state->caches = LoadsOf(probe->topology);
  }
  ++rounds_;
  changed_.NotifyAll();
}

void GroupTable::CreateMissing() {
  struct Missing {
    std::string target;
    v1::CreateCacheRequest request;
    v1::CreateCacheReply reply;
  };
  std::vector<std::pair<GroupPtr, std::shared_ptr<Missing>>> all;
  {
    const MutexLock lock(mutex_);
    if (stopping_) return;
    for (State& state : states_) {
      if (!state.answers) continue;
      for (const auto& [cache_id, spec] : remembered_) {
        if (state.caches.count(cache_id) > 0 || !state.creating.insert(cache_id).second) continue;
        auto missing = std::make_shared<Missing>();
        missing->target = state.group->target;
        missing->request.set_cache_id(cache_id);
        *missing->request.mutable_spec() = spec;
        all.emplace_back(state.group, std::move(missing));
      }
    }
  }
  for (const auto& [group, missing] : all) {
    const auto call = std::make_shared<grpc::ClientContext>();
    call->set_deadline(SystemClock::now() + options_.connect.timeout);
    creations_.Begin(call);
    group->stub->async()->CreateCache(call.get(), &missing->request, &missing->reply,
                                      [this, call, missing = missing](grpc::Status) {
                                        // What it came to is seen when the group is asked the next
                                        // time.
                                        {
                                          const MutexLock lock(mutex_);
                                          for (State& state : states_) {
                                            if (state.group->target != missing->target) continue;
                                            state.creating.erase(missing->request.cache_id());
                                          }
                                        }
                                        creations_.End(call);
                                      });
  }
}

// A client is destroyed here, where no call of it is in progress, and not in a callback of its own.
void GroupTable::DropRetired() {
  std::vector<GroupPtr> dropped;  // without the lock
  const MutexLock lock(mutex_);
  const auto now = SteadyClock::now();
  const auto due = std::stable_partition(retired_.begin(), retired_.end(), [&](const Retired& old) {
    return now < old.until || old.group.use_count() > 1;
  });
  for (auto old = due; old != retired_.end(); ++old) dropped.push_back(std::move(old->group));
  retired_.erase(due, retired_.end());
}

void GroupTable::Run() {
  for (;;) {
    ResolveAgain();
    DropRetired();
    TakeAnswers(Ask());
    CreateMissing();
    const MutexLock lock(mutex_);
    const bool some = std::any_of(states_.begin(), states_.end(),
                                  [](const State& state) { return state.answers; });
    const auto next =
        SteadyClock::now() + (some ? options_.ask_every : std::min(options_.ask_every, kSoon));
    while (!stopping_ && SteadyClock::now() < next) changed_.WaitUntil(mutex_, next);
    if (stopping_) return;
  }
}

}  // namespace tributary::client
