#include "service/api/attend_stream.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status/errors.h"
#include "base/status/grpc_status.h"
#include "base/status/rpc_errors.h"
#include "service/api/raw_methods.h"
#include "service/api/reply_bytes.h"

namespace tributary::service {
namespace {

// Beyond any limit on a call's time, and far from what would overflow a clock.
constexpr int64_t kLongestTimeoutMs = int64_t{24} * 3600 * 1000;

}  // namespace

std::shared_ptr<AttendStream> AttendStream::Begin(Coordinator* coordinator,
                                                  grpc::CallbackServerContext* context,
                                                  CallContext call, StreamLimits limits,
                                                  std::string traceparent) {
  auto cancelled = std::make_shared<std::atomic<bool>>(false);
  call.cancelled = cancelled;
  std::shared_ptr<AttendStream> stream(new AttendStream(coordinator, context, std::move(call),
                                                        std::move(cancelled), std::move(limits),
                                                        std::move(traceparent)));
  const MutexLock lock(stream->mutex_);
  stream->self_ = stream;
  stream->ReadOn();
  return stream;
}

AttendStream::AttendStream(Coordinator* coordinator, grpc::CallbackServerContext* context,
                           CallContext call, std::shared_ptr<std::atomic<bool>> cancelled,
                           StreamLimits limits, std::string traceparent)
    : coordinator_(coordinator),
      call_(std::move(call)),
      cancelled_(std::move(cancelled)),
      limits_(std::move(limits)),
      traceparent_(std::move(traceparent)),
      context_(context) {}

void AttendStream::Drain() {
  const MutexLock lock(mutex_);
  draining_ = true;
  FinishIfOver();
}

void AttendStream::End(const absl::Status& why) {
  std::deque<Queued> dropped;  // ends without the lock
  const MutexLock lock(mutex_);
  if (finished_ || !ended_.ok()) return;
  ended_ = why;
  cancelled_->store(true);
  while (replies_.size() > 1) {  // the first is being written
    dropped.push_back(std::move(replies_.back()));
    replies_.pop_back();
  }
  FinishIfOver();
}

void AttendStream::EndIfStuckSince(std::chrono::steady_clock::time_point since) {
  const MutexLock lock(mutex_);
  if (replies_.empty() || writing_since_ > since || context_ == nullptr) return;
  context_->TryCancel();
}

// Backpressure: a stream with enough calls in flight, or whose caller has enough bytes in flight,
// is not read, and HTTP/2 flow control makes the client wait.
void AttendStream::ReadOn() {
  if (reading_on_ || reads_over_ || finished_ || awaits_room_ || !ended_.ok() ||
      in_flight_.size() + replies_.size() >= static_cast<size_t>(limits_.max_in_flight)) {
    return;
  }
  const auto on_room = [weak = weak_from_this()] {
    if (const auto self = weak.lock()) self->OnRoom();
  };
  awaits_room_ = !limits_.bytes->HasRoom(call_.caller, on_room);
  if (awaits_room_) return;
  reading_on_ = true;
  StartRead(&reading_);
}

void AttendStream::OnRoom() {
  const MutexLock lock(mutex_);
  awaits_room_ = false;
  ReadOn();
}

void AttendStream::OnReadDone(bool ok) {
  absl::StatusOr<std::shared_ptr<v1::AttendRequest>> request = absl::CancelledError();
  if (ok) request = ParseMessage<v1::AttendRequest>(&reading_);
  const auto cancelled = std::make_shared<std::atomic<bool>>(false);
  {
    const MutexLock lock(mutex_);
    if (!request.ok()) {
      if (ok) unreadable_ = request.status();
      reading_on_ = false;
      reads_over_ = true;
      return FinishIfOver();
    }
    if (finished_) return;
    const uint64_t id = (*request)->request_id();
    if ((*request)->cancel()) {
      const auto call = in_flight_.find(id);
      if (call != in_flight_.end()) call->second->store(true);
      reading_on_ = false;
      return ReadOn();
    }
    if (!in_flight_.emplace(id, cancelled).second) {
      v1::AttendReply reply;
      reply.set_request_id(id);
      *reply.mutable_status() =
          ToRpcStatus(InvalidField("request_id", absl::StrCat(id, " is in flight on this stream")));
      replies_.push_back({std::make_unique<grpc::ByteBuffer>(SerializeMessage(reply)), nullptr});
      if (replies_.size() == 1) WriteOn();
      reading_on_ = false;
      return ReadOn();
    }
  }
  // Nobody starts the next read before this call was accepted: calls begin in the order sent.
  Call(*std::move(request), cancelled);
  {
    const MutexLock lock(mutex_);
    reading_on_ = false;
    ReadOn();
  }
  coordinator_->Lend();
}

void AttendStream::Call(std::shared_ptr<const v1::AttendRequest> request, Cancellation cancelled) {
  CallRecord record = coordinator_->observer().OnCallBegun(
      Method::kAttendStream, request->traceparent().empty() ? traceparent_ : request->traceparent(),
      request->ByteSizeLong());
  record.request_id = request->request_id();
  const size_t request_bytes = request->ByteSizeLong();
  if (absl::Status large = CheckMessage(request_bytes, limits_.max_message_bytes); !large.ok()) {
    return Reply(record, large, nullptr);
  }
  if (request->timeout_ms() < 0) {
    return Reply(record, InvalidField("timeout_ms", "must be >= 0"), nullptr);
  }
  absl::StatusOr<CallQuota::Admission> admission = limits_.calls->Admit(call_.caller);
  if (!admission.ok()) return Reply(record, admission.status(), nullptr);
  const auto held = std::make_shared<CallQuota::Admission>(*std::move(admission));
  absl::StatusOr<ByteBudget::ChargePtr> bytes =
      limits_.bytes->Take(call_.caller, static_cast<int64_t>(request_bytes));
  if (!bytes.ok()) return Reply(record, bytes.status(), nullptr);
  CallContext call = call_;
  call.lends = true;
  call.cancelled_alone = std::move(cancelled);
  if (request->timeout_ms() > 0) {
    const std::chrono::milliseconds timeout(std::min(request->timeout_ms(), kLongestTimeoutMs));
    call.deadline = std::min(call.deadline, std::chrono::steady_clock::now() + timeout);
  }
  call.charge_reply = [bytes = *bytes](size_t more) {
    return bytes->Add(static_cast<int64_t>(more));
  };
  call.trace = record.trace;
  call.trace.span_id = record.span_id;
  coordinator_->Attend(std::move(request), call,
                       [self = shared_from_this(), record, held, bytes = *bytes](auto result) {
                         held->reset();  // before the caller can know, who may call again at once
                         self->Reply(record, std::move(result), bytes);
                       });
}

void AttendStream::Reply(const CallRecord& call, absl::StatusOr<v1::AttendReply> result,
                         ByteBudget::ChargePtr bytes) {
  const absl::Status status = result.status();
  v1::AttendReply message;
  if (result.ok()) {
    message = *std::move(result);
  } else {
    *message.mutable_status() = ToRpcStatus(result.status());
  }
  message.set_request_id(call.request_id);
  auto reply = std::make_unique<grpc::ByteBuffer>(SerializeMessage(std::move(message)));
  const size_t reply_bytes = reply->Length();
  coordinator_->observer().OnCallEnded(call, status, reply_bytes);
  if (bytes != nullptr) bytes->Reduce(static_cast<int64_t>(reply_bytes));
  const MutexLock lock(mutex_);
  in_flight_.erase(call.request_id);
  if (finished_) return;
  if (!cancelled_->load()) {
    replies_.push_back({std::move(reply), std::move(bytes)});
    if (replies_.size() == 1) WriteOn();
  } else {
    ReadOn();  // no write will: a stream that was full learns only by reading that it is over
  }
  FinishIfOver();
}

void AttendStream::WriteOn() {
  writing_since_ = std::chrono::steady_clock::now();
  // Nothing else is written until OnWriteDone, and the stream does not end before it.
  const grpc::ByteBuffer* const reply = replies_.front().reply.get();
  limits_.long_answers->Send(reply->Length(), [this, reply] { StartWrite(reply); });
}

void AttendStream::OnWriteDone(bool ok) {
  std::deque<Queued> over;  // ends without the lock
  const MutexLock lock(mutex_);
  if (!ok) {
    over.swap(replies_);  // the client is gone
    reads_over_ = true;
  } else {
    over.push_back(std::move(replies_.front()));
    replies_.pop_front();
    if (!replies_.empty()) WriteOn();
  }
  ReadOn();
  FinishIfOver();
}

void AttendStream::OnCancel() { cancelled_->store(true); }

void AttendStream::FinishIfOver() {
  if (!finished_ && !ended_.ok() && replies_.empty()) {
    finished_ = true;
    return Finish(ToGrpcStatus(ended_));
  }
  if (finished_ || !in_flight_.empty() || !replies_.empty()) return;
  if (!reads_over_ && !draining_) return;
  finished_ = true;
  if (!unreadable_.ok()) {
    Finish(ToGrpcStatus(unreadable_));
  } else if (reads_over_) {
    Finish(grpc::Status::OK);
  } else {
    Finish(ToGrpcStatus(
        Unavailable("DRAINING", "the service is shutting down", std::chrono::seconds(1))));
  }
}

void AttendStream::OnDone() {
  std::shared_ptr<AttendStream> self;
  const MutexLock lock(mutex_);
  context_ = nullptr;
  self = std::move(self_);
}

}  // namespace tributary::service
