// Many Attend calls over one AttendStream.
//
// Callers' threads copy tensors and, when the stream is idle, write; gRPC's threads read replies
// and run the callers' callbacks; one thread of the pipe's own keeps time (deadlines, repeats,
// connecting again) and is otherwise asleep. No callback runs under the lock.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "service/client/attend_queue.h"
#include "service/client/client.h"
#include "service/client/device_regions.h"
#include "service/client/region_pool.h"
#include "tributary/v1/attention.grpc.pb.h"

namespace tributary::client {

struct AttendPipeOptions {
  std::chrono::milliseconds timeout{0};
  int max_attempts = 0;
  uint64_t max_message_bytes = 0;
};

class AttendPipe {
 public:
  // All outlive the pipe.
  AttendPipe(v1::AttentionService::Stub* stub, RegionPool* regions, DeviceRegions* devices,
             AttendPipeOptions options);
  // Calls in flight end with CANCELLED. Not from within a callback.
  ~AttendPipe();
  AttendPipe(const AttendPipe&) = delete;
  AttendPipe& operator=(const AttendPipe&) = delete;

  // `done` runs once, on a thread that is not the caller's.
  void Submit(const AttendCall& call, std::function<void(absl::Status)> done);

 private:
  class Stream;
  using Lock = std::unique_lock<std::mutex>;
  struct Finished {
    CallPtr call;
    absl::Status status;
  };
  enum class Placing { kDone, kLater };

  // Puts the tensors into a slot or, where there is none, into the message. kLater: they only fit
  // into a region, and one is on its way; or they lie in memory that is just being shared again.
  absl::StatusOr<Placing> Place(PendingCall& call);
  static void Finish(Finished finished);

  // Of the thread that keeps time.
  void KeepTime();
  void PlaceNext(Lock& lock, const CallPtr& call);
  void CollectOverdue(Clock::time_point now);
  void CancelAll(Lock& lock);

  // With the lock; WriteNext releases it while it writes.
  void StartStream();
  void WriteNext(Lock& lock);
  void Wake();

  // From the stream.
  void OnWritten(Stream* stream, bool ok);
  void OnReply(const v1::AttendReply& reply);
  void OnReadEnd(Stream* stream);
  void OnStreamEnd(Stream* stream, absl::Status status);
  void OnStreamGone();

  v1::AttentionService::Stub* const stub_;
  RegionPool* const regions_;
  DeviceRegions* const devices_;
  const AttendPipeOptions options_;

  std::mutex mutex_;
  std::condition_variable wake_;
  bool changed_ = false;  // something the thread that keeps time must look at
  bool stopping_ = false;
  AttendQueue queue_;
  std::vector<Finished> finished_;  // to be told by the thread that keeps time
  Stream* stream_ = nullptr;        // owns itself until its end
  int live_streams_ = 0;
  // Slots of calls that were given up while in flight, by request id: the service may still use
  // them until it answers.
  std::map<uint64_t, RegionPool::Slot> abandoned_;
  std::thread thread_;
};

}  // namespace tributary::client
