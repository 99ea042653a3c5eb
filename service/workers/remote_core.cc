// Streams, seats and the rendezvous; start and stop.
#include "service/workers/remote_core.h"

#include <algorithm>
#include <random>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/status/grpc_status.h"
#include "worker/rpc/conversion.h"

namespace tributary::service {
namespace {

// How long leaving workers are given to take the last words.
constexpr std::chrono::milliseconds kGoodbyeTimeout{1'000};

uint64_t RandomId() {
  std::random_device device;
  const uint64_t id = (uint64_t{device()} << 32) | device();
  return id == 0 ? 1 : id;
}

}  // namespace

RemoteCore::RemoteCore(const RemoteGroupOptions& options)
    : options_(options), group_id_(RandomId()), seats_(options.size) {}

// ------------------------------------------------------------------------------ streams and seats

bool RemoteCore::Accept(grpc::CallbackServerContext* context, Stream* stream) {
  std::lock_guard lock(mutex_);
  if (stopping_) return false;
  *stream = worker::WorkerStream::Begin(context, shared_from_this());
  peers_[*stream].heard = Clock::now();
  watch_wakes_.notify_one();
  return true;
}

void RemoteCore::OnMessage(const Stream& stream, const grpc::ByteBuffer& bytes) {
  v1::WorkerMessage message;
  if (!worker::DecodeMessage(bytes, &message)) {
    OnEnd(stream);
    return stream->Close({grpc::StatusCode::INVALID_ARGUMENT, "not a WorkerMessage"});
  }
  // Tensors are copied out of the message, which nobody should have to wait for.
  absl::StatusOr<worker::Reply> reply = absl::NotFoundError("not a reply");
  if (message.has_reply()) {
    reply = worker::DecodeReply(message.epoch(), message.reply());
    if (reply.ok()) reply->arrived = Clock::now();
  }

  std::lock_guard lock(mutex_);
  const auto found = peers_.find(stream);
  if (found == peers_.end()) return;
  Peer& peer = found->second;
  peer.heard = Clock::now();
  if (message.has_registration()) {
    return Register(stream, message.epoch(), message.registration());
  }
  if (message.has_drain()) return BeginDraining(stream);
  if (peer.rank < 0) return;  // it lost its seat; its stream is being closed
  if (message.has_heartbeat()) {
    seats_[peer.rank].memory_bytes = message.heartbeat().memory_bytes();
    seats_[peer.rank].busy_seconds = message.heartbeat().busy_seconds();
    return;
  }
  // Fencing: what was said in another epoch means nothing now.
  if (message.epoch() != epoch_) return;
  if (!message.has_reply()) return Take(peer.rank, std::move(message));
  if (reply.ok()) return TakeReply(peer.rank, *std::move(reply));
  Break(absl::StrCat("rank ", peer.rank, " sent a bad reply: ", reply.status().message()));
}

void RemoteCore::OnEnd(const Stream& stream) {
  std::lock_guard lock(mutex_);
  Vacate(stream, "its stream ended");
}

void RemoteCore::OnGone(const Stream& stream) {
  std::lock_guard lock(mutex_);
  Vacate(stream, "its stream is gone");
  peers_.erase(stream);
  drained_.notify_all();
}

void RemoteCore::Register(const Stream& stream, uint64_t epoch,
                          const v1::Registration& registration) {
  const auto refuse = [&](const absl::Status& status) { stream->Close(ToGrpcStatus(status)); };
  if (stopping_) return refuse(absl::UnavailableError("the coordinator is stopping"));
  if (peers_[stream].rank >= 0) {
    return refuse(absl::FailedPreconditionError("registration: must be the first message only"));
  }
  const worker::GroupFacts facts = {.size = options_.size,
                                    .group_id = group_id_,
                                    .epoch = epoch_,
                                    .backend = Name(options_.device)};
  const absl::Status check = worker::CheckRegistration(facts, epoch, registration);
  if (!check.ok()) return refuse(check);
  std::vector<worker::Seat> known;
  for (const Seat& seat : seats_) known.push_back(seat.known);
  const absl::StatusOr<int> rank = worker::ChooseSeat(known, registration);
  if (!rank.ok()) return refuse(rank.status());

  // The same worker over a new connection: it knows better than we that the old one is dead.
  for (Seat& seat : seats_) {
    if (seat.stream == nullptr || seat.known.instance_id != registration.instance_id()) continue;
    const Stream old = seat.stream;
    Vacate(old, "it dialled again");
    old->Cancel({grpc::StatusCode::ABORTED, "replaced by a new connection"});
  }

  Seat& seat = seats_[*rank];
  seat.known.instance_id = registration.instance_id();
  seat.known.connected = true;
  seat.stream = stream;
  seat.ready = false;
  seat.aborting = false;
  seat.backend = registration.backend();
  peers_[stream].rank = *rank;

  v1::CoordinatorMessage message = Message();
  v1::Welcome* welcome = message.mutable_welcome();
  welcome->set_group_id(group_id_);
  welcome->set_rank(*rank);
  welcome->set_size(options_.size);
  welcome->set_strategy(collective::Name(options_.strategy));
  welcome->set_deterministic(options_.deterministic);
  welcome->set_device_exchange(options_.exchange_place == worker::ExchangePlace::kAuto);
  welcome->set_heartbeat_interval_ms(options_.heartbeat_interval.count());
  welcome->set_heartbeat_timeout_ms(options_.heartbeat_timeout.count());
  stream->Send(worker::EncodeMessage(message));
  former_wakes_.notify_one();
}

void RemoteCore::Take(int rank, v1::WorkerMessage message) {
  if (message.has_aborted()) {
    seats_[rank].aborting = false;
    return former_wakes_.notify_one();
  }
  if (state_ != State::kForming) return;
  switch (message.body_case()) {
    case v1::WorkerMessage::kReady:
      seats_[rank].ready = true;
      return former_wakes_.notify_one();
    case v1::WorkerMessage::kFormFailed:
      return Break(absl::StrCat("rank ", rank,
                                " could not join: ", message.form_failed().status().message()));
    case v1::WorkerMessage::kRendezvousPut:
      return Put(std::move(*message.mutable_rendezvous_put()));
    case v1::WorkerMessage::kRendezvousGet:
      return Get(rank, message.rendezvous_get().key());
    default:
      return;  // of a newer build: CheckRegistration lets none in
  }
}

void RemoteCore::BeginDraining(const Stream& stream) {
  Peer& peer = peers_[stream];
  if (peer.rank < 0) return LetGo(stream);  // nothing waits for who has no seat
  peer.draining = true;
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
  Vacate(stream, "it is leaving");
  stream->Send(worker::EncodeMessage(message));
  stream->Close(grpc::Status::OK);
}

void RemoteCore::Vacate(const Stream& stream, const std::string& why) {
  const auto found = peers_.find(stream);
  if (found == peers_.end()) return;
  const int rank = std::exchange(found->second.rank, -1);
  if (rank < 0) return;
  Seat& seat = seats_[rank];
  seat.stream = nullptr;
  seat.ready = false;
  seat.known.connected = false;
  seat.known.left = ++leavings_;
  Break(absl::StrCat("rank ", rank, " is gone: ", why));
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
  seats_[rank].stream->Send(worker::EncodeMessage(message));
}

// --------------------------------------------------------------------------------- start and stop

absl::Status RemoteCore::Start(GroupObserver* observer) {
  std::lock_guard lock(mutex_);
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
    std::unique_lock lock(mutex_);
    if (stopping_) return;
    stopping_ = true;
    // Bounded: the watch breaks the group at the first deadline that passes.
    drained_.wait(lock, [this] { return pending_.empty(); });
    for (auto& [stream, peer] : peers_) {
      v1::CoordinatorMessage message = Message();
      message.mutable_bye()->set_reason("the coordinator is stopping");
      stream->Send(worker::EncodeMessage(message));
      stream->Close(grpc::Status::OK);
    }
    drained_.wait_for(lock, kGoodbyeTimeout, [this] { return peers_.empty(); });
    for (auto& [stream, peer] : peers_) stream->Cancel(grpc::Status::CANCELLED);
    drained_.wait_for(lock, kGoodbyeTimeout, [this] { return peers_.empty(); });
    stopped_ = true;
    former_wakes_.notify_all();
    watch_wakes_.notify_all();
  }
  if (former_.joinable()) former_.join();
  if (watch_.joinable()) watch_.join();
  completions_.Stop();
}

std::vector<Member> RemoteCore::members() const {
  std::lock_guard lock(mutex_);
  std::vector<Member> members;
  for (int rank = 0; rank < options_.size; ++rank) {
    const Seat& seat = seats_[rank];
    members.push_back({.rank = rank,
                       .address = seat.stream == nullptr ? "" : seat.stream->peer(),
                       .backend = seat.backend,
                       .connected = seat.stream != nullptr,
                       .holds_shard = seat.holder != 0 && seat.holder == seat.known.instance_id,
                       .memory_bytes = seat.memory_bytes,
                       .busy_seconds = seat.busy_seconds});
  }
  return members;
}

// ---------------------------------------------------------------------------------------- helpers

bool RemoteCore::AllCanForm() const {
  return std::all_of(seats_.begin(), seats_.end(),
                     [](const Seat& seat) { return seat.stream != nullptr && !seat.aborting; });
}

bool RemoteCore::AllReady() const {
  return std::all_of(seats_.begin(), seats_.end(), [](const Seat& seat) { return seat.ready; });
}

std::string RemoteCore::RanksThat(const std::function<bool(int rank)>& predicate) const {
  std::vector<int> ranks;
  for (int rank = 0; rank < options_.size; ++rank) {
    if (predicate(rank)) ranks.push_back(rank);
  }
  return absl::StrCat(ranks.size() == 1 ? "rank " : "ranks ", absl::StrJoin(ranks, ", "));
}

v1::CoordinatorMessage RemoteCore::Message() const {
  v1::CoordinatorMessage message;
  message.set_epoch(epoch_);
  return message;
}

void RemoteCore::SendToAll(const v1::CoordinatorMessage& message) {
  const grpc::ByteBuffer bytes = worker::EncodeMessage(message);
  for (const Seat& seat : seats_) {
    if (seat.stream != nullptr) seat.stream->Send(bytes);
  }
}

}  // namespace tributary::service
