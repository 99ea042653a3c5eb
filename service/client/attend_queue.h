// The calls in flight on one stream: which is sent next, what a failure means, when one is overdue.
//
// No threads, no clock, no gRPC: the pipe brings those. Calls are known by rising ids, and two
// rules keep what callers rely on.
//
// Calls of one sequence are sent in the order of their ids, repeats included: while a call waits to
// be repeated, later ones of its sequences wait behind it.
//
// A call that was in flight together with an earlier one of its sequence may be refused
// (OUT_OF_RANGE) only because that one had to be repeated, or will have to be: its answer may still
// be under way. It is repeated then, when the earlier one is over.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "service/client/attend_message.h"
#include "service/client/client.h"
#include "service/client/region_pool.h"
#include "tributary/v1/attention.pb.h"

namespace tributary::client {

using Clock = std::chrono::steady_clock;

struct PendingCall {
  AttendCall call;
  std::function<void(absl::Status)> done;
  std::chrono::milliseconds timeout{0};
  Clock::time_point deadline;

  // The message; `placed` when its tensors are in it or in the slot.
  v1::AttendRequest request;
  std::optional<RegionPool::Slot> slot;
  InPlace in_place;
  bool placed = false;
  bool cancelled = false;  // the caller wants no answer any more
  int registration = 0;    // of call.device, when it was placed
  bool forgotten = false;  // the service did not know that registration

  // The rest belongs to the queue.
  std::vector<uint64_t> sequences;  // hashes of (cache, sequence), sorted
  int failures = 0;
  int regions_lost = 0;  // failures because the service did not know a region
  Clock::time_point not_before;
  bool overtaken = false;  // an earlier call of a sequence was repeated while this was in flight
  bool alone = false;      // not to be sent while an earlier call of a sequence is in flight
};
using CallPtr = std::shared_ptr<PendingCall>;

class AttendQueue {
 public:
  // `dice` gives numbers of [0, 1).
  AttendQueue(int max_attempts, std::function<double()> dice);

  // Gives the call its id (request.request_id), and returns that.
  uint64_t Add(CallPtr call);
  // Notes that the caller wants no answer any more; false when no such call is here.
  bool Cancel(uint64_t id);

  // The next call to send, now in flight; null when none may be sent.
  CallPtr NextToSend(Clock::time_point now);
  bool CanSend(Clock::time_point now) const;
  // A call whose tensors must be placed before it can be sent; it stays in the queue.
  CallPtr NextToPlace(Clock::time_point now) const;

  // Takes a call in flight out; null when there is none with this id.
  CallPtr TakeSent(uint64_t id);
  std::vector<CallPtr> TakeAllSent();
  // Takes out a call that is not in flight.
  void RemoveUnsent(const CallPtr& call);
  // Takes out everything.
  std::vector<CallPtr> TakeAll();

  // Puts a taken call that failed back, to be repeated. False: the failure is final.
  bool Repeat(const CallPtr& call, const absl::Status& failure, Clock::time_point now);
  // Counts the failure to connect for all that waited for the connection, and takes out those for
  // which it is final.
  std::vector<CallPtr> FailWaiting(const absl::Status& failure, Clock::time_point now);

  // Takes out calls that are overdue or cancelled: those in flight, and the others.
  struct Ended {
    std::vector<CallPtr> sent;
    std::vector<CallPtr> unsent;
  };
  Ended TakeEnded(Clock::time_point now);
  // When there is next something to do, if nothing else happens.
  Clock::time_point NextEvent(Clock::time_point now) const;

 private:
  using Calls = std::map<uint64_t, CallPtr>;

  Calls::const_iterator Sendable(Clock::time_point now) const;
  bool EarlierInFlight(const PendingCall& call) const;
  // Whether the failure may be followed by another attempt, and from when on.
  bool MayRepeat(PendingCall& call, const absl::Status& failure, Clock::time_point now);

  const int max_attempts_;
  const std::function<double()> dice_;
  uint64_t next_id_ = 1;
  Calls sent_;
  Calls unsent_;
};

}  // namespace tributary::client
