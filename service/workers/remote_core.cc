// Streams, ranks and the rendezvous; start and stop.
#include "service/workers/remote_core.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/process/random_id.h"
#include "base/status/grpc_status.h"
#include "service/workers/leaving.h"
#include "worker/rpc/conversion.h"
#include "worker/rpc/holdings_conversion.h"

namespace tributary::service {
namespace {

// How long leaving workers are given to take the last words.
constexpr std::chrono::milliseconds kGoodbyeTimeout{1'000};

}  // namespace

RemoteCore::RemoteCore(const RemoteGroupOptions& options)
    : options_(options),
      join_log_(options.log),
      group_id_(options.identity.group_id == 0 ? RandomId() : options.identity.group_id),
      size_(options.size),
      shard_ranks_(options.size),
      ranks_(options.size) {
  const MutexLock lock(mutex_);
  epoch_ = options.identity.epoch;
  adopting_ = options.identity.group_id != 0;
  kept_until_ = Clock::now() + options.holders_return;
  for (size_t rank = 0; rank < options.identity.holders.size() && rank < ranks_.size(); ++rank) {
    ranks_[rank].known.instance_id = ranks_[rank].holder = options.identity.holders[rank];
  }
}

// ------------------------------------------------------------------------------ streams and ranks

bool RemoteCore::Accept(grpc::CallbackServerContext* context, Stream* stream) {
  const MutexLock lock(mutex_);
  if (stopping_) return false;
  *stream = worker::WorkerStream::Begin(context, shared_from_this());
  peers_[*stream].heard = Clock::now();
  watch_wakes_.NotifyOne();
  return true;
}

void RemoteCore::OnMessage(const Stream& stream, const grpc::ByteBuffer& bytes) {
  v1::WorkerMessage message;
  if (!worker::DecodeMessage(bytes, &message)) {
    OnEnd(stream);
    return stream->Close({grpc::StatusCode::INVALID_ARGUMENT, "not a WorkerMessage"});
  }
  // The reply is decoded here, before the lock is taken, so that nobody waits for that.
  absl::StatusOr<worker::Reply> reply = absl::NotFoundError("not a reply");
  if (message.has_reply()) {
    reply = worker::DecodeReply(message.epoch(), std::move(*message.mutable_reply()));
    if (reply.ok()) reply->arrived = Clock::now();
  }
  absl::StatusOr<worker::Holdings> held = absl::NotFoundError("not holdings");
  if (message.has_holdings()) held = worker::DecodeHoldings(message.holdings());

  const MutexLock lock(mutex_);
  const auto found = peers_.find(stream);
  if (found == peers_.end()) return;
  Peer& peer = found->second;
  peer.heard = Clock::now();
  if (message.has_registration()) {
    return Register(stream, message.epoch(), message.registration());
  }
  if (message.has_drain()) return BeginDraining(stream);
  if (peer.rank < 0) return;  // it lost its rank; its stream is being closed
  if (message.has_heartbeat()) {
    ranks_[peer.rank].memory_bytes = message.heartbeat().memory_bytes();
    ranks_[peer.rank].busy_seconds = message.heartbeat().busy_seconds();
    return;
  }
  if (message.has_holdings()) return TakeHoldings(peer.rank, std::move(held));
  // Fencing: what was said in another epoch means nothing now.
  if (message.epoch() != epoch_) return;
  if (message.has_session_news()) return TakeNews(peer.rank, message.session_news());
  if (!message.has_reply()) return Take(peer.rank, std::move(message));
  if (reply.ok()) return TakeReply(peer.rank, *std::move(reply));
  Break(absl::StrCat("rank ", peer.rank, " sent a bad reply: ", reply.status().message()));
}

void RemoteCore::OnEnd(const Stream& stream) {
  const MutexLock lock(mutex_);
  Vacate(stream, "its stream ended");
}

void RemoteCore::OnGone(const Stream& stream) {
  const MutexLock lock(mutex_);
  Vacate(stream, "its stream is gone");
  peers_.erase(stream);
  drained_.NotifyAll();
}

void RemoteCore::Register(const Stream& stream, uint64_t epoch,
                          const v1::Registration& registration) {
  const auto refuse = [&](const absl::Status& status) {
    join_log_.Refused(registration.host(), status);
    stream->Close(ToGrpcStatus(status));
  };
  if (stopping_) {
    return stream->Close({grpc::StatusCode::UNAVAILABLE, "the coordinator is stopping"});
  }
  if (peers_[stream].rank >= 0) {
    return refuse(absl::FailedPreconditionError("registration: must be the first message only"));
  }
  if (Replaced(epoch, registration)) {
    return refuse(absl::UnavailableError("another coordinator goes on with this group"));
  }
  const int places = static_cast<int>(ranks_.size());
  const worker::GroupFacts facts = {.size = places,
                                    .other_sizes = {size(), options_.wanted_size},
                                    .group_id = group_id_,
                                    .epoch = epoch_,
                                    .backend = Name(options_.device)};
  const absl::Status check = worker::CheckRegistration(facts, epoch, registration);
  if (!check.ok()) return refuse(check);
  MakeWayForHolder(registration.instance_id());
  const absl::StatusOr<int> rank = worker::ChooseRank(Histories(), registration);
  if (!rank.ok()) return refuse(rank.status());

  // The same worker over a new connection: it knows better than we that the old one is dead.
  for (RankState& state : ranks_) {
    if (state.stream == nullptr || state.known.instance_id != registration.instance_id()) continue;
    const Stream old = state.stream;
    Vacate(old, "it dialled again");
    old->Cancel({grpc::StatusCode::ABORTED, "replaced by a new connection"});
  }

  RankState& state = ranks_[*rank];
  state.known.instance_id = registration.instance_id();
  state.known.connected = true;
  state.stream = stream;
  state.ready = false;
  state.aborting = false;
  state.host = registration.host();
  state.backend = registration.backend();
  state.build = registration.build_version();
  state.protocol =
      worker::CommonProtocol(worker::SpokenBy(registration), worker::SpokenProtocol()).value_or(0);
  state.held.reset();
  state.reporting = adopting_ && state.holder == registration.instance_id();
  peers_[stream].rank = *rank;

  v1::CoordinatorMessage message = Message();
  v1::Welcome* welcome = message.mutable_welcome();
  welcome->set_group_id(group_id_);
  welcome->set_rank(*rank);
  welcome->set_size(*rank < size_ ? size() : places);
  welcome->set_strategy(collective::Name(options_.strategy));
  welcome->set_deterministic(options_.deterministic);
  welcome->set_protocol_version(state.protocol);
  welcome->set_device_exchange(options_.exchange_place == worker::ExchangePlace::kAuto);
  welcome->set_heartbeat_interval_ms(options_.heartbeat_interval.count());
  welcome->set_heartbeat_timeout_ms(options_.heartbeat_timeout.count());
  welcome->set_report_holdings(state.reporting);
  stream->Send(worker::EncodeMessage(message));
  former_wakes_.NotifyOne();
}

std::vector<worker::RankHistory> RemoteCore::Histories() const {
  const bool kept = adopting_ && Clock::now() < kept_until_;
  std::vector<worker::RankHistory> known;
  for (const RankState& state : ranks_) {
    known.push_back(state.known);
    known.back().awaited = kept && state.holder != 0 && !state.known.connected;
  }
  return known;
}

void RemoteCore::MakeWayForHolder(uint64_t instance_id) {
  if (!adopting_ || configured_) return;
  for (RankState& state : ranks_) {
    if (state.holder != instance_id || state.known.instance_id == instance_id) continue;
    if (const Stream other = state.stream; other != nullptr) {
      Vacate(other, "who held the rank is back");
      other->Close({grpc::StatusCode::ABORTED, "who held the rank is back"});
    }
    state.known.instance_id = instance_id;
    return;
  }
}

bool RemoteCore::Replaced(uint64_t epoch, const v1::Registration& registration) {
  if (options_.store == nullptr || registration.group_id() != group_id_ || epoch <= epoch_) {
    return replaced_;
  }
  if (!configured_) {
    epoch_ = epoch;
    return replaced_;
  }
  if (std::exchange(replaced_, true)) return true;
  const std::string reason = absl::StrCat(
      "a worker comes from epoch ", epoch,
      ", which this coordinator has not given out: another one goes on with the group");
  if (state_ == State::kServing) {
    Break(reason);
  } else {
    broken_.push_back(reason);
    former_wakes_.NotifyOne();
  }
  return true;
}

void RemoteCore::TakeHoldings(int rank, absl::StatusOr<worker::Holdings> held) {
  RankState& state = ranks_[rank];
  if (!std::exchange(state.reporting, false)) return;
  if (held.ok() && held->rank == rank) {
    state.held = *std::move(held);
  } else {
    state.holder = 0;  // it starts empty
  }
  former_wakes_.NotifyOne();
}

void RemoteCore::Take(int rank, v1::WorkerMessage message) {
  if (message.has_aborted()) {
    ranks_[rank].aborting = false;
    return former_wakes_.NotifyOne();
  }
  if (state_ != State::kForming || rank >= size_) return;
  switch (message.body_case()) {
    case v1::WorkerMessage::kReady:
      ranks_[rank].ready = true;
      if (rank == 0) exchange_ = std::move(*message.mutable_ready()->mutable_exchange());
      return former_wakes_.NotifyOne();
    case v1::WorkerMessage::kFormFailed:
      return Break(absl::StrCat("rank ", rank,
                                " could not join: ", message.form_failed().status().message()));
    case v1::WorkerMessage::kRendezvousPut:
      return Put(std::move(*message.mutable_rendezvous_put()));
    case v1::WorkerMessage::kRendezvousGet:
      return Get(rank, message.rendezvous_get().key());
    default:
      return;  // of a newer build, which knows more than was agreed on
  }
}

void RemoteCore::BeginDraining(const Stream& stream) {
  Peer& peer = peers_[stream];
  // Nothing waits for a worker that has no rank of the group.
  if (peer.rank < 0 || peer.rank >= size_) return LetGo(stream);
  if (state_ == State::kServing && !stopping_) {
    if (std::exchange(peer.leaving, true)) return;
    leaving_.push_back(peer.rank);
    return former_wakes_.NotifyOne();
  }
  peer.draining = true;
  if (pending_.empty()) LetDrainedGo();
}

void RemoteCore::LetGo(int rank) {
  const MutexLock lock(mutex_);
  for (auto& [stream, peer] : peers_) {
    if (peer.rank == rank && std::exchange(peer.leaving, false)) peer.draining = true;
  }
  if (pending_.empty()) LetDrainedGo();
}

void RemoteCore::LetDrainedGo() {
  std::vector<Stream> leaving;
  for (auto& [stream, peer] : peers_) {
    if (std::exchange(peer.draining, false)) leaving.push_back(stream);
  }
  for (const Stream& stream : leaving) LetGo(stream);
}

void RemoteCore::LetGo(const Stream& stream) {
  v1::CoordinatorMessage message = Message();
  message.mutable_bye()->set_reason("as asked for");
  Vacate(stream, std::string(kIsLeaving));
  stream->Send(worker::EncodeMessage(message));
  stream->Close(grpc::Status::OK);
}

void RemoteCore::Vacate(const Stream& stream, const std::string& why) {
  const auto found = peers_.find(stream);
  if (found == peers_.end()) return;
  const int rank = std::exchange(found->second.rank, -1);
  if (rank < 0) return;
  RankState& state = ranks_[rank];
  state.stream = nullptr;
  state.ready = false;
  state.reporting = false;
  state.held.reset();
  state.known.connected = false;
  state.known.left = ++leavings_;
  if (rank < size_) Break(absl::StrCat("rank ", rank, " is gone: ", why));
}

// ------------------------------------------------------------------------------------ rendezvous

void RemoteCore::Put(v1::RendezvousPut put) {
  const auto waiters = rendezvous_waiters_.extract(put.key());
  const std::string key = put.key();
  rendezvous_[key] = std::move(*put.mutable_value());
  if (waiters.empty()) return;
  for (const int rank : waiters.mapped()) Get(rank, key);
}

void RemoteCore::Get(int rank, const std::string& key) {
  const auto found = rendezvous_.find(key);
  if (found == rendezvous_.end()) {
    rendezvous_waiters_[key].push_back(rank);
    return;
  }
  v1::CoordinatorMessage message = Message();
  message.mutable_rendezvous_value()->set_key(key);
  message.mutable_rendezvous_value()->set_value(found->second);
  ranks_[rank].stream->Send(worker::EncodeMessage(message));
}

// --------------------------------------------------------------------------------- start and stop

absl::Status RemoteCore::Start(GroupObserver* observer) {
  const MutexLock lock(mutex_);
  if (started_) return absl::FailedPreconditionError("the group was started before");
  started_ = true;
  observer_ = observer;
  next_heartbeat_ = Clock::now();
  former_ = std::thread([this] { FormerLoop(); });
  watch_ = std::thread([this] { WatchLoop(); });
  return absl::OkStatus();
}

void RemoteCore::Stop() {
  {
    const MutexLock lock(mutex_);
    if (stopping_) return;
    stopping_ = true;
    // Bounded: the watch breaks the group at the first deadline that passes.
    while (!pending_.empty()) drained_.Wait(mutex_);
    for (auto& [stream, peer] : peers_) {
      v1::CoordinatorMessage message = Message();
      message.mutable_bye()->set_reason("the coordinator is stopping");
      stream->Send(worker::EncodeMessage(message));
      stream->Close(grpc::Status::OK);
    }
    WaitForPeersToLeave();
    for (auto& [stream, peer] : peers_) stream->Cancel(grpc::Status::CANCELLED);
    WaitForPeersToLeave();
    stopped_ = true;
    former_wakes_.NotifyAll();
    watch_wakes_.NotifyAll();
  }
  if (former_.joinable()) former_.join();
  if (watch_.joinable()) watch_.join();
  completions_.Stop();
}

void RemoteCore::WaitForPeersToLeave() {
  const Clock::time_point until = Clock::now() + kGoodbyeTimeout;
  while (!peers_.empty() && drained_.WaitUntil(mutex_, until)) {
  }
}

std::string RemoteCore::exchange() const {
  const MutexLock lock(mutex_);
  return exchange_;
}

std::vector<Member> RemoteCore::members() const {
  const MutexLock lock(mutex_);
  std::vector<Member> members;
  for (int rank = 0; rank < static_cast<int>(ranks_.size()); ++rank) {
    const RankState& state = ranks_[rank];
    members.push_back({.rank = rank,
                       .address = state.stream == nullptr ? "" : state.stream->peer(),
                       .host = state.host,
                       .backend = state.backend,
                       .build = state.build,
                       .protocol = state.protocol,
                       .connected = state.stream != nullptr,
                       .holds_shard = state.holder != 0 && state.holder == state.known.instance_id,
                       .memory_bytes = state.memory_bytes,
                       .busy_seconds = state.busy_seconds});
  }
  return members;
}

// ---------------------------------------------------------------------------- another number of
// ranks

void RemoteCore::SetPlaces(int places) {
  for (auto& [stream, peer] : peers_) {
    if (peer.rank < places) continue;
    peer.rank = -1;
    peer.leaving = false;
    v1::CoordinatorMessage message = Message();
    message.mutable_bye()->set_reason("the group has no place for it");
    stream->Send(worker::EncodeMessage(message));
    stream->Close(grpc::Status::OK);
  }
  ranks_.resize(static_cast<size_t>(places));
}

void RemoteCore::Expect(int workers) {
  const MutexLock lock(mutex_);
  SetPlaces(std::max(size(), workers));
}

void RemoteCore::Regroup(const Regrouping& regrouping) {
  const MutexLock lock(mutex_);
  const size_t told = broken_.size();
  Break(regrouping.reason);
  if (broken_.size() == told) broken_.push_back(regrouping.reason);
  size_ = regrouping.size;
  shard_ranks_ = regrouping.shard_ranks;
  forms_once_ = regrouping.once;
  has_formed_ = false;
  form_not_before_ = Clock::now();
  SetPlaces(regrouping.size);
  former_wakes_.NotifyOne();
}

// ---------------------------------------------------------------------------------------- helpers

bool RemoteCore::AllCanForm() const {
  return std::all_of(Ranks().begin(), Ranks().end(), [](const RankState& state) {
    return state.stream != nullptr && !state.aborting && !state.reporting;
  });
}

bool RemoteCore::AllReady() const {
  return std::all_of(Ranks().begin(), Ranks().end(),
                     [](const RankState& state) { return state.ready; });
}

std::string RemoteCore::RanksThat(const std::function<bool(int rank)>& predicate) const {
  std::vector<int> ranks;
  for (int rank = 0; rank < size_; ++rank) {
    if (predicate(rank)) ranks.push_back(rank);
  }
  return absl::StrCat(ranks.size() == 1 ? "rank " : "ranks ", absl::StrJoin(ranks, ", "));
}

uint32_t RemoteCore::GroupProtocol() const {
  return std::min_element(
             Ranks().begin(), Ranks().end(),
             [](const auto& one, const auto& other) { return one.protocol < other.protocol; })
      ->protocol;
}

v1::CoordinatorMessage RemoteCore::Message() const {
  v1::CoordinatorMessage message;
  message.set_epoch(epoch_);
  return message;
}

void RemoteCore::SendToAll(const v1::CoordinatorMessage& message) {
  const grpc::ByteBuffer bytes = worker::EncodeMessage(message);
  for (const RankState& state : ranks_) {
    if (state.stream != nullptr) state.stream->Send(bytes);
  }
}

}  // namespace tributary::service
