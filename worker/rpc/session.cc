#include "worker/rpc/session.h"

#include <algorithm>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status/errors.h"
#include "base/status/grpc_status.h"
#include "collective/exchange/exchange.h"
#include "worker/rpc/conversion.h"
#include "worker/rpc/holdings_conversion.h"
#include "worker/rpc/protocol.h"
#include "worker/rpc/session_conversion.h"

namespace tributary::worker {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;
using telemetry::LogLevel;

// Whether this program speaks the version that the coordinator chose; 0: it chose none.
absl::Status CheckSpoken(uint32_t version) {
  const ProtocolRange spoken = SpokenProtocol();
  if (version == 0 || (version >= spoken.minimum && version <= spoken.current)) {
    return absl::OkStatus();
  }
  return FieldError(absl::StatusCode::kFailedPrecondition, "protocol_version",
                    absl::StrCat("the group's is ", version, ", this worker speaks ",
                                 spoken.minimum, " to ", spoken.current));
}

}  // namespace

Session::Session(const SessionOptions& options, Identity& identity, RankThread& rank,
                 Readiness& readiness)
    : options_(options),
      identity_(identity),
      rank_(rank),
      readiness_(readiness),
      silence_(options.welcome_timeout) {
  Register();  // the first message, whatever else is to be said while the call is being made
}

Session::~Session() = default;

Session::End Session::Run(const std::shared_ptr<grpc::Channel>& channel) {
  const auto stub = v1::GroupService::NewStub(channel);
  {
    const MutexLock lock(mutex_);
    heard_ = Clock::now();
  }
  // Before the call: to connect may take longer than a worker has that drains.
  std::thread pulse([this] { Pulse(); });
  const auto stream = stub->Session(&context_);
  std::thread writer([&] {
    while (std::optional<v1::WorkerMessage> message = outbox_->Pop()) {
      // A failed write shows as the end of reading, which ends the session.
      if (!stream->Write(*message)) return;
    }
  });

  v1::CoordinatorMessage message;
  while (stream->Read(&message)) {
    {
      const MutexLock lock(mutex_);
      heard_ = Clock::now();
    }
    Handle(std::move(message));
  }

  readiness_.Leave();
  rank_.Abort("the session with the coordinator ended");
  outbox_->Close();
  {
    const MutexLock lock(mutex_);
    finished_ = true;
    changed_.NotifyAll();
  }
  writer.join();
  pulse.join();
  End end{.status = stream->Finish(), .welcomed = welcome_.has_value()};
  end.field = FieldOf(FromGrpcStatus(end.status));
  return end;
}

void Session::Drain(Clock::time_point deadline) {
  v1::WorkerMessage message;
  message.mutable_drain();
  outbox_->Push(std::move(message));
  const MutexLock lock(mutex_);
  drain_deadline_ = deadline;
  changed_.NotifyAll();
}

void Session::Register() {
  v1::WorkerMessage message;
  message.set_epoch(identity_.epoch);
  v1::Registration* registration = message.mutable_registration();
  registration->set_protocol_version(SpokenProtocol().current);
  registration->set_minimum_protocol_version(SpokenProtocol().minimum);
  registration->set_build_version(options_.build_version);
  registration->set_instance_id(identity_.instance_id);
  registration->set_group_id(identity_.group_id);
  registration->set_host(options_.host);
  registration->set_backend(options_.backend);
  if (options_.rank.has_value()) registration->set_rank(*options_.rank);
  registration->set_world_size(options_.world_size);
  outbox_->Push(std::move(message));
}

void Session::Handle(v1::CoordinatorMessage message) {
  const bool current = message.epoch() == identity_.epoch;
  switch (message.body_case()) {
    case v1::CoordinatorMessage::kWelcome:
      return OnWelcome(message.welcome());
    case v1::CoordinatorMessage::kConfigure:
      return OnConfigure(message.epoch(), message.configure());
    case v1::CoordinatorMessage::kAbort:
      if (current) OnAbort(message.abort().reason());
      return;
    case v1::CoordinatorMessage::kCommand:
      if (current) OnCommand(std::move(message));
      return;
    case v1::CoordinatorMessage::kRendezvousValue:
      if (current && rendezvous_ != nullptr) {
        rendezvous_->Deliver(std::move(*message.mutable_rendezvous_value()));
      }
      return;
    case v1::CoordinatorMessage::kBye:
      return Log(LogLevel::kInfo,
                 absl::StrCat("the coordinator says goodbye: ", message.bye().reason()));
    case v1::CoordinatorMessage::kHeartbeat:
    case v1::CoordinatorMessage::BODY_NOT_SET:
      return;
  }
}

void Session::OnWelcome(const v1::Welcome& welcome) {
  welcome_ = welcome;
  logged_rank_ = welcome.rank();
  Log(LogLevel::kInfo,
      absl::StrCat(
          "registered as rank ", welcome.rank(), " of ", welcome.size(), ", protocol version ",
          welcome.protocol_version() == 0 ? SpokenProtocol().current : welcome.protocol_version()));
  options_.observer->OnWelcome(welcome.rank(), welcome.size());
  if (welcome.report_holdings()) {
    rank_.Report([outbox = outbox_](const Holdings& holdings) {
      v1::WorkerMessage message;
      *message.mutable_holdings() = EncodeHoldings(holdings);
      outbox->Push(std::move(message));
    });
  }
  const MutexLock lock(mutex_);
  interval_ = milliseconds(std::max<uint32_t>(welcome.heartbeat_interval_ms(), 1));
  silence_ = milliseconds(std::max<uint32_t>(welcome.heartbeat_timeout_ms(), 1));
  changed_.NotifyAll();
}

void Session::OnConfigure(uint64_t epoch, const v1::Configure& configure) {
  // Fencing: a coordinator that was replaced, and does not know it, has no say any more.
  if (welcome_.has_value() && identity_.group_id == welcome_->group_id() &&
      epoch <= identity_.epoch) {
    Log(LogLevel::kError, absl::StrCat("epoch ", epoch, " of this group is over: not joined"));
    v1::WorkerMessage message;
    message.set_epoch(epoch);
    *message.mutable_form_failed()->mutable_status() = EncodeStatus(absl::FailedPreconditionError(
        absl::StrCat("this worker has been in epoch ", identity_.epoch, " already")));
    return outbox_->Push(std::move(message));
  }
  readiness_.Expect(epoch);
  rank_.Abort(absl::StrCat("the group forms again under epoch ", epoch));
  const auto answer = [outbox = outbox_, &readiness = readiness_,
                       epoch](const absl::StatusOr<std::string>& exchange) {
    v1::WorkerMessage message;
    message.set_epoch(epoch);
    if (exchange.ok()) {
      message.mutable_ready()->set_exchange(*exchange);
      readiness.Reached(epoch);
    } else {
      *message.mutable_form_failed()->mutable_status() = EncodeStatus(exchange.status());
    }
    outbox->Push(std::move(message));
  };
  identity_.epoch = epoch;
  logged_epoch_ = epoch;
  if (!welcome_.has_value()) {
    return answer(absl::FailedPreconditionError("configured before being welcomed"));
  }
  if (const absl::Status spoken = CheckSpoken(configure.protocol_version()); !spoken.ok()) {
    return answer(spoken);
  }
  const uint32_t protocol = configure.protocol_version() != 0 ? configure.protocol_version()
                                                              : welcome_->protocol_version();
  const absl::StatusOr<collective::Transport> transport =
      ChooseTransport(options_.peer_tls, options_.security, protocol);
  if (!transport.ok()) return answer(transport.status());
  // Nothing to keep, yet the coordinator counts on it: never serve an empty shard as a full one.
  if (!configure.fresh() && identity_.group_id != welcome_->group_id()) {
    return answer(absl::FailedPreconditionError("this worker holds nothing of the group"));
  }
  RankThread::Formation formation;
  if (!collective::Parse(welcome_->strategy(), &formation.strategy)) {
    return answer(absl::InvalidArgumentError(
        absl::StrCat("strategy: unknown value '", welcome_->strategy(), "'")));
  }
  formation.deterministic = welcome_->deterministic();
  formation.exchange = welcome_->device_exchange() ? ExchangePlace::kAuto : ExchangePlace::kHost;
  formation.on_exchange = [log = options_.log, rank = welcome_->rank()](const std::string& how) {
    if (log != nullptr) log->Write(LogLevel::kInfo, how, {{"rank", rank}});
  };
  identity_.group_id = welcome_->group_id();
  rendezvous_ = std::make_shared<SessionRendezvous>(epoch, outbox_);
  const int size = configure.size() > 0 ? configure.size() : welcome_->size();
  if (welcome_->rank() >= size) {
    return answer(absl::InvalidArgumentError(
        absl::StrCat("size: this worker has rank ", welcome_->rank(), ", the group has ", size)));
  }
  formation.place = {.rank = welcome_->rank(), .size = size, .epoch = epoch, .host = options_.host};
  formation.transport = *transport;
  formation.agrees_on_transport = protocol >= kPeerTlsProtocol;
  formation.lanes = protocol >= kParcelLaneProtocol;
  formation.shard_ranks = configure.shard_ranks();
  formation.fresh = configure.fresh();
  formation.rendezvous = rendezvous_;
  formation.on_session_news = [outbox = outbox_, epoch](const SessionNews& news) {
    v1::WorkerMessage message;
    message.set_epoch(epoch);
    *message.mutable_session_news() = EncodeNews(news);
    outbox->Push(std::move(message));
  };
  formation.deadline = Clock::now() + milliseconds(configure.timeout_ms());
  // The session may be over by then.
  const auto joined = [log = options_.log, observer = options_.observer, answer, epoch,
                       rank = welcome_->rank()](const absl::StatusOr<std::string>& exchange) {
    observer->OnJoined(epoch, exchange.status());
    if (log != nullptr) {
      const bool ok = exchange.ok();
      const std::string how = ok && !exchange->empty() ? absl::StrCat("; ", *exchange) : "";
      log->Write(ok ? LogLevel::kInfo : LogLevel::kWarning,
                 ok ? absl::StrCat("joined epoch ", epoch, how)
                    : absl::StrCat("cannot join epoch ", epoch, ": ", exchange.status().message()),
                 {{"rank", rank}, {"epoch", epoch}});
    }
    answer(exchange);
  };
  rank_.Form(std::move(formation), joined);
}

void Session::OnAbort(const std::string& reason) {
  Log(LogLevel::kWarning, absl::StrCat("epoch ", identity_.epoch, " is over: ", reason));
  readiness_.Leave();
  rank_.Abort(reason);
  v1::WorkerMessage message;
  message.set_epoch(identity_.epoch);
  message.mutable_aborted();
  outbox_->Push(std::move(message));
}

void Session::OnCommand(v1::CoordinatorMessage message) {
  const uint64_t number = message.command().number();
  absl::StatusOr<Command> command = DecodeCommand(std::move(message), Clock::now());
  if (!command.ok()) {
    Reply reply{.epoch = identity_.epoch, .number = number, .rank = welcome_->rank()};
    reply.status = command.status();
    return outbox_->Push(EncodeReply(reply));
  }
  rank_.Execute(*std::move(command),
                [outbox = outbox_](const Reply& reply) { outbox->Push(EncodeReply(reply)); });
}

void Session::Pulse() {
  const MutexLock lock(mutex_);
  while (!finished_) {
    v1::WorkerMessage message;
    message.mutable_heartbeat()->set_memory_bytes(rank_.memory_bytes());
    message.mutable_heartbeat()->set_busy_seconds(rank_.busy_seconds());
    outbox_->Push(std::move(message));

    Clock::time_point wake = Clock::now() + interval_;
    if (drain_deadline_.has_value()) wake = std::min(wake, *drain_deadline_);
    changed_.WaitUntil(mutex_, std::min(wake, heard_ + silence_));

    const Clock::time_point now = Clock::now();
    const bool silent = now >= heard_ + silence_;
    const bool overdue = drain_deadline_.has_value() && now >= *drain_deadline_;
    if (finished_ || !(silent || overdue)) continue;
    Log(LogLevel::kWarning, silent ? "the coordinator is silent" : "draining took too long");
    context_.TryCancel();
    while (!finished_) changed_.Wait(mutex_);
  }
}

void Session::Log(LogLevel level, absl::string_view event) const {
  if (options_.log == nullptr) return;
  options_.log->Write(level, event,
                      {{"rank", logged_rank_.load()}, {"epoch", logged_epoch_.load()}});
}

}  // namespace tributary::worker
