// One AttendStream. It reads requests while there is room for another call in flight, and answers
// each call when it is done.
#pragma once

#include <grpcpp/grpcpp.h>

#include <atomic>
#include <deque>
#include <memory>
#include <string>

#include "absl/container/flat_hash_set.h"
#include "base/sync/mutex.h"
#include "service/api/call_quota.h"
#include "service/coordinator/coordinator.h"
#include "tributary/v1/attention.pb.h"

namespace tributary::service {

// Thread safe. It keeps itself alive until gRPC and the last call are done with it.
class AttendStream final : public grpc::ServerBidiReactor<v1::AttendRequest, v1::AttendReply>,
                           public std::enable_shared_from_this<AttendStream> {
 public:
  // `call`: what all calls of the stream have in common. `quota` counts each of them.
  // `traceparent` stands for calls that bring none of their own.
  static std::shared_ptr<AttendStream> Begin(Coordinator* coordinator, CallContext call,
                                             int max_in_flight, std::shared_ptr<CallQuota> quota,
                                             std::string traceparent);

  // The stream ends with UNAVAILABLE as soon as the calls in flight are answered.
  void Drain();

 private:
  AttendStream(Coordinator* coordinator, CallContext call,
               std::shared_ptr<std::atomic<bool>> cancelled, int max_in_flight,
               std::shared_ptr<CallQuota> quota, std::string traceparent);

  void OnReadDone(bool ok) override;
  void OnWriteDone(bool ok) override;
  void OnCancel() override;
  void OnDone() override;

  void Call(std::shared_ptr<const v1::AttendRequest> request);
  void Reply(const CallRecord& call, absl::StatusOr<v1::AttendReply> result);
  // These start whatever can be started now.
  void ReadOn() TRIBUTARY_REQUIRES(mutex_);
  void WriteOn() TRIBUTARY_REQUIRES(mutex_);
  void FinishIfOver() TRIBUTARY_REQUIRES(mutex_);

  Coordinator* const coordinator_;
  const CallContext call_;
  const std::shared_ptr<std::atomic<bool>> cancelled_;
  const size_t max_in_flight_;
  const std::shared_ptr<CallQuota> quota_;
  const std::string traceparent_;

  Mutex mutex_;
  std::shared_ptr<AttendStream> self_ TRIBUTARY_GUARDED_BY(mutex_);  // until OnDone
  std::shared_ptr<v1::AttendRequest> reading_ TRIBUTARY_GUARDED_BY(mutex_);
  // From the start of a read until its call was accepted.
  bool reading_on_ TRIBUTARY_GUARDED_BY(mutex_) = false;
  // The client sends no more, or is gone.
  bool reads_over_ TRIBUTARY_GUARDED_BY(mutex_) = false;
  bool draining_ TRIBUTARY_GUARDED_BY(mutex_) = false;
  bool finished_ TRIBUTARY_GUARDED_BY(mutex_) = false;
  // Ids of requests whose reply is not queued yet.
  absl::flat_hash_set<uint64_t> in_flight_ TRIBUTARY_GUARDED_BY(mutex_);
  // The first is being written.
  std::deque<std::unique_ptr<v1::AttendReply>> replies_ TRIBUTARY_GUARDED_BY(mutex_);
};

}  // namespace tributary::service
