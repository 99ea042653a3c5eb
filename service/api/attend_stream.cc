#include "service/api/attend_stream.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status/errors.h"
#include "base/status/grpc_status.h"
#include "base/status/rpc_errors.h"

namespace tributary::service {

std::shared_ptr<AttendStream> AttendStream::Begin(Coordinator* coordinator, CallContext call,
                                                  int max_in_flight,
                                                  std::shared_ptr<CallQuota> quota,
                                                  std::string traceparent) {
  auto cancelled = std::make_shared<std::atomic<bool>>(false);
  call.cancelled = cancelled;
  std::shared_ptr<AttendStream> stream(new AttendStream(coordinator, std::move(call),
                                                        std::move(cancelled), max_in_flight,
                                                        std::move(quota), std::move(traceparent)));
  const MutexLock lock(stream->mutex_);
  stream->self_ = stream;
  stream->ReadOn();
  return stream;
}

AttendStream::AttendStream(Coordinator* coordinator, CallContext call,
                           std::shared_ptr<std::atomic<bool>> cancelled, int max_in_flight,
                           std::shared_ptr<CallQuota> quota, std::string traceparent)
    : coordinator_(coordinator),
      call_(std::move(call)),
      cancelled_(std::move(cancelled)),
      max_in_flight_(max_in_flight),
      quota_(std::move(quota)),
      traceparent_(std::move(traceparent)) {}

void AttendStream::Drain() {
  const MutexLock lock(mutex_);
  draining_ = true;
  FinishIfOver();
}

// Backpressure: a stream with enough calls in flight is not read, and HTTP/2 flow control makes the
// client wait.
void AttendStream::ReadOn() {
  if (reading_on_ || reads_over_ || finished_ ||
      in_flight_.size() + replies_.size() >= max_in_flight_) {
    return;
  }
  reading_ = std::make_shared<v1::AttendRequest>();
  reading_on_ = true;
  StartRead(reading_.get());
}

void AttendStream::OnReadDone(bool ok) {
  std::shared_ptr<v1::AttendRequest> request;
  {
    const MutexLock lock(mutex_);
    request = std::exchange(reading_, nullptr);
    if (!ok) {
      reading_on_ = false;
      reads_over_ = true;
      return FinishIfOver();
    }
    if (finished_) return;
    if (!in_flight_.insert(request->request_id()).second) {
      auto reply = std::make_unique<v1::AttendReply>();
      reply->set_request_id(request->request_id());
      *reply->mutable_status() = ToRpcStatus(InvalidField(
          "request_id", absl::StrCat(request->request_id(), " is in flight on this stream")));
      replies_.push_back(std::move(reply));
      if (replies_.size() == 1) WriteOn();
      reading_on_ = false;
      return ReadOn();
    }
  }
  // Nobody starts the next read before this call was accepted: calls begin in the order sent.
  Call(std::move(request));
  const MutexLock lock(mutex_);
  reading_on_ = false;
  ReadOn();
}

void AttendStream::Call(std::shared_ptr<const v1::AttendRequest> request) {
  CallRecord record = coordinator_->observer().OnCallBegun(
      Method::kAttendStream, request->traceparent().empty() ? traceparent_ : request->traceparent(),
      request->ByteSizeLong());
  record.request_id = request->request_id();
  absl::StatusOr<CallQuota::Admission> admission = quota_->Admit(call_.caller);
  if (!admission.ok()) return Reply(record, admission.status());
  const auto held = std::make_shared<CallQuota::Admission>(*std::move(admission));
  CallContext call = call_;
  call.trace = record.trace;
  call.trace.span_id = record.span_id;
  coordinator_->Attend(std::move(request), call,
                       [self = shared_from_this(), record, held](auto result) {
                         held->reset();  // before the caller can know, who may call again at once
                         self->Reply(record, std::move(result));
                       });
}

void AttendStream::Reply(const CallRecord& call, absl::StatusOr<v1::AttendReply> result) {
  const absl::Status status = result.status();
  auto reply = std::make_unique<v1::AttendReply>();
  if (result.ok()) {
    *reply = *std::move(result);
  } else {
    *reply->mutable_status() = ToRpcStatus(result.status());
  }
  reply->set_request_id(call.request_id);
  coordinator_->observer().OnCallEnded(call, status, reply->ByteSizeLong());
  const MutexLock lock(mutex_);
  in_flight_.erase(call.request_id);
  if (finished_) return;
  if (!cancelled_->load()) {
    replies_.push_back(std::move(reply));
    if (replies_.size() == 1) WriteOn();
  } else {
    ReadOn();  // no write will: a stream that was full learns only by reading that it is over
  }
  FinishIfOver();
}

void AttendStream::WriteOn() { StartWrite(replies_.front().get()); }

void AttendStream::OnWriteDone(bool ok) {
  const MutexLock lock(mutex_);
  if (!ok) {
    replies_.clear();  // the client is gone
    reads_over_ = true;
  } else {
    replies_.pop_front();
    if (!replies_.empty()) WriteOn();
  }
  ReadOn();
  FinishIfOver();
}

void AttendStream::OnCancel() { cancelled_->store(true); }

void AttendStream::FinishIfOver() {
  if (finished_ || !in_flight_.empty() || !replies_.empty()) return;
  if (!reads_over_ && !draining_) return;
  finished_ = true;
  if (reads_over_) {
    Finish(grpc::Status::OK);
  } else {
    Finish(ToGrpcStatus(
        Unavailable("DRAINING", "the service is shutting down", std::chrono::seconds(1))));
  }
}

void AttendStream::OnDone() {
  std::shared_ptr<AttendStream> self;
  const MutexLock lock(mutex_);
  self = std::move(self_);
}

}  // namespace tributary::service
