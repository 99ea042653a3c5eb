// One AttendStream: reads on while there is room for another call in flight, answers calls as they
// are done.
#pragma once

#include <grpcpp/grpcpp.h>

#include <atomic>
#include <deque>
#include <memory>
#include <mutex>
#include <string>

#include "absl/container/flat_hash_set.h"
#include "service/api/call_quota.h"
#include "service/coordinator/coordinator.h"
#include "tributary/v1/attention.pb.h"

namespace tributary::service {

// Keeps itself alive until gRPC and the last call are done with it.
class AttendStream final : public grpc::ServerBidiReactor<v1::AttendRequest, v1::AttendReply>,
                           public std::enable_shared_from_this<AttendStream> {
 public:
  // `traceparent`: of calls that bring none of their own.
  static std::shared_ptr<AttendStream> Begin(Coordinator* coordinator, CallContext call,
                                             int max_in_flight, std::shared_ptr<CallQuota> quota,
                                             std::string traceparent);

  // Ends the stream with UNAVAILABLE when the calls in flight are answered.
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
  // With the lock held: whatever can be started now.
  void ReadOn();
  void WriteOn();
  void FinishIfOver();

  Coordinator* const coordinator_;
  const CallContext call_;
  const std::shared_ptr<std::atomic<bool>> cancelled_;
  const size_t max_in_flight_;
  const std::shared_ptr<CallQuota> quota_;
  const std::string traceparent_;

  std::mutex mutex_;
  std::shared_ptr<AttendStream> self_;  // until OnDone
  std::shared_ptr<v1::AttendRequest> reading_;
  bool reading_on_ = false;  // from the start of a read until its call was accepted
  bool reads_over_ = false;  // the client sends no more, or is gone
  bool draining_ = false;
  bool finished_ = false;
  absl::flat_hash_set<uint64_t> in_flight_;  // request ids, until their reply is queued
  std::deque<std::unique_ptr<v1::AttendReply>> replies_;  // the first is being written
};

}  // namespace tributary::service
