#include "service/client/attend_queue.h"

#include <algorithm>
#include <utility>

#include "absl/container/flat_hash_set.h"
#include "absl/hash/hash.h"
#include "service/client/retry.h"

namespace tributary::client {
namespace {

std::vector<uint64_t> SequencesOf(const AttendCall& call) {
  std::vector<uint64_t> sequences;
  sequences.reserve(call.entries.size());
  // Two sequences of one hash would wait for each other, no more.
  for (const AttendEntry& entry : call.entries) {
    sequences.push_back(absl::HashOf(call.cache_id, entry.sequence_id));
  }
  std::sort(sequences.begin(), sequences.end());
  return sequences;
}

bool Share(const std::vector<uint64_t>& a, const std::vector<uint64_t>& b) {
  auto x = a.begin();
  auto y = b.begin();
  while (x != a.end() && y != b.end()) {
    if (*x == *y) return true;
    if (*x < *y) {
      ++x;
    } else {
      ++y;
    }
  }
  return false;
}

}  // namespace

AttendQueue::AttendQueue(int max_attempts, std::function<double()> dice)
    : max_attempts_(max_attempts), dice_(std::move(dice)) {}

uint64_t AttendQueue::Add(CallPtr call) {
  const uint64_t id = next_id_++;
  call->request.set_request_id(id);
  call->sequences = SequencesOf(call->call);
  unsent_.emplace_hint(unsent_.end(), id, std::move(call));
  return id;
}

AttendQueue::Calls::const_iterator AttendQueue::Sendable(Clock::time_point now) const {
  absl::flat_hash_set<uint64_t> held_back;
  for (auto it = unsent_.begin(); it != unsent_.end(); ++it) {
    const PendingCall& call = *it->second;
    const bool ready =
        call.placed && call.not_before <= now && !(call.alone && EarlierInFlight(call));
    // The usual case, first in the queue and ready, looks nothing up.
    if (ready &&
        (held_back.empty() || std::none_of(call.sequences.begin(), call.sequences.end(),
                                           [&](uint64_t s) { return held_back.contains(s); }))) {
      return it;
    }
    held_back.insert(call.sequences.begin(), call.sequences.end());
  }
  return unsent_.end();
}

bool AttendQueue::EarlierInFlight(const PendingCall& call) const {
  const auto own = sent_.lower_bound(call.request.request_id());
  return std::any_of(sent_.begin(), own, [&](const auto& earlier) {
    return Share(earlier.second->sequences, call.sequences);
  });
}

bool AttendQueue::CanSend(Clock::time_point now) const { return Sendable(now) != unsent_.end(); }

CallPtr AttendQueue::NextToSend(Clock::time_point now) {
  const auto it = Sendable(now);
  if (it == unsent_.end()) return nullptr;
  CallPtr call = it->second;
  unsent_.erase(it);
  call->overtaken = false;
  sent_.emplace(call->request.request_id(), call);
  return call;
}

CallPtr AttendQueue::NextToPlace(Clock::time_point now) const {
  for (const auto& [id, call] : unsent_) {
    if (!call->placed && call->not_before <= now) return call;
  }
  return nullptr;
}

CallPtr AttendQueue::TakeSent(uint64_t id) {
  const auto it = sent_.find(id);
  if (it == sent_.end()) return nullptr;
  CallPtr call = std::move(it->second);
  sent_.erase(it);
  return call;
}

std::vector<CallPtr> AttendQueue::TakeAllSent() {
  std::vector<CallPtr> taken;
  taken.reserve(sent_.size());
  for (auto& [id, call] : sent_) taken.push_back(std::move(call));
  sent_.clear();
  return taken;
}

void AttendQueue::RemoveUnsent(const CallPtr& call) { unsent_.erase(call->request.request_id()); }

std::vector<CallPtr> AttendQueue::TakeAll() {
  std::vector<CallPtr> taken = TakeAllSent();
  for (auto& [id, call] : unsent_) taken.push_back(std::move(call));
  unsent_.clear();
  return taken;
}

bool AttendQueue::MayRepeat(PendingCall& call, const absl::Status& failure, Clock::time_point now) {
  // Bounded by the repeats of the earlier call, so it counts as no attempt of its own.
  if (absl::IsOutOfRange(failure) && (call.overtaken || EarlierInFlight(call))) {
    call.not_before = now;
    call.alone = true;
    return true;
  }
  const bool region_lost = IsForgottenRegion(failure);
  if (!region_lost && !IsTransient(failure)) return false;
  if (region_lost && ++call.regions_lost >= kRegionAttempts) return false;
  if (!MayAttempt(++call.failures, max_attempts_)) return false;
  call.not_before =
      region_lost ? now : now + RetryDelay(call.failures, RetryDelayOf(failure), dice_());
  // An answer now is worth more than a deadline later.
  return call.not_before < call.deadline;
}

bool AttendQueue::Repeat(const CallPtr& call, const absl::Status& failure, Clock::time_point now) {
  if (!MayRepeat(*call, failure, now)) return false;
  const uint64_t id = call->request.request_id();
  for (auto later = sent_.upper_bound(id); later != sent_.end(); ++later) {
    if (Share(later->second->sequences, call->sequences)) later->second->overtaken = true;
  }
  unsent_.emplace(id, call);
  return true;
}

std::vector<CallPtr> AttendQueue::FailWaiting(const absl::Status& failure, Clock::time_point now) {
  std::vector<CallPtr> final;
  for (auto it = unsent_.begin(); it != unsent_.end();) {
    CallPtr& call = it->second;
    // Those that wait for their tensors or their own delay did not wait for the connection.
    if (!call->placed || call->not_before > now || MayRepeat(*call, failure, now)) {
      ++it;
      continue;
    }
    final.push_back(std::move(call));
    it = unsent_.erase(it);
  }
  return final;
}

bool AttendQueue::Cancel(uint64_t id) {
  for (const Calls* calls : {&sent_, &unsent_}) {
    const auto it = calls->find(id);
    if (it == calls->end()) continue;
    it->second->cancelled = true;
    return true;
  }
  return false;
}

AttendQueue::Ended AttendQueue::TakeEnded(Clock::time_point now) {
  const auto take = [now](Calls& calls) {
    std::vector<CallPtr> taken;
    for (auto it = calls.begin(); it != calls.end();) {
      if (it->second->deadline > now && !it->second->cancelled) {
        ++it;
        continue;
      }
      taken.push_back(std::move(it->second));
      it = calls.erase(it);
    }
    return taken;
  };
  return {take(sent_), take(unsent_)};
}

Clock::time_point AttendQueue::NextEvent(Clock::time_point now) const {
  Clock::time_point next = Clock::time_point::max();
  for (const auto& [id, call] : sent_) next = std::min(next, call->deadline);
  for (const auto& [id, call] : unsent_) {
    next = std::min(next, call->deadline);
    if (call->not_before > now) next = std::min(next, call->not_before);
  }
  return next;
}

}  // namespace tributary::client
