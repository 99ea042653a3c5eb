#include "service/coordinator/sequence_calls.h"

#include <memory>
#include <set>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "base/status/errors.h"
#include "base/status/rpc_errors.h"
#include "service/coordinator/operation.h"
#include "service/schedule/sequence_updates.h"

namespace tributary::service {
namespace {

// Fills a reply whose only field is the sequence's id.
template <typename Reply>
Reply SequenceReply(worker::SequenceId id) {
  Reply reply;
  reply.set_sequence_id(id);
  return reply;
}

absl::StatusOr<SequenceUpdate> ReadUpdate(const v1::SequenceUpdate& update, int index) {
  const auto refuse = [index](absl::string_view field, int64_t length) {
    return InvalidField(absl::StrCat("updates[", index, "].", field),
                        absl::StrCat("must be >= 0, is ", length));
  };
  switch (update.update_case()) {
    case v1::SequenceUpdate::kOpen:
      return SequenceUpdate{.kind = SequenceUpdate::Kind::kOpen, .sequence = update.open()};
    case v1::SequenceUpdate::kFork: {
      const v1::SequenceFork& fork = update.fork();
      if (fork.has_length() && fork.length() < 0) return refuse("fork.length", fork.length());
      return SequenceUpdate{.kind = SequenceUpdate::Kind::kFork,
                            .sequence = fork.sequence_id(),
                            .parent = fork.parent_id(),
                            .length = fork.has_length() ? fork.length() : -1};
    }
    case v1::SequenceUpdate::kTruncate: {
      const v1::SequenceTruncate& cut = update.truncate();
      if (cut.length() < 0) return refuse("truncate.length", cut.length());
      return SequenceUpdate{.kind = SequenceUpdate::Kind::kTruncate,
                            .sequence = cut.sequence_id(),
                            .length = cut.length()};
    }
    case v1::SequenceUpdate::kClose:
      return SequenceUpdate{.kind = SequenceUpdate::Kind::kClose, .sequence = update.close()};
    case v1::SequenceUpdate::UPDATE_NOT_SET:
      break;
  }
  return InvalidField(absl::StrCat("updates[", index, "]"), "has no update");
}

// Those that updates name, each once: the call waits for all of them.
std::vector<worker::SequenceId> SequencesOf(const std::vector<SequenceUpdate>& updates) {
  std::set<worker::SequenceId> all;
  for (const SequenceUpdate& update : updates) {
    all.insert(update.sequence);
    if (update.kind == SequenceUpdate::Kind::kFork) all.insert(update.parent);
  }
  all.erase(0);
  return {all.begin(), all.end()};
}

}  // namespace

// A call that takes effect all at once when its sequences are free.
class SequenceCalls::SequenceOperation final
    : public Operation,
      public std::enable_shared_from_this<SequenceOperation> {
 public:
  SequenceOperation(CoordinatorLock& lock, CallOrder& order, Apply apply,
                    std::function<void(absl::Status)> fail)
      : lock_(lock), order_(order), apply_(std::move(apply)), fail_(std::move(fail)) {}

  void OnTurn() override TRIBUTARY_LOCKED {
    if (Cancelled(call)) {
      return order_.Fail(*this, absl::CancelledError("cancelled before it took effect"));
    }
    order_.StopWaiting(*this);
    apply_(cache);
    order_.Leave(this);
  }

  void OnFailed(const absl::Status& status) override TRIBUTARY_LOCKED {
    lock_.Answer([self = shared_from_this(), status] { self->fail_(status); });
  }

 private:
  CoordinatorLock& lock_;
  CallOrder& order_;
  const Apply apply_;
  const std::function<void(absl::Status)> fail_;
};

SequenceCalls::SequenceCalls(const CoordinatorOptions& options, const telemetry::Logger& log,
                             CoordinatorLock& lock, const CacheRegistry& caches,
                             GroupCommands& commands, CallOrder& order, OnRefused on_refused)
    : options_(options),
      log_(log),
      lock_(lock),
      caches_(caches),
      commands_(commands),
      order_(order),
      clients_(&options.client_limits, std::move(on_refused)) {}

void SequenceCalls::Enter(const std::string& cache_name, const CallContext& call,
                          std::vector<worker::SequenceId> sequences, Apply apply,
                          std::function<void(absl::Status)> fail) {
  const CriticalSection section(lock_);
  lock_.AcceptCall();
  absl::StatusOr<CachePtr> cache = caches_.Find(cache_name);
  if (!cache.ok()) {
    return lock_.Answer([fail, status = cache.status()] { fail(status); });
  }
  const auto operation =
      std::make_shared<SequenceOperation>(lock_, order_, std::move(apply), std::move(fail));
  operation->sequences.assign(sequences.begin(), sequences.end());
  operation->cache = *std::move(cache);
  operation->call = call;
  order_.Enter(operation);
}

void SequenceCalls::Open(const v1::OpenSequenceRequest& request, const CallContext& call,
                         Done<v1::OpenSequenceReply> done) {
  const worker::SequenceId id = request.sequence_id();
  std::vector<worker::SequenceId> order;
  if (id != 0) order.push_back(id);
  const auto apply = [this, id, call, done](const CachePtr& cache) TRIBUTARY_LOCKED {
    bool reopened = false;
    const absl::StatusOr<worker::SequenceId> opened =
        cache->table.Open(id, &reopened, clients_.Of(call.caller));
    if (!opened.ok()) return lock_.Answer([done, opened] { done(opened.status()); });
    DropLease(cache, *opened);  // of an earlier host
    AnswerWhenKept(SetLease(cache, {*opened}, call),
                   [done, opened] { done(SequenceReply<v1::OpenSequenceReply>(*opened)); });
  };
  Enter(request.cache_id(), call, std::move(order), apply, done);
}

void SequenceCalls::Fork(const v1::ForkSequenceRequest& request, const CallContext& call,
                         Done<v1::ForkSequenceReply> done) {
  const int64_t length = request.has_length() ? request.length() : -1;
  if (request.has_length() && length < 0) {
    return done(InvalidField("length", absl::StrCat("must be >= 0, is ", length)));
  }
  std::vector<worker::SequenceId> order = {request.parent_id()};
  if (request.sequence_id() != 0 && request.sequence_id() != request.parent_id()) {
    order.push_back(request.sequence_id());
  }
  const auto apply = [this, request, length, call, done](const CachePtr& cache) TRIBUTARY_LOCKED {
    const absl::StatusOr<Sequence*> forked = cache->table.Fork(
        request.parent_id(), request.sequence_id(), length, clients_.Of(call.caller));
    if (!forked.ok()) {
      return lock_.Answer([done, status = forked.status()] { done(status); });
    }
    const Sequence& child = **forked;
    TellFork(cache, child);
    v1::ForkSequenceReply reply = SequenceReply<v1::ForkSequenceReply>(child.id);
    reply.set_length(child.fork_length);
    AnswerWhenSafe(
        cache, [done, reply] { done(reply); }, SetLease(cache, {child.id}, call));
  };
  Enter(request.cache_id(), call, std::move(order), apply, done);
}

// If the group breaks before the command arrives, the next group is told all tables.
void SequenceCalls::TellFork(const CachePtr& cache, const Sequence& child) {
  commands_.SendToLayerGroups(
      *cache,
      [&cache, &child](int32_t group) TRIBUTARY_LOCKED {
        cache->table.TakeLengths(group, child.id);
        return worker::SetTablesCommand{
            {{child.id, 0, SequenceTable::ToldPages(child.groups[group])}},
            {cache->table.StandingOf(group, child, true)}};
      },
      [this, cache, id = child.id](const absl::Status& status) {
        if (FromOutcome(status, options_.retry_delay).code() == absl::StatusCode::kAborted) return;
        if (status.ok()) return;
        log_.Error("workers refused a fork's table", {{"error", status.message()}});
        const CriticalSection section(lock_);
        if (Sequence* s = cache->table.Find(id)) cache->table.MarkLost(s);
      });
}

void SequenceCalls::Truncate(const v1::TruncateSequenceRequest& request, const CallContext& call,
                             Done<v1::TruncateSequenceReply> done) {
  if (request.length() < 0) {
    return done(InvalidField("length", absl::StrCat("must be >= 0, is ", request.length())));
  }
  const auto apply = [this, request, done](const CachePtr& cache) TRIBUTARY_LOCKED {
    const absl::StatusOr<int64_t> held =
        cache->table.Truncate(request.sequence_id(), request.length());
    if (!held.ok()) return lock_.Answer([done, held] { done(held.status()); });
    AnswerWhenSafe(cache, [done, held] {
      v1::TruncateSequenceReply reply;
      reply.set_length(*held);
      done(reply);
    });
  };
  Enter(request.cache_id(), call, {request.sequence_id()}, apply, done);
}

void SequenceCalls::Close(const v1::CloseSequenceRequest& request, const CallContext& call,
                          Done<v1::CloseSequenceReply> done) {
  const worker::SequenceId id = request.sequence_id();
  const auto apply = [this, id, done](const CachePtr& cache) TRIBUTARY_LOCKED {
    const absl::Status closed = CloseNow(cache, id);
    if (!closed.ok()) return lock_.Answer([done, closed] { done(closed); });
    AnswerWhenSafe(cache, [done] { done(v1::CloseSequenceReply()); });
  };
  Enter(request.cache_id(), call, {id}, apply, done);
}

absl::Status SequenceCalls::CloseNow(const CachePtr& cache, worker::SequenceId id) {
  DropLease(cache, id);
  absl::Status closed = cache->table.Close(id);
  if (closed.ok()) TellClosed(cache, id);
  return closed;
}

void SequenceCalls::CloseLeased(const std::string& cache_name, worker::SequenceId id,
                                const LeasePtr& lease) {
  const auto apply = [this, id, lease](const CachePtr& cache) TRIBUTARY_LOCKED {
    const Sequence* sequence = cache->table.Find(id);
    if (sequence != nullptr && sequence->lease == lease && CloseNow(cache, id).ok()) {
      ++closed_by_leases_;
    }
    lock_.Answer([] {});
  };
  // What fails is found, and closed, the next time.
  Enter(cache_name, CallContext(), {id}, apply, [](const absl::Status&) {});
}

void SequenceCalls::Update(const v1::UpdateSequencesRequest& request, const CallContext& call,
                           Done<v1::UpdateSequencesReply> done) {
  if (request.updates().empty()) return done(InvalidField("updates", "must not be empty"));
  std::vector<SequenceUpdate> updates;
  for (int i = 0; i < request.updates_size(); ++i) {
    absl::StatusOr<SequenceUpdate> update = ReadUpdate(request.updates(i), i);
    if (!update.ok()) return done(update.status());
    updates.push_back(*std::move(update));
  }
  std::vector<worker::SequenceId> order = SequencesOf(updates);
  const auto apply = [this, updates = std::move(updates), call,
                      done](const CachePtr& cache) TRIBUTARY_LOCKED {
    std::vector<worker::SequenceId> leased;
    for (const SequenceUpdate& update : updates) {
      const Sequence* sequence = cache->table.Find(update.sequence);
      if (sequence != nullptr && sequence->lease != nullptr) leased.push_back(sequence->id);
    }
    const absl::StatusOr<UpdatedSequences> updated =
        ApplyUpdates(updates, clients_.Of(call.caller), &cache->table);
    if (!updated.ok()) {
      return lock_.Answer([done, status = updated.status()] { done(status); });
    }
    std::vector<worker::SequenceId> made;
    for (size_t i = 0; i < updates.size(); ++i) {
      const bool is_new = updates[i].kind == SequenceUpdate::Kind::kOpen ||
                          updates[i].kind == SequenceUpdate::Kind::kFork;
      if (is_new) made.push_back(updated->states[i].sequence);
    }
    const std::vector<JournaledLease> leases = SetLease(cache, made, call);
    for (const worker::SequenceId id : leased) {
      const Sequence* sequence = cache->table.Find(id);
      if (sequence == nullptr || sequence->lease == nullptr) ForgetLease(cache, id);
    }
    for (const worker::SequenceId id : updated->closed) TellClosed(cache, id);
    for (const worker::SequenceId id : updated->forked) {
      if (const Sequence* forked = cache->table.Find(id)) TellFork(cache, *forked);
    }
    v1::UpdateSequencesReply reply;
    for (const UpdatedSequences::State& state : updated->states) {
      v1::SequenceState* out = reply.add_states();
      out->set_sequence_id(state.sequence);
      out->set_length(state.length);
    }
    AnswerWhenSafe(
        cache, [done, reply] { done(reply); }, leases);
  };
  Enter(request.cache_id(), call, std::move(order), apply, done);
}

// ----------------------------------------------------------------------------------------- leases

std::vector<JournaledLease> SequenceCalls::SetLease(const CachePtr& cache,
                                                    const std::vector<worker::SequenceId>& made,
                                                    const CallContext& call) {
  std::vector<JournaledLease> leases;
  for (const worker::SequenceId id : made) {
    Sequence* sequence = cache->table.Find(id);
    if (sequence == nullptr) continue;  // closed by the same call
    if (call.lease != nullptr) sequence->lease = call.lease->lease();
    if (sequence->lease == nullptr || options_.journal == nullptr) continue;
    leases.push_back({.cache = cache->name, .sequence = id, .lease = sequence->lease->name()});
  }
  return leases;
}

void SequenceCalls::GiveLease(const CachePtr& cache, const std::vector<worker::SequenceId>& made,
                              const CallContext& call) {
  const std::vector<JournaledLease> leases = SetLease(cache, made, call);
  if (!leases.empty()) options_.journal->PutLeases(leases, nullptr);
}

void SequenceCalls::DropLease(const CachePtr& cache, worker::SequenceId id) {
  Sequence* sequence = cache->table.Find(id);
  if (sequence == nullptr || std::exchange(sequence->lease, nullptr) == nullptr) return;
  ForgetLease(cache, id);
}

void SequenceCalls::ForgetLease(const CachePtr& cache, worker::SequenceId id) {
  if (options_.journal != nullptr) options_.journal->DropLease(cache->name, id);
}

void SequenceCalls::AnswerWhenKept(const std::vector<JournaledLease>& leases,
                                   std::function<void()> answer) {
  if (leases.empty()) return lock_.Answer(std::move(answer));
  // If the journal cannot write it, the log says so, and it is tried again: after a restart before
  // then the sequence has no lease.
  options_.journal->PutLeases(leases, [this, answer = std::move(answer)](const absl::Status&) {
    const CriticalSection section(lock_);
    lock_.Answer(answer);
  });
}

// Workers that were told keep the change for a coordinator that restarts. If the group breaks
// first, this coordinator lives, and tells the next group.
void SequenceCalls::AnswerWhenSafe(const CachePtr& cache, std::function<void()> answer,
                                   const std::vector<JournaledLease>& leases) {
  if (options_.journal == nullptr) return lock_.Answer(std::move(answer));
  commands_.SendToLayerGroups(
      *cache,
      [&cache](int32_t group) TRIBUTARY_LOCKED {
        return worker::SetTablesCommand{{}, cache->table.TakeStandings(group)};
      },
      [this, leases, answer = std::move(answer)](const absl::Status&) {
        const CriticalSection section(lock_);
        AnswerWhenKept(leases, answer);
      });
}

void SequenceCalls::TellClosed(const CachePtr& cache, worker::SequenceId id) {
  commands_.SendToLayerGroups(
      *cache, [id](int32_t) { return worker::DropTablesCommand{{id}}; },
      [this, cache, id](const absl::Status& status) {
        if (status.ok()) return;
        const CriticalSection section(lock_);
        cache->undropped.push_back(id);
      });
}

}  // namespace tributary::service
