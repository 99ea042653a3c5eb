#include "worker/rpc/worker_stream.h"

#include <utility>

namespace tributary::worker {

std::shared_ptr<WorkerStream> WorkerStream::Begin(grpc::CallbackServerContext* context,
                                                  std::shared_ptr<Events> events) {
  std::shared_ptr<WorkerStream> stream(new WorkerStream(context, std::move(events)));
  stream->self_ = stream;
  stream->StartRead(&stream->incoming_);
  return stream;
}

WorkerStream::WorkerStream(grpc::CallbackServerContext* context, std::shared_ptr<Events> events)
    : context_(context), events_(std::move(events)), peer_(context->peer()) {}

void WorkerStream::Send(grpc::ByteBuffer message) {
  const MutexLock lock(mutex_);
  if (closed_) return;
  outgoing_.push_back(std::move(message));
  if (!write_under_way_) Proceed();
}

void WorkerStream::Close(grpc::Status status) {
  const MutexLock lock(mutex_);
  if (closed_) return;
  closed_ = true;
  status_ = std::move(status);
  if (!write_under_way_) Proceed();
}

void WorkerStream::Cancel(grpc::Status status) {
  const MutexLock lock(mutex_);
  if (gone_) return;
  if (!closed_) {
    closed_ = true;
    status_ = std::move(status);
  }
  outgoing_.clear();
  context_->TryCancel();
  if (!write_under_way_) Proceed();
}

// Calls to gRPC never run a reaction on the calling thread, so holding the mutex is safe.
void WorkerStream::Proceed() {
  if (!outgoing_.empty()) {
    writing_ = outgoing_.front();  // shares the slices
    outgoing_.pop_front();
    write_under_way_ = true;
    StartWrite(&writing_);
  } else if (closed_ && !finished_) {
    finished_ = true;
    Finish(status_);
  }
}

void WorkerStream::OnReadDone(bool ok) {
  if (!ok) {
    events_->OnEnd(self_);
    return Close(grpc::Status::OK);
  }
  events_->OnMessage(self_, incoming_);
  incoming_.Clear();
  StartRead(&incoming_);
}

void WorkerStream::OnWriteDone(bool ok) {
  const MutexLock lock(mutex_);
  write_under_way_ = false;
  writing_.Clear();
  // The stream is broken; reading ends too, and that is where it is told.
  if (!ok) outgoing_.clear();
  Proceed();
}

void WorkerStream::OnDone() {
  {
    const MutexLock lock(mutex_);
    gone_ = true;
    closed_ = true;
    outgoing_.clear();
  }
  const std::shared_ptr<WorkerStream> self = std::move(self_);
  events_->OnGone(self);
}

}  // namespace tributary::worker
