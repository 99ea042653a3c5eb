// The coordinator's end of a session: one worker's stream.
//
// Writes queue, so that senders never wait for a slow worker; reading goes on all the time.
#pragma once

#include <grpcpp/server_context.h>
#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/server_callback.h>

#include <deque>
#include <memory>
#include <string>

#include "base/sync/mutex.h"

namespace tributary::worker {

class WorkerStream : public grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>,
                     public std::enable_shared_from_this<WorkerStream> {
 public:
  // Receives what happens on a stream. gRPC's threads call it, so it must not block; calls for one
  // stream come one at a time.
  class Events {
   public:
    virtual ~Events() = default;
    virtual void OnMessage(const std::shared_ptr<WorkerStream>& stream,
                           const grpc::ByteBuffer& message) = 0;
    // The worker will say nothing more.
    virtual void OnEnd(const std::shared_ptr<WorkerStream>& stream) = 0;
    // Nothing will happen on the stream any more.
    virtual void OnGone(const std::shared_ptr<WorkerStream>& stream) = 0;
  };

  // Starts to read. The stream keeps itself, and `events`, alive until OnGone.
  static std::shared_ptr<WorkerStream> Begin(grpc::CallbackServerContext* context,
                                             std::shared_ptr<Events> events);

  // Queues a message; messages are written in the order of calls. Once the stream is closed they
  // are dropped.
  void Send(grpc::ByteBuffer message);
  // Ends the stream with `status` after what was sent. May be called again; only Cancel() has an
  // effect then.
  void Close(grpc::Status status);
  // Ends the stream at once: the peer does not read, or must not be heard any more.
  void Cancel(grpc::Status status);

  // The network address of the worker.
  const std::string& peer() const { return peer_; }

  void OnReadDone(bool ok) override;
  void OnWriteDone(bool ok) override;
  void OnDone() override;

 private:
  WorkerStream(grpc::CallbackServerContext* context, std::shared_ptr<Events> events);

  // Writes the next message, or finishes. No write is under way.
  void Proceed() TRIBUTARY_REQUIRES(mutex_);

  grpc::CallbackServerContext* const context_;  // valid until OnDone
  const std::shared_ptr<Events> events_;
  const std::string peer_;
  std::shared_ptr<WorkerStream> self_;
  grpc::ByteBuffer incoming_;

  Mutex mutex_;
  std::deque<grpc::ByteBuffer> outgoing_ TRIBUTARY_GUARDED_BY(mutex_);
  grpc::ByteBuffer writing_ TRIBUTARY_GUARDED_BY(mutex_);
  bool write_under_way_ TRIBUTARY_GUARDED_BY(mutex_) = false;
  bool closed_ TRIBUTARY_GUARDED_BY(mutex_) = false;    // nothing more is queued
  bool finished_ TRIBUTARY_GUARDED_BY(mutex_) = false;  // Finish() was called
  bool gone_ TRIBUTARY_GUARDED_BY(mutex_) = false;
  grpc::Status status_ TRIBUTARY_GUARDED_BY(mutex_);
};

}  // namespace tributary::worker
