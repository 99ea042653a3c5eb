#include "service/client/session_stream.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status/grpc_status.h"
#include "base/status/rpc_errors.h"
#include "service/client/lease.h"

namespace tributary::client {
namespace {

// Outcomes that nobody asks for are forgotten, the oldest first.
constexpr size_t kMostOutcomes = 256;

// How long a write that failed waits to be told why. The call is over by then, so that the reader's
// thread hears of it as soon as it runs.
constexpr std::chrono::seconds kEndIsTold{10};

absl::Status Late(absl::string_view what) {
  return absl::DeadlineExceededError(absl::StrCat("the service did not ", what, " in time"));
}

}  // namespace

absl::StatusOr<std::unique_ptr<SessionStream>> SessionStream::Open(
    v1::AttentionService::StubInterface* stub, const v1::SessionRequest& first,
    const std::string& lease, std::chrono::steady_clock::time_point deadline, const Probe& probe) {
  std::unique_ptr<SessionStream> session(new SessionStream);
  PresentLease(lease, &session->context_);
  session->stream_ = stub->AttendSession(&session->context_);
  session->stream_->Write(first);  // the read says what came of it
  session->reader_ = std::thread([s = session.get()] { s->Read(); });
  MutexLock lock(session->mutex_);
  while (!session->is_open_ && session->why_.ok()) {
    if (session->asked_.has_value()) {
      const v1::SessionProbe asked = *std::exchange(session->asked_, std::nullopt);
      lock.Unlock();
      absl::Status answered = session->Answer(asked, probe);
      if (!answered.ok()) return answered;
      lock.Lock();
      continue;
    }
    if (!session->changed_.WaitUntil(session->mutex_, deadline)) return Late("open the session");
  }
  if (!session->is_open_) return session->why_;
  return session;
}

absl::Status SessionStream::Answer(const v1::SessionProbe& asked, const Probe& probe) {
  if (probe == nullptr) return absl::InternalError("the service asks for round trips unbidden");
  absl::StatusOr<v1::ProbeResult> result = probe(asked);
  if (!result.ok()) return result.status();
  v1::SessionRequest request;
  *request.mutable_probed() = *std::move(result);
  return Write(request);
}

SessionStream::~SessionStream() {
  context_.TryCancel();
  if (reader_.joinable()) reader_.join();
}

void SessionStream::Read() {
  v1::SessionReply reply;
  while (stream_->Read(&reply)) {
    const MutexLock lock(mutex_);
    Handle(reply);
    changed_.NotifyAll();
  }
  const absl::Status why = FromGrpcStatus(stream_->Finish());
  std::function<void(const absl::Status&)> on_end;
  {
    const MutexLock lock(mutex_);
    why_ = why.ok() ? absl::CancelledError("the session was closed") : why;
    on_end = on_end_;
    changed_.NotifyAll();
  }
  if (on_end) on_end(why);
}

void SessionStream::Handle(v1::SessionReply& reply) {
  switch (reply.body_case()) {
    case v1::SessionReply::kOpened:
      opened_ = reply.opened();
      is_open_ = true;
      return;
    case v1::SessionReply::kProbe:
      asked_ = std::move(*reply.mutable_probe());
      return;
    case v1::SessionReply::kAccepted:
      accepted_[reply.accepted().step_id()] = reply.accepted();
      return;
    case v1::SessionReply::kEnded:
      ended_[reply.ended().step_id()] =
          reply.ended().has_status() ? FromRpcStatus(reply.ended().status()) : absl::OkStatus();
      if (ended_.size() > kMostOutcomes) ended_.erase(ended_.begin());
      return;
    case v1::SessionReply::kLayer:
      layers_.push_back(std::move(*reply.mutable_layer()));
      return;
    case v1::SessionReply::BODY_NOT_SET:
      return;
  }
}

void SessionStream::OnEnd(std::function<void(const absl::Status&)> ended) {
  {
    const MutexLock lock(mutex_);
    if (why_.ok()) {
      on_end_ = std::move(ended);
      return;
    }
  }
  ended(status());
}

absl::Status SessionStream::Write(const v1::SessionRequest& request) {
  {
    const MutexLock lock(write_mutex_);
    if (stream_->Write(request)) return absl::OkStatus();
  }
  // A write fails because the call has ended, and may fail before the reader has seen that end.
  const absl::Status why = AwaitEnd(std::chrono::steady_clock::now() + kEndIsTold);
  return why.ok() ? absl::UnavailableError("the session's stream is broken") : why;
}

absl::StatusOr<v1::StepAccepted> SessionStream::Submit(
    const v1::SubmitStep& step, std::chrono::steady_clock::time_point deadline) {
  v1::SessionRequest request;
  *request.mutable_submit() = step;
  if (absl::Status written = Write(request); !written.ok()) return written;
  return AwaitAccepted(step.step_id(), deadline);
}

absl::StatusOr<v1::StepAccepted> SessionStream::AwaitAccepted(
    uint64_t step_id, std::chrono::steady_clock::time_point deadline) {
  const MutexLock lock(mutex_);
  while (true) {
    if (const auto found = accepted_.find(step_id); found != accepted_.end()) {
      v1::StepAccepted accepted = std::move(found->second);
      accepted_.erase(found);
      if (accepted.has_status()) return FromRpcStatus(accepted.status());
      return accepted;
    }
    // Steps are told of in order: this one was refused before the endpoint joined.
    if (!accepted_.empty() && accepted_.rbegin()->first > step_id) {
      return absl::FailedPreconditionError("the step was refused");
    }
    if (!why_.ok()) return why_;
    if (!changed_.WaitUntil(mutex_, deadline)) return Late("answer a step");
  }
}

absl::Status SessionStream::Await(uint64_t step_id,
                                  std::chrono::steady_clock::time_point deadline) {
  const MutexLock lock(mutex_);
  while (true) {
    if (const auto found = ended_.find(step_id); found != ended_.end()) return found->second;
    if (!why_.ok()) return why_;
    if (!changed_.WaitUntil(mutex_, deadline)) return Late("end a step");
  }
}

absl::Status SessionStream::SendLayer(v1::LayerInput layer) {
  v1::SessionRequest request;
  *request.mutable_layer() = std::move(layer);
  return Write(request);
}

absl::StatusOr<v1::LayerOutput> SessionStream::AwaitLayer(
    uint64_t step_id, int32_t layer, int32_t piece,
    std::chrono::steady_clock::time_point deadline) {
  const MutexLock lock(mutex_);
  while (true) {
    while (!layers_.empty()) {
      v1::LayerOutput output = std::move(layers_.front());
      layers_.pop_front();
      if (output.step_id() == step_id && output.layer() == layer && output.piece() == piece) {
        return output;
      }
    }
    if (!why_.ok()) return why_;
    if (!changed_.WaitUntil(mutex_, deadline)) return Late("finish a layer");
  }
}

absl::Status SessionStream::AwaitEnd(std::chrono::steady_clock::time_point deadline) const {
  const MutexLock lock(mutex_);
  while (why_.ok()) {
    if (!changed_.WaitUntil(mutex_, deadline)) break;
  }
  return why_;
}

absl::Status SessionStream::status() const {
  const MutexLock lock(mutex_);
  return why_;
}

absl::Status SessionStream::Close(std::chrono::steady_clock::time_point deadline) {
  v1::SessionRequest request;
  request.mutable_close();
  Write(request).IgnoreError();  // the end says why
  const MutexLock lock(mutex_);
  while (why_.ok()) {
    if (!changed_.WaitUntil(mutex_, deadline)) return Late("close the session");
  }
  return absl::IsCancelled(why_) ? absl::OkStatus() : why_;
}

}  // namespace tributary::client
