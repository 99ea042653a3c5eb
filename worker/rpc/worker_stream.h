// The coordinator's end of a session: one worker's stream.
//
// Writes queue, so that senders never wait for a slow worker; reading goes on all the time.
#pragma once

#include <grpcpp/server_context.h>
#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/server_callback.h>

#include <deque>
#include <memory>
#include <mutex>
#include <string>

namespace tributary::worker {

class WorkerStream : public grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>,
                     public std::enable_shared_from_this<WorkerStream> {
 public:
  // Told what happens on a stream, on gRPC's threads: must not block. One call at a time for each
  // stream.
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

  // Keeps itself (and `events`) alive until OnGone.
  static std::shared_ptr<WorkerStream> Begin(grpc::CallbackServerContext* context,
                                             std::shared_ptr<Events> events);

  // In the order of calls. Dropped when the stream is closed.
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

  // Writes what is next, or finishes. Call with the mutex held and no write under way.
  void Proceed();

  grpc::CallbackServerContext* const context_;  // valid until OnDone
  const std::shared_ptr<Events> events_;
  const std::string peer_;
  std::shared_ptr<WorkerStream> self_;
  grpc::ByteBuffer incoming_;

  std::mutex mutex_;
  std::deque<grpc::ByteBuffer> outgoing_;
  grpc::ByteBuffer writing_;
  bool write_under_way_ = false;
  bool closed_ = false;    // nothing more is queued
  bool finished_ = false;  // Finish() was called
  bool gone_ = false;
  grpc::Status status_;
};

}  // namespace tributary::worker
