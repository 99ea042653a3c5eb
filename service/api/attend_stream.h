// One AttendStream. It reads requests while there is room for another call in flight, and answers
// each call when it is done.
#pragma once

#include <grpcpp/grpcpp.h>

#include <atomic>
#include <chrono>
#include <deque>
#include <memory>
#include <string>

#include "absl/container/flat_hash_map.h"
#include "base/sync/mutex.h"
#include "service/api/byte_budget.h"
#include "service/api/call_quota.h"
#include "service/api/long_answers.h"
#include "service/api/open_calls.h"
#include "service/api/stream_watch.h"
#include "service/coordinator/coordinator.h"
#include "tributary/v1/attention.pb.h"

namespace tributary::service {

// What bounds a stream.
struct StreamLimits {
  size_t max_message_bytes = size_t{64} << 20;
  int max_in_flight = 256;           // calls
  std::shared_ptr<CallQuota> calls;  // counts each of them
  std::shared_ptr<ByteBudget> bytes;
  CallQuota::Admission place;  // among its caller's streams; kept as long as the stream
  OpenCalls::Mark open;        // likewise
  LongAnswers* long_answers;   // outlives the stream
};

// Thread safe. It keeps itself alive until gRPC and the last call are done with it.
class AttendStream final : public grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>,
                           public WatchedStream,
                           public std::enable_shared_from_this<AttendStream> {
 public:
  // `context` lives until OnDone. `call`: what all calls of the stream have in common.
  // `traceparent` stands for calls that bring none of their own.
  static std::shared_ptr<AttendStream> Begin(Coordinator* coordinator,
                                             grpc::CallbackServerContext* context, CallContext call,
                                             StreamLimits limits, std::string traceparent);

  // The stream ends with UNAVAILABLE as soon as the calls in flight are answered.
  void Drain();
  // Calls in flight are cancelled, and their replies dropped.
  void End(const absl::Status& why) override;
  void EndIfStuckSince(std::chrono::steady_clock::time_point since) override;

 private:
  using Cancellation = std::shared_ptr<std::atomic<bool>>;

  AttendStream(Coordinator* coordinator, grpc::CallbackServerContext* context, CallContext call,
               std::shared_ptr<std::atomic<bool>> cancelled, StreamLimits limits,
               std::string traceparent);

  void OnReadDone(bool ok) override;
  void OnWriteDone(bool ok) override;
  void OnCancel() override;
  void OnDone() override;

  // The caller has room for another message.
  void OnRoom();
  void Call(std::shared_ptr<const v1::AttendRequest> request, Cancellation cancelled);
  // `bytes`: what the call counts for; null when it was not let in.
  void Reply(const CallRecord& call, absl::StatusOr<v1::AttendReply> result,
             ByteBudget::ChargePtr bytes);
  // These start whatever can be started now.
  void ReadOn() TRIBUTARY_REQUIRES(mutex_);
  void WriteOn() TRIBUTARY_REQUIRES(mutex_);
  void FinishIfOver() TRIBUTARY_REQUIRES(mutex_);

  Coordinator* const coordinator_;
  const CallContext call_;
  const std::shared_ptr<std::atomic<bool>> cancelled_;
  const StreamLimits limits_;
  const std::string traceparent_;

  Mutex mutex_;
  grpc::CallbackServerContext* context_ TRIBUTARY_GUARDED_BY(mutex_);  // null after OnDone
  std::shared_ptr<AttendStream> self_ TRIBUTARY_GUARDED_BY(mutex_);    // until OnDone
  // gRPC's while a read is under way, and then OnReadDone's; there is one at a time.
  grpc::ByteBuffer reading_;
  // From the start of a read until its call was accepted.
  bool reading_on_ TRIBUTARY_GUARDED_BY(mutex_) = false;
  // OnRoom will be called; nothing is read until then.
  bool awaits_room_ TRIBUTARY_GUARDED_BY(mutex_) = false;
  // The client sends no more, or is gone.
  bool reads_over_ TRIBUTARY_GUARDED_BY(mutex_) = false;
  bool draining_ TRIBUTARY_GUARDED_BY(mutex_) = false;
  absl::Status ended_ TRIBUTARY_GUARDED_BY(mutex_);  // what End was called with
  // Why nothing more is read; the stream ends with it once calls in flight are answered.
  absl::Status unreadable_ TRIBUTARY_GUARDED_BY(mutex_);
  bool finished_ TRIBUTARY_GUARDED_BY(mutex_) = false;
  // By the ids of requests whose reply is not queued yet: how each is cancelled by itself.
  absl::flat_hash_map<uint64_t, Cancellation> in_flight_ TRIBUTARY_GUARDED_BY(mutex_);
  struct Queued {
    std::unique_ptr<grpc::ByteBuffer> reply;
    ByteBudget::ChargePtr bytes;
  };
  std::chrono::steady_clock::time_point writing_since_ TRIBUTARY_GUARDED_BY(mutex_);
  // The first is being written. Charges end without the lock.
  std::deque<Queued> replies_ TRIBUTARY_GUARDED_BY(mutex_);
};

}  // namespace tributary::service
