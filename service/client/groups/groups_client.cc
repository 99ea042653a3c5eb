#include "service/client/groups/groups_client.h"

#include <algorithm>
#include <chrono>
#include <functional>
#include <future>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status/errors.h"
#include "base/status/grpc_status.h"
#include "base/status/rpc_errors.h"
#include "base/sync/mutex.h"
#include "service/client/attend_message.h"
#include "service/client/groups/attends_in_flight.h"
#include "service/client/groups/split_call.h"
#include "service/client/lease.h"
#include "service/client/retry.h"

namespace tributary::client {
namespace {

using GroupPtr = GroupTable::GroupPtr;

// How often an id is drawn anew because a sequence has it already.
constexpr int kDraws = 3;

// Memory that every group which reaches it has been given.
class SharedWithGroups final : public DeviceRegion {
 public:
  explicit SharedWithGroups(std::map<std::string, std::shared_ptr<const DeviceRegion>> regions)
      : regions_(std::move(regions)) {}

  const std::string& name() const override { return regions_.begin()->second->name(); }
  const DeviceMemory& memory() const override { return regions_.begin()->second->memory(); }
  // By the group's target.
  const std::map<std::string, std::shared_ptr<const DeviceRegion>>& regions() const {
    return regions_;
  }

 private:
  const std::map<std::string, std::shared_ptr<const DeviceRegion>> regions_;
};

// The region as the group knows it; FAILED_PRECONDITION when the group does not.
absl::StatusOr<std::shared_ptr<const DeviceRegion>> RegionFor(
    const GroupTable::Group& group, const std::shared_ptr<const DeviceRegion>& region) {
  if (region == nullptr) return region;
  const auto* shared = dynamic_cast<const SharedWithGroups*>(region.get());
  if (shared != nullptr) {
    const auto found = shared->regions().find(group.target);
    if (found != shared->regions().end()) return found->second;
  }
  return FieldError(absl::StatusCode::kFailedPrecondition, "device",
                    absl::StrCat("the group at ", group.target, " does not share this memory"));
}

// An AttendCall in several groups. Ends when its last part does.
class SplitAttend {
 public:
  SplitAttend(AttendCall call, std::vector<std::unique_ptr<AttendPart>> parts,
              std::function<void(absl::Status)> done)
      : call_(std::move(call)),
        parts_(std::move(parts)),
        results_(parts_.size()),
        left_(parts_.size()),
        done_(std::move(done)) {}

  const std::vector<std::unique_ptr<AttendPart>>& parts() const { return parts_; }

  void EndPart(size_t index, const absl::Status& status) {
    if (status.ok()) parts_[index]->GiveResults(call_);
    {
      const MutexLock lock(mutex_);
      results_[index] = parts_[index]->Renamed(status);
      if (--left_ > 0) return;
    }
    done_(FirstError());
  }

 private:
  absl::Status FirstError() const {
    const MutexLock lock(mutex_);
    for (const absl::Status& result : results_) {
      if (!result.ok()) return result;
    }
    return absl::OkStatus();
  }

  const AttendCall call_;
  const std::vector<std::unique_ptr<AttendPart>> parts_;
  mutable Mutex mutex_;
  std::vector<absl::Status> results_ TRIBUTARY_GUARDED_BY(mutex_);
  size_t left_ TRIBUTARY_GUARDED_BY(mutex_);
  const std::function<void(absl::Status)> done_;
};

void AddCache(const v1::CacheInfo& from, v1::CacheInfo* to) {
  to->set_pages_total(to->pages_total() + from.pages_total());
  to->set_pages_used(to->pages_used() + from.pages_used());
  to->set_pages_shared(to->pages_shared() + from.pages_shared());
  to->set_sequences(to->sequences() + from.sequences());
  to->set_sequences_lost(to->sequences_lost() + from.sequences_lost());
  to->set_pages_given_up(to->pages_given_up() + from.pages_given_up());
  to->set_window_pages_total(to->window_pages_total() + from.window_pages_total());
  to->set_window_pages_used(to->window_pages_used() + from.window_pages_used());
  if (to->not_held_because().empty()) to->set_not_held_because(from.not_held_because());
  to->mutable_sequence()->MergeFrom(from.sequence());
}

void AddStatistics(const v1::Statistics& from, v1::Statistics* to) {
  to->set_uptime_seconds(std::max(to->uptime_seconds(), from.uptime_seconds()));
  to->set_steps(to->steps() + from.steps());
  to->set_requests(to->requests() + from.requests());
  to->set_requests_failed(to->requests_failed() + from.requests_failed());
  to->set_query_rows(to->query_rows() + from.query_rows());
  to->set_tokens_appended(to->tokens_appended() + from.tokens_appended());
}

void AddTopology(const v1::GetTopologyReply& from, v1::GetTopologyReply* to) {
  if (from.state() == v1::GROUP_STATE_READY || to->state() == v1::GROUP_STATE_UNSPECIFIED) {
    to->set_state(from.state());
  }
  to->mutable_workers()->MergeFrom(from.workers());
  for (const v1::CacheInfo& cache : from.caches()) {
    auto* caches = to->mutable_caches();
    const auto same = std::find_if(caches->begin(), caches->end(), [&](const v1::CacheInfo& known) {
      return known.cache_id() == cache.cache_id();
    });
    if (same == caches->end()) {
      *to->add_caches() = cache;
    } else {
      AddCache(cache, &*same);
    }
  }
  AddStatistics(from.statistics(), to->mutable_statistics());
  if (to->version().empty()) to->set_version(from.version());
}

class GroupsClient final : public Client {
 public:
  GroupsClient(std::shared_ptr<GroupTable> table, std::shared_ptr<AttendsInFlight> calls,
               std::chrono::milliseconds timeout)
      : table_(std::move(table)), calls_(std::move(calls)), timeout_(timeout) {}

  std::unique_ptr<Client> WithTimeout(std::chrono::milliseconds timeout) override {
    return std::make_unique<GroupsClient>(table_, calls_, timeout);
  }

  absl::StatusOr<v1::CreateCacheReply> CreateCache(const std::string& cache_id,
                                                   const v1::CacheSpec& spec) override {
    absl::StatusOr<v1::CreateCacheReply> reply = absl::UnavailableError("no group answers");
    for (const GroupPtr& group : table_->Answering()) {
      reply = In(*group)->CreateCache(cache_id, spec);
      if (!reply.ok()) return reply;
    }
    if (reply.ok()) table_->Remember(cache_id, spec);
    return reply;
  }

  absl::Status DeleteCache(const std::string& cache_id) override {
    table_->Forget(cache_id);
    return InAll([&](Client& client) { return client.DeleteCache(cache_id); },
                 absl::StatusCode::kNotFound);
  }

  absl::StatusOr<uint64_t> OpenSequence(const std::string& cache_id) override {
    const std::vector<GroupPtr> order = table_->PlacementFor(cache_id);
    if (order.empty()) return absl::UnavailableError("no group answers");
    absl::StatusOr<uint64_t> opened;
    for (const GroupPtr& group : order) {
      opened = OpenOnce(*group, cache_id);
      // Another group may have room, or answer.
      if (!absl::IsResourceExhausted(opened.status()) && !IsTransient(opened.status())) break;
    }
    // None can now. Wait as long as a client of one group would.
    if (IsTransient(opened.status())) opened = In(*order.front())->OpenSequence(cache_id);
    return opened;
  }

  absl::Status ReopenSequence(const std::string& cache_id, uint64_t sequence_id) override {
    const absl::StatusOr<GroupPtr> group = table_->Of(sequence_id, "sequence_id");
    if (!group.ok()) return group.status();
    return In(**group)->ReopenSequence(cache_id, sequence_id);
  }

  absl::StatusOr<uint64_t> ForkSequence(const std::string& cache_id, uint64_t parent_id,
                                        std::optional<int64_t> length) override {
    const absl::StatusOr<GroupPtr> group = table_->Of(parent_id, "parent_id");
    if (!group.ok()) return group.status();
    return In(**group)->ForkSequence(cache_id, parent_id, length);
  }

  absl::StatusOr<int64_t> TruncateSequence(const std::string& cache_id, uint64_t sequence_id,
                                           int64_t length) override {
    const absl::StatusOr<GroupPtr> group = table_->Of(sequence_id, "sequence_id");
    if (!group.ok()) return group.status();
    return In(**group)->TruncateSequence(cache_id, sequence_id, length);
  }

  absl::Status CloseSequence(const std::string& cache_id, uint64_t sequence_id) override {
    const absl::StatusOr<GroupPtr> group = table_->Of(sequence_id, "sequence_id");
    if (!group.ok()) return group.status();
    return In(**group)->CloseSequence(cache_id, sequence_id);
  }

  // All updates are made or none, so all sequences must be of one group.
  absl::StatusOr<std::vector<uint64_t>> UpdateSequences(
      const std::string& cache_id, const std::vector<SequenceUpdate>& updates) override {
    GroupPtr all;
    for (size_t i = 0; i < updates.size(); ++i) {
      const SequenceUpdate& update = updates[i];
      const bool forks = update.kind == SequenceUpdate::Kind::kFork;
      const uint64_t id = forks ? update.parent_id : update.sequence_id;
      if (id == 0) continue;  // it opens one anywhere
      const std::string field = absl::StrCat("updates[", i, "]");
      const absl::StatusOr<GroupPtr> group = table_->Of(id, field);
      if (!group.ok()) return group.status();
      if (all == nullptr) all = *group;
      if (all != *group) return InvalidField(field, "is of another group than those before it");
    }
    if (all == nullptr) {
      const std::vector<GroupPtr> order = table_->PlacementFor(cache_id);
      if (order.empty()) return absl::UnavailableError("no group answers");
      all = order.front();
    }
    return In(*all)->UpdateSequences(cache_id, updates);
  }

  absl::StatusOr<std::shared_ptr<SharedBuffer>> AllocateShared(uint64_t) override {
    return absl::FailedPreconditionError(
        "memory is shared with one service: connect to the group that is to use it");
  }

  absl::Status Append(const AppendCall& call) override {
    if (absl::Status status = CheckCall(call); !status.ok()) return status;
    std::vector<GroupPtr> groups;
    const absl::StatusOr<std::vector<size_t>> where = GroupsOf(call.entries, &groups);
    if (!where.ok()) return where.status();
    const auto append = [&](const AppendCall& part, size_t group) {
      const auto region = RegionFor(*groups[group], part.device);
      if (!region.ok()) return region.status();
      AppendCall own = part;
      own.device = *region;
      return In(*groups[group])->Append(own);
    };
    if (groups.size() == 1) return append(call, 0);
    const std::vector<std::unique_ptr<AppendPart>> parts = Split(call, *where);
    std::vector<std::future<absl::Status>> results;
    for (const auto& part : parts) {
      results.push_back(std::async(std::launch::async, [&append, raw = part.get()] {
        return raw->Renamed(append(raw->call(), raw->group()));
      }));
    }
    absl::Status first;
    for (auto& result : results) first.Update(result.get());
    return first;
  }

  absl::Status Attend(const AttendCall& call) override {
    std::promise<absl::Status> done;
    std::future<absl::Status> result = done.get_future();
    AttendAsync(call, [&done](absl::Status status) { done.set_value(std::move(status)); });
    return result.get();
  }

  uint64_t AttendAsync(const AttendCall& call, std::function<void(absl::Status)> done) override {
    const auto refuse = [&done](absl::Status why) {
      done(std::move(why));
      return uint64_t{0};
    };
    if (absl::Status status = CheckCall(call); !status.ok()) return refuse(std::move(status));
    std::vector<GroupPtr> groups;
    const absl::StatusOr<std::vector<size_t>> where = GroupsOf(call.entries, &groups);
    if (!where.ok()) return refuse(where.status());
    std::vector<std::unique_ptr<AttendPart>> parts;
    if (groups.size() > 1) {
      absl::StatusOr<std::vector<std::unique_ptr<AttendPart>>> split = Split(call, *where);
      if (!split.ok()) return refuse(split.status());
      parts = *std::move(split);
    }
    const uint64_t id = calls_->Begin();
    auto over = [calls = calls_, id, done = std::move(done)](absl::Status status) {
      calls->End(id);
      done(std::move(status));
    };
    if (groups.size() == 1) {
      AttendIn(groups[0], call, id, std::move(over));
      return id;
    }
    const auto split = std::make_shared<SplitAttend>(call, std::move(parts), std::move(over));
    for (size_t i = 0; i < split->parts().size(); ++i) {
      const AttendPart& part = *split->parts()[i];
      AttendIn(groups[part.group()], part.call(), id,
               [split, i](const absl::Status& status) { split->EndPart(i, status); });
    }
    return id;
  }

  void Cancel(uint64_t call) override { calls_->Cancel(call); }

  absl::StatusOr<std::shared_ptr<const DeviceRegion>> ShareDeviceMemory(
      const DeviceMemory& memory) override {
    std::map<std::string, std::shared_ptr<const DeviceRegion>> regions;
    absl::Status refused = absl::UnavailableError("no group answers");
    for (const GroupPtr& group : table_->Answering()) {
      auto region = In(*group)->ShareDeviceMemory(memory);
      if (region.ok()) {
        regions[group->target] = *std::move(region);
      } else {
        refused = region.status();
      }
    }
    if (regions.empty()) return refused;
    return std::make_shared<SharedWithGroups>(std::move(regions));
  }

  absl::Status UnshareDeviceMemory(const DeviceRegion& region) override {
    const auto* shared = dynamic_cast<const SharedWithGroups*>(&region);
    if (shared == nullptr) return InvalidField("region", "is not of this client");
    absl::Status first;
    for (const GroupPtr& group : table_->Answering()) {
      const auto own = shared->regions().find(group->target);
      if (own == shared->regions().end()) continue;
      first.Update(In(*group)->UnshareDeviceMemory(*own->second));
    }
    return first;
  }

  absl::StatusOr<v1::GetTopologyReply> GetTopology(const v1::GetTopologyRequest& request) override {
    v1::GetTopologyReply sum;
    bool any = false;
    absl::Status last = absl::UnavailableError("no group answers");
    for (const GroupPtr& group : table_->Answering()) {
      const absl::StatusOr<v1::GetTopologyReply> reply = In(*group)->GetTopology(request);
      if (reply.ok()) AddTopology(*reply, &sum);
      any = any || reply.ok();
      last = reply.status();
    }
    if (!any) return last;
    return sum;
  }

  absl::StatusOr<std::vector<v1::LeasedSequence>> LeasedSequences() override {
    std::vector<v1::LeasedSequence> all;
    for (const GroupPtr& group : table_->Answering()) {
      const auto some = In(*group)->LeasedSequences();
      if (!some.ok()) return some;
      all.insert(all.end(), some->begin(), some->end());
    }
    return all;
  }

  absl::StatusOr<v1::GetLimitsReply> GetLimits() override {
    const std::vector<GroupPtr> groups = table_->Answering();
    if (groups.empty()) return absl::UnavailableError("no group answers");
    return In(*groups.front())->GetLimits();
  }

  absl::StatusOr<std::string> TargetOf(uint64_t sequence_id) const override {
    const absl::StatusOr<GroupPtr> group = table_->Of(sequence_id, "sequence_id");
    if (!group.ok()) return group.status();
    return (*group)->target;
  }

 private:
  // The group's client, with this one's timeout. It may be gone before its calls have ended.
  std::unique_ptr<Client> In(const GroupTable::Group& group) const {
    return group.client->WithTimeout(timeout_);
  }

  // Without repeats: another group is sooner there than one that forms anew.
  absl::StatusOr<uint64_t> OpenOnce(const GroupTable::Group& group, const std::string& cache_id) {
    v1::OpenSequenceRequest request;
    request.set_cache_id(cache_id);
    absl::Status status;
    for (int draw = 0; draw < kDraws; ++draw) {
      request.set_sequence_id(group.NewSequenceId());
      grpc::ClientContext context;
      context.set_deadline(std::chrono::system_clock::now() + timeout_);
      PresentLease(group.lease, &context);
      v1::OpenSequenceReply reply;
      status = FromGrpcStatus(group.stub->OpenSequence(&context, request, &reply));
      if (status.ok()) {
        table_->Placed(group, cache_id);
        return reply.sequence_id();
      }
      if (!absl::IsAlreadyExists(status)) break;
    }
    return status;
  }

  // For each entry, which of `groups` its sequence lives in.
  template <typename Entries>
  absl::StatusOr<std::vector<size_t>> GroupsOf(const Entries& entries,
                                               std::vector<GroupPtr>* groups) const {
    std::vector<size_t> where;
    for (size_t i = 0; i < entries.size(); ++i) {
      absl::StatusOr<GroupPtr> group =
          table_->Of(entries[i].sequence_id, EntryField(static_cast<int>(i), "sequence_id"));
      if (!group.ok()) return group.status();
      const auto known = std::find(groups->begin(), groups->end(), *group);
      where.push_back(static_cast<size_t>(known - groups->begin()));
      if (known == groups->end()) groups->push_back(*std::move(group));
    }
    return where;
  }

  // Sends a call or a part of one. `id` is the whole call's number.
  void AttendIn(const GroupPtr& group, const AttendCall& call, uint64_t id,
                std::function<void(absl::Status)> done) const {
    const auto region = RegionFor(*group, call.device);
    if (!region.ok()) return done(region.status());
    AttendCall own = call;
    own.device = *region;
    calls_->Sent(id, {group, In(*group)->AttendAsync(own, std::move(done))});
  }

  // The first error; `nothing` is none unless every group says so.
  absl::Status InAll(const std::function<absl::Status(Client&)>& call, absl::StatusCode nothing) {
    absl::Status first, none = absl::UnavailableError("no group answers");
    bool done = false;
    for (const GroupPtr& group : table_->Answering()) {
      const absl::Status status = call(*In(*group));
      if (status.code() == nothing) {
        none = status;
        continue;
      }
      done = done || status.ok();
      first.Update(status);
    }
    if (!first.ok() || done) return first;
    return none;
  }

  const std::shared_ptr<GroupTable> table_;
  const std::shared_ptr<AttendsInFlight> calls_;
  const std::chrono::milliseconds timeout_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<Client>> ConnectToGroups(const GroupTableOptions& options) {
  absl::StatusOr<std::unique_ptr<GroupTable>> table = GroupTable::Create(options);
  if (!table.ok()) return table.status();
  if (absl::Status status = (*table)->Start(); !status.ok()) return status;
  return std::make_unique<GroupsClient>(*std::move(table), std::make_shared<AttendsInFlight>(),
                                        options.connect.timeout);
}

}  // namespace tributary::client
