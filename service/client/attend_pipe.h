// Many Attend calls over one AttendStream.
//
// Three kinds of threads meet here. Callers' threads copy tensors and, when the stream is idle,
// write. gRPC's threads read replies and run the callers' callbacks. One thread of the pipe keeps
// time (deadlines, repeats, connecting again) and sleeps otherwise. No callback runs under the
// lock.
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/sync/mutex.h"
#include "service/client/attend_queue.h"
#include "service/client/client.h"
#include "service/client/device_regions.h"
#include "service/client/host_buffers.h"
#include "service/client/region_pool.h"
#include "tributary/v1/attention.grpc.pb.h"

namespace tributary::client {

struct AttendPipeOptions {
  int max_attempts = 0;
  uint64_t max_message_bytes = 0;
  std::string lease;  // that the streams present; empty: none
};

class AttendPipe {
 public:
  // All outlive the pipe.
  AttendPipe(v1::AttentionService::Stub* stub, RegionPool* regions, DeviceRegions* devices,
             const HostBuffers* buffers, AttendPipeOptions options);
  // Ends calls in flight with CANCELLED. It must not be called from within a callback.
  ~AttendPipe();
  AttendPipe(const AttendPipe&) = delete;
  AttendPipe& operator=(const AttendPipe&) = delete;

  // `timeout` holds for this call, repeats included. `done` runs once, on a thread that is not the
  // caller's. Returns the call's number, or 0 when it is refused.
  uint64_t Submit(const AttendCall& call, std::chrono::milliseconds timeout,
                  std::function<void(absl::Status)> done);
  // Ends a call that is not over with CANCELLED.
  void Cancel(uint64_t call);

 private:
  class Stream;
  struct Finished {
    CallPtr call;
    absl::Status status;
  };
  enum class Placing { kDone, kLater };

  // Puts the tensors into a slot or, where there is none, into the message. kLater: they only fit
  // into a region, and one is on its way; or they lie in memory that is just being shared again.
  absl::StatusOr<Placing> Place(PendingCall& call);
  static void Finish(Finished finished);

  // The thread that keeps time runs KeepTime, which calls the others. PlaceNext and FinishAll
  // release the lock while they copy tensors or run callbacks.
  void KeepTime();
  void PlaceNext(const CallPtr& call) TRIBUTARY_REQUIRES(mutex_);
  void CollectEnded(Clock::time_point now) TRIBUTARY_REQUIRES(mutex_);
  void CancelAll() TRIBUTARY_REQUIRES(mutex_);
  void FinishAll() TRIBUTARY_REQUIRES(mutex_);

  void StartStream() TRIBUTARY_REQUIRES(mutex_);
  // What is to be written next; null for nothing.
  CallPtr NextToWrite() TRIBUTARY_REQUIRES(mutex_);
  // Releases the lock while it writes.
  void WriteNext() TRIBUTARY_REQUIRES(mutex_);
  void Wake() TRIBUTARY_REQUIRES(mutex_);

  // Called by the stream, on gRPC's threads.
  void OnWritten(Stream* stream, bool ok);
  void OnReply(const v1::AttendReply& reply);
  void OnReadEnd(Stream* stream);
  void OnStreamEnd(Stream* stream, absl::Status status);
  void OnStreamGone();

  v1::AttentionService::Stub* const stub_;
  RegionPool* const regions_;
  DeviceRegions* const devices_;
  const HostBuffers* const buffers_;
  const AttendPipeOptions options_;

  Mutex mutex_;
  CondVar wake_;
  // Whether something has happened that the thread which keeps time must look at.
  bool changed_ TRIBUTARY_GUARDED_BY(mutex_) = false;
  bool stopping_ TRIBUTARY_GUARDED_BY(mutex_) = false;
  // Until when the thread that keeps time sleeps: a call that is due sooner wakes it.
  Clock::time_point wakes_ TRIBUTARY_GUARDED_BY(mutex_) = Clock::time_point::max();
  AttendQueue queue_ TRIBUTARY_GUARDED_BY(mutex_);
  // Their callbacks wait to be run by the thread that keeps time.
  std::vector<Finished> finished_ TRIBUTARY_GUARDED_BY(mutex_);
  Stream* stream_ TRIBUTARY_GUARDED_BY(mutex_) = nullptr;  // owns itself until its end
  int live_streams_ TRIBUTARY_GUARDED_BY(mutex_) = 0;
  // Slots of calls that were given up while in flight, by request id: the service may still use
  // them until it answers.
  std::map<uint64_t, RegionPool::Slot> abandoned_ TRIBUTARY_GUARDED_BY(mutex_);
  // Calls in flight on this stream whose cancellation the service has yet to be told.
  std::deque<uint64_t> cancelled_ TRIBUTARY_GUARDED_BY(mutex_);
  std::thread thread_;
};

}  // namespace tributary::client
