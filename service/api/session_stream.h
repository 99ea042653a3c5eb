// One AttendSession: a session lives as long as its stream, and as those of its other endpoints.
#pragma once

#include <grpcpp/grpcpp.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <memory>

#include "absl/status/status.h"
#include "base/sync/mutex.h"
#include "service/api/call_quota.h"
#include "service/api/open_calls.h"
#include "service/api/stream_watch.h"
#include "service/coordinator/coordinator.h"
#include "tributary/v1/session.pb.h"

namespace tributary::service {

// Thread safe. It keeps itself alive until gRPC and the session are done with it.
class SessionStream final : public grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>,
                            public SessionListener,
                            public WatchedStream,
                            public std::enable_shared_from_this<SessionStream> {
 public:
  struct Limits {
    size_t max_message_bytes = size_t{64} << 20;
    CallQuota::Admission place;  // its place among the caller's streams; held by the stream
    OpenCalls::Mark open;        // marks the call as open; held by the stream
  };

  // `local`: whether the caller is at the service's Unix socket, and so on this machine.
  static std::shared_ptr<SessionStream> Begin(Coordinator* coordinator, CallContext call,
                                              bool local, Limits limits);

  void End(const absl::Status& why) override { Refuse(why); }
  // A host that does not read cannot hold much: replies are small, and as many as its steps.
  void EndIfStuckSince(std::chrono::steady_clock::time_point) override {}

 private:
  SessionStream(Coordinator* coordinator, CallContext call, bool local, Limits limits)
      : coordinator_(coordinator),
        call_(std::move(call)),
        local_(local),
        limits_(std::move(limits)) {}

  void OnReadDone(bool ok) override;
  void OnCancel() override;
  void OnWriteDone(bool ok) override;
  void OnDone() override;

  void OnReply(v1::SessionReply reply) override;
  void OnEnd(const absl::Status& why) override;
  void OnRoom() override;

  // Carries out the first message. Null: it was refused.
  SessionPtr BeginSession(const v1::SessionRequest& request);
  // The session ends with this stream.
  void Leave(const SessionPtr& session);
  // Does what a message of the host asks for.
  void Handle(v1::SessionRequest& request);
  // Reads the next message once there is room for it, unless the session is to end.
  void ReadOn() TRIBUTARY_REQUIRES(mutex_);
  void Refuse(const absl::Status& why);
  void FinishIfOver() TRIBUTARY_REQUIRES(mutex_);

  Coordinator* const coordinator_;
  const CallContext call_;
  const bool local_;
  const Limits limits_;
  std::atomic<int32_t> endpoint_{0};  // of the session; set by the first message
  grpc::ByteBuffer reading_;  // the message that is being read, until OnReadDone has handled it

  Mutex mutex_;
  std::shared_ptr<SessionStream> self_ TRIBUTARY_GUARDED_BY(mutex_);  // until OnDone
  SessionPtr session_ TRIBUTARY_GUARDED_BY(mutex_);
  bool opened_ TRIBUTARY_GUARDED_BY(mutex_) = false;    // the first message has come
  bool over_ TRIBUTARY_GUARDED_BY(mutex_) = false;      // OnEnd was called, or there is no session
  bool paused_ TRIBUTARY_GUARDED_BY(mutex_) = false;    // a read is to be started
  bool finished_ TRIBUTARY_GUARDED_BY(mutex_) = false;  // Finish has been called
  absl::Status why_ TRIBUTARY_GUARDED_BY(mutex_);       // not OK: why the session is to end
  // The first of them is being written.
  std::deque<std::unique_ptr<grpc::ByteBuffer>> replies_ TRIBUTARY_GUARDED_BY(mutex_);
};

}  // namespace tributary::service
