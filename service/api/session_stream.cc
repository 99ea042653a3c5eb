#include "service/api/session_stream.h"

#include <utility>

#include "base/status/errors.h"
#include "base/status/grpc_status.h"
#include "service/api/byte_budget.h"
#include "service/api/raw_methods.h"

namespace tributary::service {

std::shared_ptr<SessionStream> SessionStream::Begin(Coordinator* coordinator, CallContext call,
                                                    bool local, Limits limits) {
  std::shared_ptr<SessionStream> stream(
      new SessionStream(coordinator, std::move(call), local, std::move(limits)));
  const MutexLock lock(stream->mutex_);
  stream->self_ = stream;
  stream->StartRead(&stream->reading_);
  return stream;
}

void SessionStream::OnReadDone(bool ok) {
  if (ok) {
    const absl::Status small = CheckMessage(reading_.Length(), limits_.max_message_bytes);
    const absl::StatusOr<std::shared_ptr<v1::SessionRequest>> request =
        small.ok() ? ParseMessage<v1::SessionRequest>(&reading_) : small;
    if (request.ok()) {
      Handle(**request);
    } else {
      Refuse(request.status());
    }
    const MutexLock lock(mutex_);
    reading_.Clear();
    paused_ = true;
    return ReadOn();
  }
  // The host closed its side, or is gone: in both cases nobody hands layers over any more.
  SessionPtr session;
  {
    const MutexLock lock(mutex_);
    session = session_;
    if (session == nullptr) {
      over_ = true;
      return FinishIfOver();
    }
  }
  Leave(session);
}

void SessionStream::Leave(const SessionPtr& session) {
  coordinator_->sessions().Abandon(session, endpoint_.load());
}

void SessionStream::Handle(v1::SessionRequest& request) {
  SessionPtr session;
  {
    const MutexLock lock(mutex_);
    if (over_ || finished_) return;
    session = session_;
    const bool first = !std::exchange(opened_, true);
    const bool begins = request.body_case() == v1::SessionRequest::kOpen ||
                        request.body_case() == v1::SessionRequest::kJoin;
    if (first != begins) {
      over_ = true;
      why_ =
          InvalidField("open", first ? "must be the first message" : "is the first message only");
      if (session == nullptr) return FinishIfOver();
    }
  }
  switch (request.body_case()) {
    case v1::SessionRequest::kOpen:
    case v1::SessionRequest::kJoin: {
      if (session != nullptr) return Leave(session);
      SessionPtr opened = BeginSession(request);
      {
        const MutexLock lock(mutex_);
        if (!over_) {
          session_ = std::move(opened);
          return;
        }
      }
      // It has ended meanwhile, or its caller may not have it any more.
      if (opened != nullptr) Leave(opened);
      return;
    }
    case v1::SessionRequest::kSubmit:
      if (endpoint_ > 0) return Refuse(InvalidField("submit", "is what endpoint 0 sends"));
      if (session != nullptr) coordinator_->sessions().Submit(session, request.submit());
      return;
    case v1::SessionRequest::kProbed:
      if (session != nullptr) coordinator_->sessions().Probed(session, request.probed());
      return;
    case v1::SessionRequest::kClose:
      if (session != nullptr && endpoint_ == 0) coordinator_->sessions().Close(session);
      return;
    case v1::SessionRequest::kLayer: {
      if (session == nullptr) return;
      const absl::Status taken =
          coordinator_->sessions().Layer(session, std::move(*request.mutable_layer()));
      if (!taken.ok()) Refuse(taken);
      return;
    }
    case v1::SessionRequest::BODY_NOT_SET:
      break;
  }
  Refuse(InvalidField("body", "is missing, or not of this kind of session"));
}

SessionPtr SessionStream::BeginSession(const v1::SessionRequest& request) {
  Sessions& sessions = coordinator_->sessions();
  if (request.has_open()) {
    return sessions.Open(request.open(), call_, local_, shared_from_this());
  }
  endpoint_ = request.join().endpoint();
  return sessions.Join(request.join(), call_, local_, shared_from_this());
}

void SessionStream::ReadOn() {
  if (!paused_ || finished_ || !why_.ok()) return;
  if (session_ != nullptr && !Sessions::HasRoom(session_)) return;
  paused_ = false;
  StartRead(&reading_);
}

void SessionStream::OnRoom() {
  const MutexLock lock(mutex_);
  ReadOn();
}

// A stream that is not being read learns of it only here.
void SessionStream::OnCancel() {
  SessionPtr session;
  {
    const MutexLock lock(mutex_);
    session = session_;
  }
  if (session != nullptr) Leave(session);
}

void SessionStream::Refuse(const absl::Status& why) {
  SessionPtr session;
  {
    const MutexLock lock(mutex_);
    if (over_ || finished_ || !why_.ok()) return;
    why_ = why;
    session = session_;
    if (session == nullptr) {
      over_ = true;
      return FinishIfOver();
    }
  }
  Leave(session);
}

void SessionStream::OnReply(v1::SessionReply reply) {
  const MutexLock lock(mutex_);
  if (finished_) return;
  replies_.push_back(std::make_unique<grpc::ByteBuffer>(SerializeMessage(reply)));
  if (replies_.size() == 1) StartWrite(replies_.front().get());
}

void SessionStream::OnEnd(const absl::Status& why) {
  const MutexLock lock(mutex_);
  over_ = true;
  if (why_.ok()) why_ = why;
  session_ = nullptr;
  FinishIfOver();
}

void SessionStream::OnWriteDone(bool ok) {
  const MutexLock lock(mutex_);
  if (!ok) {
    replies_.clear();  // the host is gone; the read says so, too
  } else {
    replies_.pop_front();
    if (!replies_.empty()) StartWrite(replies_.front().get());
  }
  FinishIfOver();
}

void SessionStream::FinishIfOver() {
  if (finished_ || !over_ || !replies_.empty()) return;
  finished_ = true;
  Finish(ToGrpcStatus(why_));
}

void SessionStream::OnDone() {
  std::shared_ptr<SessionStream> self;
  const MutexLock lock(mutex_);
  self = std::move(self_);
}

}  // namespace tributary::service
