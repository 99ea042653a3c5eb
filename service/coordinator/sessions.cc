#include "service/coordinator/sessions.h"

#include <algorithm>
#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/algorithm/container.h"
#include "absl/strings/str_cat.h"
#include "base/mailbox/layout.h"
#include "base/mailbox/layout_message.h"
#include "base/process/boot_id.h"
#include "base/status/errors.h"
#include "base/status/rpc_errors.h"
#include "base/status/status_macros.h"
#include "service/coordinator/conflicts.h"
#include "service/coordinator/sessions/device_commands.h"
#include "service/coordinator/sessions/endpoints.h"
#include "service/coordinator/sessions/session_replies.h"
#include "service/coordinator/sessions/session_runner.h"

namespace tributary::service {
namespace {

absl::Status ConflictOf(const SessionStep& step) {
  if (step.conflicts.empty()) return absl::OkStatus();
  return OtherTokensHeld(*absl::c_min_element(step.conflicts));
}

// How many layers all ranks have carried out. Ranks are never 2^31 layers apart.
uint32_t LeastOf(const std::vector<uint32_t>& counts) {
  uint32_t least = counts.front();
  for (const uint32_t count : counts) {
    if (!mailbox::Reached(count, least)) least = count;
  }
  return least;
}

absl::Status OnAnotherMachine() {
  return FieldError(absl::StatusCode::kFailedPrecondition, "open.memory",
                    "the GPU of rank 0 is on another machine than the service and its hosts");
}

}  // namespace

// A step that waits for its sequences, and then holds them until it is settled.
class Sessions::StepOperation final : public Operation {
 public:
  StepOperation(Sessions* sessions, SessionPtr owner, SessionStepPtr step)
      : sessions_(*sessions), session_(std::move(owner)), step_(std::move(step)) {
    Member::session = session_->id;
    const std::vector<worker::SequenceId> all = step_->request.Sequences();
    sequences.assign(all.begin(), all.end());
    cache = session_->cache;
    call = session_->call;
    call.deadline = CoordinatorLock::Clock::now() + session_->terms.command.wait_timeout;
  }

  void OnTurn() override TRIBUTARY_LOCKED { sessions_.Accept(session_, step_); }
  void OnFailed(const absl::Status& status) override TRIBUTARY_LOCKED {
    sessions_.Refuse(session_, step_, status);
  }

 private:
  Sessions& sessions_;
  const SessionPtr session_;
  const SessionStepPtr step_;
};

Sessions::Sessions(const CoordinatorOptions& options, const telemetry::Logger& log,
                   const WorkerGroup& group, CoordinatorLock& lock, const ServingState& serving,
                   GroupCommands& commands, CallOrder& order, const CacheRegistry& caches,
                   SequenceCalls& sequences, MailboxHandout& mailboxes, OnRefused on_refused)
    : options_(options),
      log_(log),
      group_(group),
      lock_(lock),
      serving_(serving),
      commands_(commands),
      order_(order),
      caches_(caches),
      sequences_(sequences),
      mailboxes_(mailboxes),
      admission_(options, group, mailboxes, std::move(on_refused)) {}

void Sessions::Tell(const SessionPtr& session, v1::SessionReply reply) {
  AddToOutboxes(*session, std::move(reply));
  lock_.Defer(DrainOf(session));
}

void Sessions::TellLast(const SessionPtr& session, v1::SessionReply reply) {
  AddToOutboxes(*session, std::move(reply));
  lock_.Answer(DrainOf(session));
}

// --------------------------------------------------------------------------------------- opening

absl::StatusOr<SessionPtr> Sessions::Admit(const v1::OpenSession& request, const CallContext& call,
                                           bool local,
                                           const std::shared_ptr<SessionListener>& listener) {
  absl::StatusOr<CachePtr> cache = [&] {
    const ReadSection section(lock_);
    return caches_.Find(request.cache_id());
  }();
  TRIBUTARY_RETURN_IF_ERROR(PrefixField("open", cache.status()));
  TRIBUTARY_ASSIGN_OR_RETURN(SessionTerms terms, ResolveSessionTerms(request, (*cache)->spec));
  TRIBUTARY_RETURN_IF_ERROR(admission_.CheckMemory(request.memory(), local));
  if (request.memory() == v1::SESSION_MEMORY_DEVICE && (*cache)->spec.replica_stride > 0) {
    return FieldError(absl::StatusCode::kFailedPrecondition, "open.memory",
                      "the cache has replicas, and tokens of a mailbox on a GPU are not kept");
  }
  TRIBUTARY_RETURN_IF_ERROR(admission_.CheckWorkers(terms));
  const CriticalSection section(lock_);
  TRIBUTARY_RETURN_IF_ERROR(PrefixField("open", caches_.Find(request.cache_id()).status()));
  TRIBUTARY_RETURN_IF_ERROR(admission_.Enter(call.caller, terms.mailbox_bytes()));
  terms.command.session = next_id_++;
  const worker::OpenSessionCommand command = terms.command;
  auto session =
      std::make_shared<Session>(command.session, *cache, std::move(terms), call, listener);
  session->epoch = serving_.epoch();
  session->ended.resize(session->on_workers() ? static_cast<size_t>(group_.size()) : 1);
  sessions_.emplace(session->id, session);
  if (session->on_workers()) {
    commands_.SendBody((*cache)->id(), command,
                       [this, session](const Outcome& outcome) { OnOpened(session, outcome); });
  } else if (request.memory() == v1::SESSION_MEMORY_MESSAGES) {
    OpenRunner(session,
               CreateMessageRunner(RunnerContext(), session->cache, session->epoch, session->terms,
                                   EventsOf(session.get(), listener)),
               OpenedReply(*session));
  }
  return session;
}

RunnerEvents Sessions::EventsOf(Session* session,
                                const std::shared_ptr<SessionListener>& listener) {
  return {
      .on_news = [this](const worker::SessionNews& news) { OnNews(news); },
      .send =
          [session](v1::SessionReply reply) {
            session->outbox.Reply(std::move(reply));
            session->outbox.Drain();
          },
      .on_room = [listener] { listener->OnRoom(); },
  };
}

void Sessions::OpenRunner(const SessionPtr& session, std::unique_ptr<SessionRunner> runner,
                          v1::SessionReply opened) {
  // From now on the session is in sessions_ or unjoined_ until its runner has ended.
  session->runner = std::move(runner);
  session->phase = Session::Phase::kOpen;
  Tell(session, std::move(opened));
  EndIfIdle(session);
}

void Sessions::OpenHostMailboxes(const SessionPtr& session,
                                 const std::shared_ptr<SessionListener>& listener) {
  const absl::StatusOr<std::string> socket = mailboxes_.socket();
  absl::StatusOr<std::vector<std::shared_ptr<HostMailbox>>> mailboxes = MakeMailboxes(*session);
  const absl::StatusOr<std::string> token =
      mailboxes.ok() ? mailboxes_.Offer(mailboxes->front(), CoordinatorLock::Clock::now())
                     : mailboxes.status();
  absl::StatusOr<std::string> secret = MailboxHandout::MakeSecret();
  const CriticalSection section(lock_);
  if (session->phase != Session::Phase::kOpening) return;  // it was ended meanwhile
  if (!token.ok() || !secret.ok()) {
    session->why = token.ok() ? secret.status() : token.status();
    session->phase = Session::Phase::kEnding;
    return FinishEnd(session);
  }
  v1::SessionReply reply = OpenedReply(*session);
  v1::SessionOpened* opened = reply.mutable_opened();
  AddMailbox(*session, *token, socket.value_or(""), opened);
  session->way_to_wait = v1::WAITING_FUTEX;
  opened->set_waiting(session->way_to_wait);
  ExpectEndpoints(*session, *std::move(secret), opened);
  if (mailboxes->size() > 1) session->mailboxes = *mailboxes;
  OpenRunner(session,
             CreateMailboxRunner(RunnerContext(), session->cache, session->epoch, session->terms,
                                 *std::move(mailboxes), options_.session_limits.spin,
                                 EventsOf(session.get(), listener)),
             std::move(reply));
}

absl::StatusOr<std::vector<std::shared_ptr<HostMailbox>>> Sessions::MakeMailboxes(
    const Session& session) const {
  std::vector<std::shared_ptr<HostMailbox>> mailboxes;
  for (int32_t endpoint = 0; endpoint < session.terms.endpoints.count; ++endpoint) {
    TRIBUTARY_ASSIGN_OR_RETURN(
        std::shared_ptr<HostMailbox> mailbox,
        HostMailbox::Create(session.terms.command.layout, [this](std::byte* data, size_t bytes) {
          return group_.PinMemory(data, bytes);
        }));
    mailboxes.push_back(std::move(mailbox));
  }
  return mailboxes;
}

absl::StatusOr<SessionPtr> Sessions::AdmitEndpoint(
    const v1::JoinSession& request, const CallContext& call,
    const std::shared_ptr<SessionListener>& listener) {
  const absl::StatusOr<std::string> socket = mailboxes_.socket();
  const CriticalSection section(lock_);
  const auto found = sessions_.find(request.session_id());
  const bool known = found != sessions_.end() && found->second->phase == Session::Phase::kOpen &&
                     found->second->call.caller == call.caller &&
                     IsSecret(found->second->endpoint_secret, request.secret());
  if (!known) {
    return FieldError(absl::StatusCode::kNotFound, "join.session_id",
                      "no session with this number and secret is open");
  }
  const SessionPtr session = found->second;
  const int32_t endpoint = request.endpoint();
  const int32_t count = session->terms.endpoints.count;
  if (endpoint < 1 || endpoint >= count) {
    return InvalidField("join.endpoint",
                        absl::StrCat("must be 1 to ", count - 1, ", is ", endpoint));
  }
  const auto place = static_cast<size_t>(endpoint);
  if (session->joined[place] != nullptr) {
    return FieldError(absl::StatusCode::kAlreadyExists, "join.endpoint",
                      absl::StrCat("endpoint ", endpoint, " has joined"));
  }
  v1::SessionReply reply = OpenedReply(*session, endpoint);
  if (session->terms.shares_mailbox()) {
    AddDeviceMailbox(*session, endpoint, reply.mutable_opened());
  } else {
    TRIBUTARY_ASSIGN_OR_RETURN(
        const std::string token,
        mailboxes_.Offer(session->mailboxes[place], CoordinatorLock::Clock::now()));
    AddMailbox(*session, token, socket.value_or(""), reply.mutable_opened());
  }
  reply.mutable_opened()->set_waiting(session->way_to_wait);
  const auto outbox = std::make_shared<SessionOutbox>(listener);
  session->joined[place] = outbox;
  outbox->Reply(std::move(reply));
  for (const SessionStepPtr& step : session->in_flight) outbox->Reply(AcceptedReply(*step));
  lock_.Defer([outbox] { outbox->Drain(); });
  return session;
}

SessionPtr Sessions::Join(const v1::JoinSession& request, const CallContext& call, bool local,
                          std::shared_ptr<SessionListener> listener) {
  absl::StatusOr<SessionPtr> session = MailboxesAreLocal();
  if (local) session = AdmitEndpoint(request, call, listener);
  if (session.ok()) return *std::move(session);
  listener->OnEnd(session.status());
  return nullptr;
}

SessionPtr Sessions::Open(const v1::OpenSession& request, const CallContext& call, bool local,
                          std::shared_ptr<SessionListener> listener) {
  Reap();
  absl::StatusOr<SessionPtr> session = Admit(request, call, local, listener);
  if (!session.ok()) {
    listener->OnEnd(session.status());
    return nullptr;
  }
  if (request.memory() == v1::SESSION_MEMORY_HOST) OpenHostMailboxes(*session, listener);
  return *std::move(session);
}

void Sessions::OnOpened(const SessionPtr& session, const Outcome& outcome) {
  const CriticalSection section(lock_);
  if (session->phase != Session::Phase::kOpening) return;
  if (!outcome.status.ok()) {
    session->why = FromOutcome(outcome.status, options_.retry_delay);
    session->phase = Session::Phase::kEnding;
    return FinishEnd(session);
  }
  const worker::DeviceMailbox& mailbox = outcome.replies.front().mailbox;  // of rank 0
  if (mailbox.machine != BootId()) return BeginEnd(session, OnAnotherMachine());
  session->mailbox = PublicMailbox(mailbox);
  if (!session->terms.command.measures) return FinishOpening(session);
  session->probed_until = CoordinatorLock::Clock::now() + options_.session_limits.probe_patience;
  probed_.push_back(session);
  v1::SessionReply reply;
  *reply.mutable_probe()->mutable_layout() = mailbox::MessageOf(session->terms.command.layout);
  *reply.mutable_probe()->mutable_device() = session->mailbox;
  reply.mutable_probe()->set_rounds(worker::kProbeRounds);
  Tell(session, std::move(reply));
}

void Sessions::Probed(const SessionPtr& session, const v1::ProbeResult& times) {
  const CriticalSection section(lock_);
  if (session->phase > Session::Phase::kOpen) return;  // the host is about to hear why
  if (!session->probed_until.has_value()) {
    return BeginEnd(session, InvalidField("probed", "comes without having been asked for"));
  }
  session->probed_until.reset();
  const bool one_gpu = session->terms.public_terms.device_uuid() == session->mailbox.device_uuid();
  session->choice = ChooseWaiting(times, one_gpu);
  FinishOpening(session);
}

void Sessions::FinishOpening(const SessionPtr& session) {
  absl::StatusOr<std::string> secret = MailboxHandout::MakeSecret();
  if (!secret.ok()) return BeginEnd(session, secret.status());
  session->phase = Session::Phase::kOpen;
  session->way_to_wait = PublicWaiting(session->choice.waiting);
  v1::SessionReply reply = OpenedReply(*session);
  v1::SessionOpened* opened = reply.mutable_opened();
  AddDeviceMailbox(*session, /*endpoint=*/0, opened);
  ExpectEndpoints(*session, *std::move(secret), opened);
  opened->set_waiting(session->way_to_wait);
  opened->set_round_trip_seconds(session->choice.round_trip_seconds);
  opened->set_warning(session->choice.warning);
  if (!session->choice.warning.empty()) {
    log_.Warning("a session is slower than it could be",
                 {{"session", session->id}, {"warning", session->choice.warning}});
  }
  Tell(session, std::move(reply));
  EndIfIdle(session);
}

CoordinatorLock::Clock::time_point Sessions::NextDue() const {
  return probed_.empty()
             ? CoordinatorLock::Clock::time_point::max()
             : probed_.front()->probed_until.value_or(CoordinatorLock::Clock::time_point::min());
}

void Sessions::FailExpired(CoordinatorLock::Clock::time_point now) {
  while (!probed_.empty()) {
    const SessionPtr session = probed_.front();
    if (session->probed_until.has_value() && *session->probed_until > now) return;
    probed_.pop_front();
    if (!session->probed_until.has_value()) continue;  // it is open, or has ended
    BeginEnd(session, absl::DeadlineExceededError("the host did not time round trips"));
  }
}

void Sessions::AddTo(const std::vector<CachePtr>& caches, v1::GetTopologyReply* reply) const {
  std::vector<SessionPtr> sessions;
  for (const auto& [id, session] : sessions_) {
    const bool listed = std::find(caches.begin(), caches.end(), session->cache) != caches.end();
    if (listed && session->phase == Session::Phase::kOpen) sessions.push_back(session);
  }
  std::sort(sessions.begin(), sessions.end(),
            [](const SessionPtr& a, const SessionPtr& b) { return a->id < b->id; });
  const CoordinatorLock::Clock::time_point now = CoordinatorLock::Clock::now();
  for (const SessionPtr& session : sessions) *reply->add_sessions() = InfoOf(*session, now);
}

// ----------------------------------------------------------------------------------------- steps

void Sessions::Submit(const SessionPtr& session, const v1::SubmitStep& request) {
  absl::StatusOr<SessionStepRequest> checked =
      CheckSessionStep(request, session->terms, session->cache->spec, session->cache->terms,
                       session->cache->backends);
  const CriticalSection section(lock_);
  if (session->phase == Session::Phase::kOpening) {
    return BeginEnd(session, InvalidField("submit", "comes before the session is open"));
  }
  if (session->phase != Session::Phase::kOpen) return;  // the host is about to hear why
  lock_.AcceptCall();                                   // a drain waits for it
  auto step = std::make_shared<SessionStep>();
  step->request.step_id = request.step_id();
  absl::Status refused = checked.status();
  if (refused.ok()) step->request = *std::move(checked);
  if (refused.ok()) refused = serving_.Check();
  if (refused.ok() && session->submitted && request.step_id() <= session->last_step_id) {
    refused = InvalidField("step_id", absl::StrCat("must rise: is ", request.step_id(), " after ",
                                                   session->last_step_id));
  }
  const auto most = static_cast<size_t>(session->terms.public_terms.max_steps());
  if (refused.ok() && session->waiting.size() + session->in_flight.size() >= most) {
    refused = Exhausted("session steps", absl::StrCat("all ", most, " are in flight"));
  }
  if (refused.ok() && session->closing) {
    refused = absl::FailedPreconditionError("the session is being closed");
  }
  if (!refused.ok()) return Refuse(session, step, refused);
  session->submitted = true;
  session->last_step_id = request.step_id();
  session->waiting.push_back(step);
  if (session->waiting.size() == 1) EnterNext(session);
}

void Sessions::EnterNext(const SessionPtr& session) {
  if (session->waiting.empty() || session->phase != Session::Phase::kOpen) return;
  const SessionStepPtr& step = session->waiting.front();
  step->operation = std::make_shared<StepOperation>(this, session, step);
  order_.Enter(step->operation);
}

void Sessions::Accept(const SessionPtr& session, const SessionStepPtr& step) {
  RangeSteps steps(session->cache->table);
  absl::StatusOr<AcceptedRange> accepted =
      steps.Accept(step->request.range, step->request.kind, step->request.entries,
                   step->request.changes, sequences_.AccountOf(session->call.caller));
  if (!accepted.ok()) return order_.Fail(*step->operation, accepted.status());
  order_.StopWaiting(*step->operation);
  step->accepted = *std::move(accepted);
  std::vector<worker::SequenceId> forked;
  for (size_t i = 0; i < step->request.changes.size(); ++i) {
    if (!step->request.changes[i].fork_from.has_value()) continue;
    forked.push_back(step->request.entries[i].sequence);
  }
  sequences_.GiveLease(session->cache, forked, session->call);
  step->first_count = session->next_count;
  session->next_count = step->end();
  session->in_flight.push_back(step);
  session->waiting.pop_front();
  Tell(session, AcceptedReply(*step));
  Send(session, step);
  EnterNext(session);
}

void Sessions::Refuse(const SessionPtr& session, const SessionStepPtr& step,
                      const absl::Status& why) {
  step->operation = nullptr;  // it holds the step, and has had its turn
  v1::SessionReply reply;
  reply.mutable_accepted()->set_step_id(step->request.step_id);
  *reply.mutable_accepted()->mutable_status() = ToRpcStatus(why);
  TellLast(session, std::move(reply));
  if (session->runner != nullptr) {
    lock_.Defer([session, id = step->request.step_id] { session->runner->OnStepRefused(id); });
  }
  const bool was_first = !session->waiting.empty() && session->waiting.front() == step;
  if (was_first) {
    session->waiting.pop_front();
    EnterNext(session);
  }
}

void Sessions::Send(const SessionPtr& session, const SessionStepPtr& step) {
  if (session->runner != nullptr) {
    const SessionStepRequest& request = step->request;
    return session->runner->Begin(
        std::make_shared<const AcceptedStep>(AcceptedStep{.step_id = request.step_id,
                                                          .kind = request.kind,
                                                          .range = request.range,
                                                          .first_count = step->first_count,
                                                          .entries = step->accepted.entries,
                                                          .pieces = request.pieces,
                                                          .pages = step->accepted.pages}));
  }
  session->to_send.push_back(step);
  SendCommands(session);
}

void Sessions::SendCommands(const SessionPtr& session) {
  if (session->phase != Session::Phase::kOpen) return;
  while (const NextCommand next = TakeNextCommand(*session)) {
    commands_.Send(
        session->cache->id(),
        [session, next](worker::Command* command)
            TRIBUTARY_LOCKED { command->body = CommandOf(*session, *next.step, next.first); },
        [this, session](const Outcome& outcome) {
          if (outcome.status.ok()) return;  // the workers will say how it goes on
          const CriticalSection section(lock_);
          BeginEnd(session, FromOutcome(outcome.status, options_.retry_delay));
        });
  }
}

void Sessions::OnNews(const worker::SessionNews& news) {
  const CriticalSection section(lock_);
  const auto found = sessions_.find(news.session);
  if (found == sessions_.end()) return;
  const SessionPtr session = found->second;
  if (news.rank < 0 || static_cast<size_t>(news.rank) >= session->ended.size()) return;
  session->ended[static_cast<size_t>(news.rank)] = news.ended;
  session->carried_out = LeastOf(session->ended);
  for (const auto& [first_count, entry] : news.conflicts) {
    AddConflict(*session, first_count, entry);
  }
  DropDoneCommands(*session);
  SettleDone(session);
  if (!news.status.ok()) {
    BeginEnd(session, news.status);
    if (session->runner != nullptr) FinishEnd(session);  // it has ended already
    return;
  }
  if (session->on_workers()) SendCommands(session);
  EndIfIdle(session);
}

void Sessions::LeaveOrder(SessionStep* step) {
  const OperationPtr operation = std::move(step->operation);  // which holds the step
  order_.Leave(operation.get());
}

void Sessions::SettleDone(const SessionPtr& session) {
  RangeSteps steps(session->cache->table);
  while (!session->in_flight.empty() &&
         mailbox::Reached(session->carried_out, session->in_flight.front()->end())) {
    const SessionStepPtr step = session->in_flight.front();
    session->in_flight.pop_front();
    steps.Settle(&step->accepted);
    ++session->steps_done;
    session->layers_done += static_cast<uint64_t>(step->request.range.count);
    TellEnded(session, *step, ConflictOf(*step), static_cast<uint32_t>(step->request.range.count));
    LeaveOrder(step.get());
  }
}

void Sessions::TellEnded(const SessionPtr& session, const SessionStep& step,
                         const absl::Status& status, uint32_t layers_done) {
  v1::SessionReply reply;
  v1::StepEnded* ended = reply.mutable_ended();
  ended->set_step_id(step.request.step_id);
  if (!status.ok()) *ended->mutable_status() = ToRpcStatus(status);
  ended->set_layers_done(static_cast<int32_t>(layers_done));
  TellLast(session, std::move(reply));
}

// ---------------------------------------------------------------------------------------- ending

void Sessions::Close(const SessionPtr& session) {
  const CriticalSection section(lock_);
  session->closing = true;
  EndIfIdle(session);
}

void Sessions::Abandon(const SessionPtr& session, int32_t endpoint) {
  const CriticalSection section(lock_);
  BeginEnd(session, session->terms.endpoints.count > 1 ? EndpointLeft(endpoint)
                                                       : absl::CancelledError("the host left"));
}

void Sessions::EndIfIdle(const SessionPtr& session) {
  if (session->phase != Session::Phase::kOpen) return;
  if (!session->in_flight.empty() || !session->waiting.empty()) return;
  if (session->closing) return BeginEnd(session, absl::OkStatus());
  if (serving_.draining()) BeginEnd(session, serving_.Check());
}

void Sessions::BeginEnd(const SessionPtr& session, const absl::Status& why) {
  const bool open = session->phase == Session::Phase::kOpen;
  if (!open && session->phase != Session::Phase::kOpening) return;
  session->phase = Session::Phase::kEnding;
  session->probed_until.reset();
  session->why = why;
  while (!session->waiting.empty()) {
    const SessionStepPtr step = session->waiting.back();
    session->waiting.pop_back();
    // The first has taken its place among the calls of its sequences.
    if (step->operation != nullptr) {
      order_.Fail(*step->operation, why);
    } else {
      Refuse(session, step, why);
    }
  }
  const absl::Status told = why.ok() ? absl::CancelledError("the session was closed") : why;
  if (session->runner != nullptr) session->runner->Close(told);
  if (session->epoch != serving_.epoch() || !serving_.ready()) return FinishEnd(session);
  if (session->runner != nullptr) return;                 // its news ends it
  if (!session->on_workers()) return FinishEnd(session);  // its mailbox is being made
  commands_.SendBody(session->cache->id(),
                     worker::CloseSessionCommand{session->id, told.raw_code()},
                     [this, session](const Outcome&) {
                       const CriticalSection section(lock_);
                       FinishEnd(session);
                     });
}

void Sessions::FinishEnd(const SessionPtr& session) {
  if (session->phase != Session::Phase::kEnding) return;
  session->phase = Session::Phase::kEnded;
  SettleDone(session);
  RangeSteps steps(session->cache->table);
  for (auto step = session->in_flight.rbegin(); step != session->in_flight.rend(); ++step) {
    steps.Undo(&(*step)->accepted);
  }
  while (!session->in_flight.empty()) {
    const SessionStepPtr step = session->in_flight.front();
    session->in_flight.pop_front();
    const uint32_t begun = session->carried_out - step->first_count;
    const uint32_t done = mailbox::Reached(session->carried_out, step->first_count) ? begun : 0;
    TellEnded(session, *step, session->why.ok() ? absl::CancelledError() : session->why,
              done / step->pieces());
    LeaveOrder(step.get());
  }
  if (!session->why.ok()) {
    log_.Info("session ended", {{"session", session->id}, {"why", session->why.message()}});
  }
  EndOutboxes(*session, session->why);
  lock_.Defer(DrainOf(session));
  session->mailboxes.clear();
  session->to_send.clear();
  admission_.Leave(session->call.caller, session->terms.mailbox_bytes());
  if (session->runner != nullptr) unjoined_.push_back(session);
  sessions_.erase(session->id);
}

void Sessions::Join() {
  std::vector<SessionPtr> closed;
  {
    const CriticalSection section(lock_);
    for (const auto& [id, session] : sessions_) {
      if (session->runner != nullptr) closed.push_back(session);
    }
  }
  // Each of them moves to unjoined_ when its runner tells that it has ended.
  for (const SessionPtr& session : closed) session->runner->Join();
  Reap();
}

void Sessions::Reap() {
  std::vector<SessionPtr> ended;
  {
    const CriticalSection section(lock_);
    ended.swap(unjoined_);
  }
  for (const SessionPtr& session : ended) session->runner->Join();
}

absl::Status Sessions::Layer(const SessionPtr& session, v1::LayerInput layer) {
  if (session->runner != nullptr) return session->runner->OnLayer(std::move(layer));
  return LayersGoThroughMailbox();
}

void Sessions::OnGroupBroken(const absl::Status& why) {
  const absl::flat_hash_map<worker::SessionId, SessionPtr> all = sessions_;
  for (const auto& [id, session] : all) {
    BeginEnd(session, StepAborted(why.message(), options_.retry_delay));
    FinishEnd(session);
  }
}

void Sessions::EndAll(const absl::Status& why) {
  const absl::flat_hash_map<worker::SessionId, SessionPtr> all = sessions_;
  for (const auto& [id, session] : all) BeginEnd(session, why);
}

void Sessions::EndAllOf(const Cache& cache, const absl::Status& why) {
  const absl::flat_hash_map<worker::SessionId, SessionPtr> all = sessions_;
  for (const auto& [id, session] : all) {
    if (session->cache.get() == &cache) BeginEnd(session, why);
  }
}

void Sessions::StartDraining() {
  const absl::flat_hash_map<worker::SessionId, SessionPtr> all = sessions_;
  for (const auto& [id, session] : all) EndIfIdle(session);
}

}  // namespace tributary::service
