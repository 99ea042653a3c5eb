#include "service/remote_group.h"

#include <grpcpp/server_builder.h>

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <map>
#include <mutex>
#include <optional>
#include <random>
#include <set>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "service/embedded_group.h"
#include "service/grpc_status.h"
#include "tributary/v1/worker.grpc.pb.h"
#include "worker/rpc/conversion.h"
#include "worker/rpc/registration.h"
#include "worker/rpc/worker_stream.h"

namespace tributary::service {
namespace {

using worker::WorkerStream;
using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;
using Stream = std::shared_ptr<WorkerStream>;

// How long leaving workers are given to take the last words.
constexpr milliseconds kGoodbyeTimeout{1'000};
// Between attempts to form a group whose ranks are there but cannot reach each other.
constexpr milliseconds kFirstPause{50};
constexpr milliseconds kLongestPause{2'000};

uint64_t RandomId() {
  std::random_device device;
  const uint64_t id = (uint64_t{device()} << 32) | device();
  return id == 0 ? 1 : id;
}

milliseconds FormationPause(int failures) {
  return std::min(kLongestPause, kFirstPause * (1 << std::min(failures, 10)));
}

// Runs what callers gave us on a thread of its own, in order. They may block or call back into the
// group there, which they could do neither on gRPC's threads nor below the group's mutex.
class Completions {
 public:
  Completions() : thread_([this] { Loop(); }) {}
  ~Completions() { Stop(); }

  void Add(WorkerGroup::Done done, Outcome outcome) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (!stopping_) {
        work_.push_back({std::move(done), std::move(outcome)});
        return changed_.notify_one();
      }
    }
    done(
        std::move(outcome));  // there is no thread any more, and no group whose mutex could be held
  }

  // After everything that was added.
  void Stop() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      stopping_ = true;
      changed_.notify_one();
    }
    if (thread_.joinable()) thread_.join();
  }

 private:
  struct Item {
    WorkerGroup::Done done;
    Outcome outcome;
  };

  void Loop() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      changed_.wait(lock, [this] { return stopping_ || !work_.empty(); });
      if (work_.empty()) return;
      Item item = std::move(work_.front());
      work_.pop_front();
      lock.unlock();
      item.done(std::move(item.outcome));
      item = {};  // what `done` holds is released before the lock is taken
      lock.lock();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Item> work_;
  bool stopping_ = false;
  std::thread thread_;
};

// The group without its service: the seats, the epoch, what is in flight. Streams keep it alive.
//
// Three threads: the former (forms groups, tells the observer), the watch (deadlines, silence,
// heartbeats) and the completions. Everything else happens on gRPC's threads and those of callers.
class Core : public WorkerStream::Events, public std::enable_shared_from_this<Core> {
 public:
  explicit Core(const RemoteGroupOptions& options)
      : options_(options), group_id_(RandomId()), seats_(options.size) {}

  const RemoteGroupOptions& options() const { return options_; }

  // False: no streams are taken any more.
  bool Accept(grpc::CallbackServerContext* context, Stream* stream);

  absl::Status Start(GroupObserver* observer);
  void Submit(std::shared_ptr<const worker::Command> command, WorkerGroup::Done done);
  std::vector<Member> members() const;
  void Stop();

  void OnMessage(const Stream& stream, const grpc::ByteBuffer& message) override;
  void OnEnd(const Stream& stream) override;
  void OnGone(const Stream& stream) override;

 private:
  enum class State {
    kWaiting,  // for ranks, or for the pause after a failed formation
    kForming,  // the ranks connect to each other under epoch_
    kServing,
  };

  // What is known of a stream.
  struct Peer {
    int rank = -1;  // -1: not registered, or has lost its seat
    Clock::time_point heard;
    bool draining = false;
  };

  struct Seat {
    worker::Seat known;
    Stream stream;  // null: nobody
    bool ready = false;
    // Whether its worker may still be in the epoch that broke: it was told to abort and has not
    // said that it did. When a worker dies its peers may be the first to notice; no epoch is
    // wasted on the dead, who say nothing.
    bool aborting = false;
    uint64_t holder = 0;  // the instance whose shard the group counts on; 0: none
    std::string backend;
    uint64_t memory_bytes = 0;
    double busy_seconds = 0;
  };

  struct Pending {
    uint64_t epoch = 0;
    Clock::time_point deadline;
    WorkerGroup::Done done;
    std::vector<worker::Reply> replies;  // by rank
    std::vector<bool> answered;          // by rank
    int missing = 0;
  };

  // All of the following are called with the mutex held.
  void Register(const Stream& stream, uint64_t epoch, const v1::Registration& registration);
  void Take(int rank, v1::WorkerMessage message);
  // Takes `done` when the command may be sent.
  absl::Status Admit(uint64_t number, Pending pending, WorkerGroup::Done* done);
  void TakeReply(int rank, worker::Reply reply);
  void Put(v1::RendezvousPut put);
  void Get(int rank, const std::string& key);
  void BeginDraining(const Stream& stream);
  void LetDrainedGo();
  // The seat's worker is gone, or must be taken for gone.
  void Vacate(const Stream& stream, const std::string& why);
  // Ends the group that serves or forms, if any. All in flight is kAborted.
  void Break(const std::string& reason);
  void Form();
  bool AllCanForm() const;
  bool AllReady() const;
  std::string RanksThat(const std::function<bool(int rank)>& predicate) const;
  v1::CoordinatorMessage Message() const;
  void SendToAll(const v1::CoordinatorMessage& message);
  void Complete(WorkerGroup::Done done, absl::Status status, std::vector<worker::Reply> replies);
  // What is due at `now`; returns when to look again.
  Clock::time_point WatchOnce(Clock::time_point now);

  void FormerLoop();
  void WatchLoop();

  const RemoteGroupOptions options_;
  const uint64_t group_id_;
  GroupObserver* observer_ = nullptr;

  // Held over a Submit, so that all ranks get commands in one order. Taken before mutex_, which
  // is free while commands are written: replies need not wait for that.
  std::mutex submit_mutex_;

  mutable std::mutex mutex_;
  std::condition_variable former_wakes_;
  std::condition_variable watch_wakes_;
  std::condition_variable drained_;  // nothing in flight, or a stream is gone

  State state_ = State::kWaiting;
  bool started_ = false;
  bool stopping_ = false;  // no new commands, no new groups
  bool stopped_ = false;   // the threads end
  uint64_t epoch_ = 0;     // of the group that serves or forms; of the last one while waiting
  Clock::time_point form_deadline_;
  Clock::time_point abort_deadline_;  // of the workers that are aborting
  Clock::time_point form_not_before_;
  int form_failures_ = 0;  // in a row
  uint64_t leavings_ = 0;
  std::deque<std::string> broken_;  // what the observer has yet to be told
  Clock::time_point next_heartbeat_;
  Clock::time_point watch_until_;

  std::vector<Seat> seats_;       // by rank
  std::map<Stream, Peer> peers_;  // every stream that is not gone
  std::map<std::string, std::string> rendezvous_;
  std::map<std::string, std::vector<int>> rendezvous_waiters_;  // key -> ranks
  std::map<uint64_t, Pending> pending_;                         // by number

  Completions completions_;
  std::thread former_;
  std::thread watch_;
};

// ------------------------------------------------------------------------------ streams and seats

bool Core::Accept(grpc::CallbackServerContext* context, Stream* stream) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (stopping_) return false;
  *stream = WorkerStream::Begin(context, shared_from_this());
  peers_[*stream].heard = Clock::now();
  watch_wakes_.notify_one();
  return true;
}

void Core::OnMessage(const Stream& stream, const grpc::ByteBuffer& bytes) {
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

  std::lock_guard<std::mutex> lock(mutex_);
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

void Core::OnEnd(const Stream& stream) {
  std::lock_guard<std::mutex> lock(mutex_);
  Vacate(stream, "its stream ended");
}

void Core::OnGone(const Stream& stream) {
  std::lock_guard<std::mutex> lock(mutex_);
  Vacate(stream, "its stream is gone");
  peers_.erase(stream);
  drained_.notify_all();
}

void Core::Register(const Stream& stream, uint64_t epoch, const v1::Registration& registration) {
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
  welcome->set_heartbeat_interval_ms(options_.heartbeat_interval.count());
  welcome->set_heartbeat_timeout_ms(options_.heartbeat_timeout.count());
  stream->Send(worker::EncodeMessage(message));
  former_wakes_.notify_one();
}

void Core::Take(int rank, v1::WorkerMessage message) {
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

void Core::BeginDraining(const Stream& stream) {
  peers_[stream].draining = true;
  if (pending_.empty()) LetDrainedGo();
}

void Core::LetDrainedGo() {
  std::vector<Stream> leaving;
  for (auto& [stream, peer] : peers_) {
    if (std::exchange(peer.draining, false)) leaving.push_back(stream);
  }
  for (const Stream& stream : leaving) {
    v1::CoordinatorMessage message = Message();
    message.mutable_bye()->set_reason("as asked for");
    Vacate(stream, "it is leaving");
    stream->Send(worker::EncodeMessage(message));
    stream->Close(grpc::Status::OK);
  }
}

void Core::Vacate(const Stream& stream, const std::string& why) {
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

void Core::Put(v1::RendezvousPut put) {
  const auto waiters = rendezvous_waiters_.extract(put.key());
  const std::string key = put.key();
  rendezvous_[key] = std::move(*put.mutable_value());
  if (waiters.empty()) return;
  for (const int rank : waiters.mapped()) Get(rank, key);
}

void Core::Get(int rank, const std::string& key) {
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

// -------------------------------------------------------------------------------------- commands

void Core::Submit(std::shared_ptr<const worker::Command> command, WorkerGroup::Done done) {
  const uint64_t number = command->number;
  const Pending pending = {.epoch = command->epoch, .deadline = command->deadline};
  const grpc::ByteBuffer message = worker::EncodeCommand(std::move(command), Clock::now());

  std::unique_lock<std::mutex> in_order(submit_mutex_);
  std::vector<Stream> streams;
  absl::Status admitted;
  if (message.Length() > options_.max_message_bytes) {
    admitted = absl::ResourceExhaustedError(
        absl::StrCat("a step of ", message.Length(), " bytes is beyond the ",
                     options_.max_message_bytes, " a message to a worker may have"));
  } else {
    std::lock_guard<std::mutex> lock(mutex_);
    admitted = Admit(number, pending, &done);
    for (const Seat& seat : seats_) streams.push_back(seat.stream);
  }
  if (!admitted.ok()) {
    in_order.unlock();
    return completions_.Add(std::move(done), Outcome{std::move(admitted), {}});
  }
  // The group may break meanwhile; workers drop commands of an epoch they have left.
  for (const Stream& stream : streams) stream->Send(message);
}

absl::Status Core::Admit(uint64_t number, Pending pending, WorkerGroup::Done* done) {
  const bool draining = std::any_of(peers_.begin(), peers_.end(),
                                    [](const auto& peer) { return peer.second.draining; });
  if (state_ != State::kServing || stopping_ || draining || pending.epoch != epoch_) {
    return absl::AbortedError(absl::StrCat("epoch ", pending.epoch, " is over"));
  }
  if (pending_.count(number) > 0) {
    return absl::InternalError(absl::StrCat("command ", number, " is in flight already"));
  }
  pending.done = std::move(*done);
  pending.replies.resize(seats_.size());
  pending.answered.resize(seats_.size());
  pending.missing = options_.size;
  if (pending.deadline < watch_until_) watch_wakes_.notify_one();
  pending_.emplace(number, std::move(pending));
  return absl::OkStatus();
}

void Core::TakeReply(int rank, worker::Reply reply) {
  if (state_ != State::kServing) return;
  const auto found = pending_.find(reply.number);
  if (found == pending_.end()) return;
  Pending& pending = found->second;
  if (reply.rank != rank || pending.answered[rank]) {
    return Break(absl::StrCat("rank ", rank, " answered command ", reply.number, " out of turn"));
  }
  if (BreaksGroup(reply.status)) {
    return Break(absl::StrCat("rank ", rank, ": ", reply.status.message()));
  }
  pending.answered[rank] = true;
  pending.replies[rank] = std::move(reply);
  if (--pending.missing > 0) return;

  absl::Status status;
  for (const worker::Reply& r : pending.replies) status.Update(r.status);
  Complete(std::move(pending.done), std::move(status), std::move(pending.replies));
  pending_.erase(found);
  if (!pending_.empty()) return;
  LetDrainedGo();
  drained_.notify_all();
}

void Core::Complete(WorkerGroup::Done done, absl::Status status,
                    std::vector<worker::Reply> replies) {
  completions_.Add(std::move(done), Outcome{std::move(status), std::move(replies)});
}

// ---------------------------------------------------------------------------- forming and breaking

void Core::Break(const std::string& reason) {
  if (state_ == State::kWaiting) return;
  const bool served = state_ == State::kServing;
  state_ = State::kWaiting;
  for (auto& [number, pending] : pending_) {
    Complete(std::move(pending.done), absl::AbortedError(reason), std::move(pending.replies));
  }
  pending_.clear();
  v1::CoordinatorMessage message = Message();
  message.mutable_abort()->set_reason(reason);
  SendToAll(message);
  for (Seat& seat : seats_) seat.aborting = seat.stream != nullptr;
  abort_deadline_ = Clock::now() + options_.form_timeout;
  if (served) {
    broken_.push_back(reason);
  } else {
    form_not_before_ = Clock::now() + FormationPause(form_failures_++);
  }
  LetDrainedGo();
  watch_wakes_.notify_one();
  former_wakes_.notify_one();
  drained_.notify_all();
}

void Core::Form() {
  ++epoch_;
  state_ = State::kForming;
  form_deadline_ = Clock::now() + options_.form_timeout;
  rendezvous_.clear();
  rendezvous_waiters_.clear();
  for (Seat& seat : seats_) {
    seat.ready = false;
    v1::CoordinatorMessage message = Message();
    message.mutable_configure()->set_fresh(seat.holder != seat.known.instance_id);
    message.mutable_configure()->set_timeout_ms(options_.form_timeout.count());
    seat.stream->Send(worker::EncodeMessage(message));
  }
  watch_wakes_.notify_one();
}

void Core::FormerLoop() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (!stopped_) {
    if (!broken_.empty()) {
      const std::string reason = std::move(broken_.front());
      broken_.pop_front();
      lock.unlock();
      observer_->OnBroken(reason);
      lock.lock();
    } else if (state_ == State::kWaiting && AllCanForm() && !stopping_) {
      if (Clock::now() >= form_not_before_) {
        Form();
      } else {
        former_wakes_.wait_until(lock, form_not_before_);
      }
    } else if (state_ == State::kForming && AllReady()) {
      const uint64_t epoch = epoch_;
      std::vector<bool> fresh;
      for (Seat& seat : seats_) {
        fresh.push_back(seat.holder != seat.known.instance_id);
        // From here on tokens may be written that whoever held the rank before does not have.
        if (fresh.back()) seat.holder = 0;
      }
      state_ = State::kServing;
      form_failures_ = 0;
      lock.unlock();
      observer_->OnFormed(epoch, fresh);
      lock.lock();
      // A rank counts as holding something once the observer has set it up. If the group broke
      // before that, the rank starts empty again.
      if (state_ == State::kServing && epoch_ == epoch) {
        for (Seat& seat : seats_) seat.holder = seat.known.instance_id;
      }
    } else {
      former_wakes_.wait(lock);
    }
  }
}

// ----------------------------------------------------------------------------------------- watch

Clock::time_point Core::WatchOnce(Clock::time_point now) {
  // At most one of these breaks the group; Break() empties what the loop runs over.
  const auto expired = std::find_if(pending_.begin(), pending_.end(), [&](const auto& entry) {
    return entry.second.deadline <= now;
  });
  if (expired != pending_.end()) {
    const Pending& pending = expired->second;
    Break(absl::StrCat("command ", expired->first, " missed its deadline; no answer from ",
                       RanksThat([&](int rank) { return !pending.answered[rank]; })));
  }
  if (state_ == State::kForming && form_deadline_ <= now) {
    Break(absl::StrCat("not connected in time: ",
                       RanksThat([&](int rank) { return !seats_[rank].ready; })));
  }
  std::vector<Stream> silent;
  std::vector<Stream> stuck;
  for (const auto& [stream, peer] : peers_) {
    if (peer.heard + options_.heartbeat_timeout <= now) {
      silent.push_back(stream);
    } else if (peer.rank >= 0 && seats_[peer.rank].aborting && abort_deadline_ <= now) {
      stuck.push_back(stream);
    }
  }
  for (const Stream& stream : silent) {
    Vacate(stream, "it is silent");
    stream->Cancel({grpc::StatusCode::UNAVAILABLE, "silent for too long"});
    peers_[stream].heard = now;  // so that the stream is cancelled once a timeout, not in a loop
  }
  for (const Stream& stream : stuck) {
    Vacate(stream, "it does not leave the epoch");
    stream->Cancel({grpc::StatusCode::ABORTED, "did not leave the epoch in time"});
  }
  if (next_heartbeat_ <= now) {
    v1::CoordinatorMessage message = Message();
    message.mutable_heartbeat();
    SendToAll(message);
    next_heartbeat_ = now + options_.heartbeat_interval;
  }

  Clock::time_point next = next_heartbeat_;
  for (const auto& [number, pending] : pending_) next = std::min(next, pending.deadline);
  for (const auto& [stream, peer] : peers_) {
    next = std::min(next, peer.heard + options_.heartbeat_timeout);
  }
  if (state_ == State::kForming) next = std::min(next, form_deadline_);
  const bool aborting = std::any_of(seats_.begin(), seats_.end(), [](const Seat& seat) {
    return seat.stream != nullptr && seat.aborting;
  });
  if (aborting) next = std::min(next, abort_deadline_);
  return next;
}

void Core::WatchLoop() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (!stopped_) {
    watch_until_ = WatchOnce(Clock::now());
    watch_wakes_.wait_until(lock, watch_until_);
  }
}

// --------------------------------------------------------------------------------- start and stop

absl::Status Core::Start(GroupObserver* observer) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (started_) return absl::FailedPreconditionError("the group was started before");
  started_ = true;
  observer_ = observer;
  next_heartbeat_ = Clock::now();
  former_ = std::thread([this] { FormerLoop(); });
  watch_ = std::thread([this] { WatchLoop(); });
  return absl::OkStatus();
}

void Core::Stop() {
  {
    std::unique_lock<std::mutex> lock(mutex_);
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

std::vector<Member> Core::members() const {
  std::lock_guard<std::mutex> lock(mutex_);
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

bool Core::AllCanForm() const {
  return std::all_of(seats_.begin(), seats_.end(),
                     [](const Seat& seat) { return seat.stream != nullptr && !seat.aborting; });
}

bool Core::AllReady() const {
  return std::all_of(seats_.begin(), seats_.end(), [](const Seat& seat) { return seat.ready; });
}

std::string Core::RanksThat(const std::function<bool(int rank)>& predicate) const {
  std::vector<int> ranks;
  for (int rank = 0; rank < options_.size; ++rank) {
    if (predicate(rank)) ranks.push_back(rank);
  }
  return absl::StrCat(ranks.size() == 1 ? "rank " : "ranks ", absl::StrJoin(ranks, ", "));
}

v1::CoordinatorMessage Core::Message() const {
  v1::CoordinatorMessage message;
  message.set_epoch(epoch_);
  return message;
}

void Core::SendToAll(const v1::CoordinatorMessage& message) {
  const grpc::ByteBuffer bytes = worker::EncodeMessage(message);
  for (const Seat& seat : seats_) {
    if (seat.stream != nullptr) seat.stream->Send(bytes);
  }
}

// Ends a stream that is not wanted.
class RefusedStream : public grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer> {
 public:
  explicit RefusedStream(const grpc::Status& status) { Finish(status); }
  void OnDone() override { delete this; }
};

class RemoteGroupImpl
    : public RemoteGroup,
      private v1::GroupService::WithRawCallbackMethod_Session<v1::GroupService::Service> {
 public:
  explicit RemoteGroupImpl(const RemoteGroupOptions& options)
      : core_(std::make_shared<Core>(options)) {}
  ~RemoteGroupImpl() override { core_->Stop(); }

  void AddTo(grpc::ServerBuilder& builder) override {
    const int limit =
        static_cast<int>(std::min<size_t>(core_->options().max_message_bytes, INT32_MAX));
    builder.SetMaxReceiveMessageSize(limit);
    builder.SetMaxSendMessageSize(limit);
    builder.RegisterService(static_cast<v1::GroupService::Service*>(this));
  }
  int size() const override { return core_->options().size; }
  worker::Device device() const override { return core_->options().device; }
  absl::Status Start(GroupObserver* observer) override { return core_->Start(observer); }
  void Submit(std::shared_ptr<const worker::Command> command, Done done) override {
    core_->Submit(std::move(command), std::move(done));
  }
  std::vector<Member> members() const override { return core_->members(); }
  void Stop() override { core_->Stop(); }

 private:
  grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* Session(
      grpc::CallbackServerContext* context) override {
    if (const auto& access = core_->options().access; access != nullptr) {
      const absl::Status allowed = access->Authorize(*context, {Role::kWorker}).status();
      if (!allowed.ok()) return new RefusedStream(ToGrpcStatus(allowed));
    }
    Stream stream;
    if (!core_->Accept(context, &stream)) {
      return new RefusedStream({grpc::StatusCode::UNAVAILABLE, "the coordinator is stopping"});
    }
    return stream.get();  // kept alive by itself
  }

  const std::shared_ptr<Core> core_;
};

}  // namespace

std::unique_ptr<RemoteGroup> CreateRemoteGroup(const RemoteGroupOptions& options) {
  return std::make_unique<RemoteGroupImpl>(options);
}

}  // namespace tributary::service
