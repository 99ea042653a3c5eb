// How groups form and break, and what is watched meanwhile.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "service/workers/remote_core.h"
#include "worker/rpc/conversion.h"

namespace tributary::service {
namespace {

// Between attempts to form a group whose ranks are there but cannot reach each other.
constexpr std::chrono::milliseconds kFirstPause{50};
constexpr std::chrono::milliseconds kLongestPause{2'000};

std::chrono::milliseconds FormationPause(int failures) {
  return std::min(kLongestPause, kFirstPause * (1 << std::min(failures, 10)));
}

}  // namespace

// ---------------------------------------------------------------------------- forming and breaking

void RemoteCore::Break(const std::string& reason) {
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
  for (RankState& state : Ranks()) state.aborting = state.stream != nullptr;
  abort_deadline_ = Clock::now() + options_.form_timeout;
  has_formed_ = forms_once_;
  if (served || forms_once_) {
    broken_.push_back(reason);
  } else {
    form_not_before_ = Clock::now() + FormationPause(form_failures_++);
    if (!stopping_) join_log_.NotFormed(reason);
  }
  LetDrainedGo();
  watch_wakes_.NotifyOne();
  former_wakes_.NotifyOne();
  drained_.NotifyAll();
}

void RemoteCore::LeaveOutStale() {
  uint64_t last = options_.identity.formed_epoch;
  for (const RankState& state : ranks_) {
    if (state.held.has_value()) last = std::max(last, state.held->last.epoch);
  }
  for (RankState& state : ranks_) {
    // A group is given commands when all of its ranks have joined.
    if (!state.held.has_value() || state.held->joined_epoch < last) state.holder = 0;
  }
}

void RemoteCore::Form() {
  if (adopting_) LeaveOutStale();
  ++epoch_;
  configured_ = true;
  state_ = State::kForming;
  form_deadline_ = Clock::now() + options_.form_timeout;
  rendezvous_.clear();
  rendezvous_waiters_.clear();
  for (RankState& state : Ranks()) {
    state.ready = false;
    v1::CoordinatorMessage message = Message();
    message.mutable_configure()->set_size(size_);
    message.mutable_configure()->set_shard_ranks(shard_ranks_);
    message.mutable_configure()->set_fresh(state.holder != state.known.instance_id);
    message.mutable_configure()->set_timeout_ms(options_.form_timeout.count());
    message.mutable_configure()->set_protocol_version(GroupProtocol());
    state.stream->Send(worker::EncodeMessage(message));
  }
  watch_wakes_.NotifyOne();
}

void RemoteCore::FormerLoop() {
  MutexLock lock(mutex_);
  while (!stopped_) {
    if (!broken_.empty()) {
      const std::string reason = std::move(broken_.front());
      broken_.pop_front();
      lock.Unlock();
      observer_->OnBroken(reason);
      lock.Lock();
    } else if (!leaving_.empty()) {
      const int rank = leaving_.front();
      leaving_.pop_front();
      if (rank >= size_) continue;
      lock.Unlock();
      if (!observer_->OnLeaving(rank)) LetGo(rank);
      lock.Lock();
    } else if (state_ == State::kWaiting && AllCanForm() && !has_formed_ && !stopping_ &&
               !replaced_) {
      if (Clock::now() >= form_not_before_ && options_.store != nullptr && stored_ <= epoch_) {
        // Without the lock: the store's thread may want it for something else first.
        const uint64_t next = epoch_ + 1;
        lock.Unlock();
        options_.store->OnEpoch(next);
        lock.Lock();
        stored_ = next;
      } else if (Clock::now() >= form_not_before_) {
        Form();
      } else {
        former_wakes_.WaitUntil(mutex_, form_not_before_);
      }
    } else if (state_ == State::kForming && AllReady()) {
      Serve();
    } else {
      former_wakes_.Wait(mutex_);
    }
  }
}

void RemoteCore::Serve() {
  const uint64_t epoch = epoch_;
  std::vector<bool> fresh;
  std::vector<uint64_t> holders;
  std::vector<std::optional<worker::Holdings>> held;
  const bool adopting = std::exchange(adopting_, false);
  for (RankState& state : Ranks()) {
    fresh.push_back(state.holder != state.known.instance_id);
    holders.push_back(state.known.instance_id);
    // From here on tokens may be written that whoever held the rank before does not have.
    if (fresh.back()) state.holder = 0;
    held.push_back(fresh.back() ? std::nullopt : std::move(state.held));
    state.held.reset();
  }
  state_ = State::kServing;
  form_failures_ = 0;
  mutex_.Unlock();
  if (options_.store != nullptr) options_.store->OnFormed(epoch, holders);
  if (adopting) observer_->OnAdopted(held);
  observer_->OnFormed(epoch, fresh);
  mutex_.Lock();
  // A rank counts as holding something once the observer has set it up. If the group broke before
  // that, the rank starts empty again.
  if (state_ == State::kServing && epoch_ == epoch) {
    for (RankState& state : Ranks()) state.holder = state.known.instance_id;
    for (const auto& [stream, peer] : peers_) {
      if (peer.leaving && peer.rank >= 0) leaving_.push_back(peer.rank);
    }
  }
}

// ----------------------------------------------------------------------------------------- watch

RemoteCore::Clock::time_point RemoteCore::WatchOnce(Clock::time_point now) {
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
    Break(absl::StrCat(
        "not connected in time: ",
        RanksThat([&](int rank) TRIBUTARY_REQUIRES(mutex_) { return !ranks_[rank].ready; })));
  }
  if (state_ == State::kWaiting && started_ && !stopping_) {
    const auto absent = [&](int rank)
                            TRIBUTARY_REQUIRES(mutex_) { return ranks_[rank].stream == nullptr; };
    if (std::any_of(Ranks().begin(), Ranks().end(),
                    [](const RankState& state) { return state.stream == nullptr; })) {
      join_log_.Waits(RanksThat(absent));
    }
  }
  std::vector<Stream> silent;
  std::vector<Stream> stuck;
  for (const auto& [stream, peer] : peers_) {
    if (peer.heard + options_.heartbeat_timeout <= now) {
      silent.push_back(stream);
    } else if (peer.rank >= 0 && ranks_[peer.rank].aborting && abort_deadline_ <= now) {
      stuck.push_back(stream);
    }
  }
  for (const Stream& stream : silent) {
    Vacate(stream, "it is silent");
    stream->Cancel({grpc::StatusCode::UNAVAILABLE, "silent for too long"});
    peers_[stream].heard = now;  // so that the stream is cancelled once per timeout, not in a loop
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
  const bool aborting = std::any_of(ranks_.begin(), ranks_.end(), [](const RankState& state) {
    return state.stream != nullptr && state.aborting;
  });
  if (aborting) next = std::min(next, abort_deadline_);
  return next;
}

void RemoteCore::WatchLoop() {
  const MutexLock lock(mutex_);
  while (!stopped_) {
    watch_until_ = WatchOnce(Clock::now());
    watch_wakes_.WaitUntil(mutex_, watch_until_);
  }
}

}  // namespace tributary::service
