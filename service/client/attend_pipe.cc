#include "service/client/attend_pipe.h"

#include <algorithm>
#include <memory>
#include <optional>
#include <utility>

#include "absl/random/random.h"
#include "absl/strings/str_cat.h"
#include "base/status/grpc_status.h"
#include "base/status/rpc_errors.h"
#include "grpcpp/client_context.h"
#include "grpcpp/support/client_callback.h"
#include "service/client/attend_message.h"
#include "service/client/lease.h"
#include "service/client/retry.h"

namespace tributary::client {
namespace {

// Between two looks for a region that a call needs and that is on its way.
constexpr std::chrono::milliseconds kRegionPoll{10};
// Of the thread that keeps time, where nothing is due.
constexpr std::chrono::seconds kLongestSleep{30};

absl::Status Closed() { return absl::CancelledError("the client was closed"); }

// What the end of the stream means for a call that had no answer.
absl::Status StreamFailure(absl::Status status) {
  switch (status.code()) {
    // The peer is gone, or went away in the middle: the outcome is unknown, and repeating settles
    // it.
    case absl::StatusCode::kOk:
      return absl::UnavailableError("the service ended the stream");
    case absl::StatusCode::kCancelled:
    case absl::StatusCode::kInternal:
    case absl::StatusCode::kUnknown:
      return absl::UnavailableError(absl::StrCat("the stream broke: ", status.message()));
    default:
      return status;
  }
}

}  // namespace

// One connection's worth of AttendStream. Deletes itself when gRPC is done with it.
class AttendPipe::Stream final
    : public grpc::ClientBidiReactor<v1::AttendRequest, v1::AttendReply> {
 public:
  explicit Stream(AttendPipe* pipe) : pipe_(pipe) {}

  void Begin() {
    PresentLease(pipe_->options_.lease, &context_);
    pipe_->stub_->async()->AttendStream(&context_, this);
    // Writes begin outside of reactions, which the hold makes legal.
    AddHold();
    StartRead(&reply_);
    StartCall();
  }

  // The pipe's lock guards a stream's state. The pipe, which holds the lock when it calls what
  // follows, says so with this.
  void AssertLocked() const TRIBUTARY_ASSERTS_HELD(pipe_->mutex_) {}

  bool writable() const TRIBUTARY_REQUIRES(pipe_->mutex_) { return !ended_ && writing_ == nullptr; }
  bool answered() const TRIBUTARY_REQUIRES(pipe_->mutex_) { return answered_; }

  // No new writes; the stream goes when those that are just being started are.
  void End(bool cancel) TRIBUTARY_REQUIRES(pipe_->mutex_) {
    if (cancel) context_.TryCancel();
    ended_ = true;
    ReleaseWhenIdle();
  }
  void ReleaseWhenIdle() TRIBUTARY_REQUIRES(pipe_->mutex_) {
    if (!ended_ || starting_ > 0 || released_) return;
    released_ = true;
    RemoveHold();
  }

 private:
  friend class AttendPipe;

  void OnWriteDone(bool ok) override { pipe_->OnWritten(this, ok); }

  void OnReadDone(bool ok) override {
    if (!ok) return pipe_->OnReadEnd(this);
    const v1::AttendReply reply = std::move(reply_);
    {
      const MutexLock lock(pipe_->mutex_);
      answered_ = true;
    }
    // Before the reply is handled: copying results and callbacks do not hold up the next one.
    reply_.Clear();
    StartRead(&reply_);
    pipe_->OnReply(reply);
  }

  void OnDone(const grpc::Status& status) override {
    AttendPipe* const pipe = pipe_;
    pipe->OnStreamEnd(this, FromGrpcStatus(status));
    // The context holds the channel, and a thread of gRPC must not be the last to let go of that:
    // it would wait for itself. So the stream goes while the pipe, and with it the channel, stays.
    delete this;
    pipe->OnStreamGone();
  }

  AttendPipe* const pipe_;
  grpc::ClientContext context_;
  v1::AttendReply reply_;
  // The call being written; it keeps the message until that is done.
  CallPtr writing_ TRIBUTARY_GUARDED_BY(pipe_->mutex_);
  // Threads that have taken a call and not yet begun its write.
  int starting_ TRIBUTARY_GUARDED_BY(pipe_->mutex_) = 0;
  bool ended_ TRIBUTARY_GUARDED_BY(pipe_->mutex_) = false;
  bool released_ TRIBUTARY_GUARDED_BY(pipe_->mutex_) = false;
  bool answered_ TRIBUTARY_GUARDED_BY(pipe_->mutex_) = false;
};

AttendPipe::AttendPipe(v1::AttentionService::Stub* stub, RegionPool* regions,
                       DeviceRegions* devices, const HostBuffers* buffers,
                       AttendPipeOptions options)
    : stub_(stub),
      regions_(regions),
      devices_(devices),
      buffers_(buffers),
      options_(std::move(options)),
      queue_(options.max_attempts,
             [dice = std::make_shared<absl::BitGen>()] { return absl::Uniform(*dice, 0.0, 1.0); }),
      thread_([this] { KeepTime(); }) {}

AttendPipe::~AttendPipe() {
  {
    const MutexLock lock(mutex_);
    stopping_ = true;
    if (stream_ != nullptr) {
      stream_->AssertLocked();
      stream_->End(/*cancel=*/true);
    }
    Wake();
  }
  thread_.join();
}

uint64_t AttendPipe::Submit(const AttendCall& call, std::chrono::milliseconds timeout,
                            std::function<void(absl::Status)> done) {
  auto pending = std::make_shared<PendingCall>();
  pending->call = call;
  pending->done = std::move(done);
  absl::Status status = CheckCall(call);
  if (status.ok()) {
    pending->request = DescribeCall(call);
    const absl::StatusOr<Placing> placing = Place(*pending);
    status = placing.status();
    pending->placed = placing.ok() && *placing == Placing::kDone;
  }
  const MutexLock lock(mutex_);
  if (stopping_) status = Closed();
  if (!status.ok()) {
    finished_.push_back({std::move(pending), std::move(status)});
    Wake();
    return 0;
  }
  pending->timeout = timeout;
  pending->deadline = Clock::now() + timeout;
  const bool placed = pending->placed;
  const bool due_early = pending->deadline < wakes_;
  const uint64_t id = queue_.Add(std::move(pending));
  if (stream_ == nullptr || !placed || due_early) Wake();
  WriteNext();
  return id;
}

void AttendPipe::Cancel(uint64_t call) {
  const MutexLock lock(mutex_);
  if (queue_.Cancel(call)) Wake();
}

absl::StatusOr<AttendPipe::Placing> AttendPipe::Place(PendingCall& call) {
  bool coming = false;
  if (const DeviceRegion* device = call.call.device.get(); device != nullptr) {
    if (std::exchange(call.forgotten, false)) devices_->Renew(*device, call.registration);
    const std::optional<int> registration = devices_->Registration(*device);
    if (!registration.has_value()) return Placing::kLater;
    call.registration = *registration;
  } else {
    call.in_place = FindInPlace(call.call, *buffers_);
    const uint64_t copied = SharedBytes(call.call, call.in_place);
    if (copied > 0) call.slot = regions_->Acquire(copied, &coming);
  }
  const bool shared = call.slot.has_value();
  PlaceTensors(call.call, call.in_place, shared ? &*call.slot : nullptr, call.request);
  absl::Status status = CheckSize(call.call, call.request, options_.max_message_bytes);
  if (status.ok()) return Placing::kDone;
  const bool region_is_enough = SharedBytes(call.call, call.in_place) <= regions_->region_bytes();
  if (coming && region_is_enough) return Placing::kLater;
  return status;
}

void AttendPipe::Finish(Finished finished) {
  // The slot first: a callback that makes the next call finds its room free.
  finished.call->slot.reset();
  finished.call->done(std::move(finished.status));
}

void AttendPipe::Wake() {
  changed_ = true;
  wake_.NotifyAll();
}

void AttendPipe::KeepTime() {
  const MutexLock lock(mutex_);
  while (!stopping_) {
    changed_ = false;
    const Clock::time_point now = Clock::now();
    CollectEnded(now);
    if (!finished_.empty()) {
      FinishAll();
      continue;
    }
    if (const CallPtr call = queue_.NextToPlace(now); call != nullptr) {
      PlaceNext(call);
      continue;
    }
    if (stream_ == nullptr && queue_.CanSend(now)) StartStream();
    WriteNext();
    wakes_ = std::min(queue_.NextEvent(now), now + kLongestSleep);
    while (!changed_ && !stopping_) {
      if (!wake_.WaitUntil(mutex_, wakes_)) break;
    }
  }
  CancelAll();
}

void AttendPipe::FinishAll() {
  std::vector<Finished> finished = std::exchange(finished_, {});
  mutex_.Unlock();
  for (Finished& one : finished) Finish(std::move(one));
  mutex_.Lock();
}

void AttendPipe::PlaceNext(const CallPtr& call) {
  // Only this thread ends calls that are not placed, so the caller's buffers stay meanwhile.
  mutex_.Unlock();
  absl::StatusOr<Placing> placing = Place(*call);
  mutex_.Lock();
  if (!placing.ok()) {
    queue_.RemoveUnsent(call);
    finished_.push_back({call, std::move(placing).status()});
  } else if (*placing == Placing::kLater) {
    call->not_before = Clock::now() + kRegionPoll;
  } else {
    call->placed = true;
  }
}

void AttendPipe::CollectEnded(Clock::time_point now) {
  const auto why = [](const PendingCall& call) -> absl::Status {
    if (call.cancelled) return absl::CancelledError("cancelled by the caller");
    return absl::DeadlineExceededError(
        absl::StrCat("no answer within ", call.timeout.count(), " ms, repeats included"));
  };
  AttendQueue::Ended ended = queue_.TakeEnded(now);
  for (CallPtr& call : ended.sent) {
    const uint64_t id = call->request.request_id();
    if (call->cancelled) cancelled_.push_back(id);
    if (call->slot.has_value()) abandoned_.emplace(id, *std::exchange(call->slot, std::nullopt));
    absl::Status status = why(*call);
    finished_.push_back({std::move(call), std::move(status)});
  }
  for (CallPtr& call : ended.unsent) {
    absl::Status status = why(*call);
    finished_.push_back({std::move(call), std::move(status)});
  }
}

void AttendPipe::CancelAll() {
  // gRPC ends a cancelled stream promptly; until then it may touch calls.
  while (live_streams_ > 0) wake_.Wait(mutex_);
  for (CallPtr& call : queue_.TakeAll()) finished_.push_back({std::move(call), Closed()});
  while (!finished_.empty()) FinishAll();
}

void AttendPipe::StartStream() {
  stream_ = new Stream(this);
  ++live_streams_;
  stream_->Begin();
}

CallPtr AttendPipe::NextToWrite() {
  if (!cancelled_.empty()) {
    auto cancel = std::make_shared<PendingCall>();
    cancel->request.set_request_id(cancelled_.front());
    cancel->request.set_cancel(true);
    cancelled_.pop_front();
    return cancel;
  }
  const Clock::time_point now = Clock::now();
  CallPtr call = queue_.NextToSend(now);
  if (call == nullptr) return nullptr;
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(call->deadline - now);
  call->request.set_timeout_ms(std::max<int64_t>(left.count(), 1));
  return call;
}

void AttendPipe::WriteNext() {
  Stream* const stream = stream_;
  if (stream == nullptr) return;
  stream->AssertLocked();
  if (!stream->writable()) return;
  const CallPtr call = NextToWrite();
  if (call == nullptr) return;
  stream->writing_ = call;
  ++stream->starting_;
  // Serialising a large message is no reason to keep replies waiting.
  mutex_.Unlock();
  stream->StartWrite(&call->request);
  mutex_.Lock();
  --stream->starting_;
  stream->ReleaseWhenIdle();
}

void AttendPipe::OnWritten(Stream* stream, bool ok) {
  const MutexLock lock(mutex_);
  stream->AssertLocked();
  stream->writing_ = nullptr;
  if (!ok) return stream->End(/*cancel=*/true);
  WriteNext();
}

void AttendPipe::OnReadEnd(Stream* stream) {
  const MutexLock lock(mutex_);
  stream->AssertLocked();
  stream->End(/*cancel=*/false);
}

void AttendPipe::OnReply(const v1::AttendReply& reply) {
  absl::Status status = FromRpcStatus(reply.status());
  std::optional<RegionPool::Slot> unused;  // returned after the lock
  MutexLock lock(mutex_);
  CallPtr call = queue_.TakeSent(reply.request_id());
  if (call == nullptr) {
    if (auto node = abandoned_.extract(reply.request_id()); !node.empty()) {
      unused = std::move(node.mapped());
    }
    return;
  }
  if (!status.ok()) {
    const bool region_lost = IsForgottenRegion(status);
    if (region_lost) call->in_place.Forget();
    if (queue_.Repeat(call, status, Clock::now())) {
      if (region_lost && call->slot.has_value()) {
        regions_->Retire(*call->slot);
        unused = std::exchange(call->slot, std::nullopt);
        call->placed = false;
      } else if (region_lost) {
        call->forgotten = call->call.device != nullptr;
        call->placed = false;
      }
      Wake();
      return;
    }
  }
  // A later call of its sequences may have waited for this one.
  WriteNext();
  lock.Unlock();
  if (status.ok()) {
    status = TakeResults(call->call, call->in_place,
                         call->slot.has_value() ? &*call->slot : nullptr, reply);
  }
  Finish({std::move(call), std::move(status)});
}

void AttendPipe::OnStreamEnd(Stream* stream, absl::Status status) {
  std::vector<CallPtr> final;
  std::vector<RegionPool::Slot> slots;  // returned after the lock
  MutexLock lock(mutex_);
  stream->AssertLocked();
  status = stopping_ ? Closed() : StreamFailure(std::move(status));
  const Clock::time_point now = Clock::now();
  // A stream that never answered was, for all that waited, a failure to connect.
  if (!stream->answered()) final = queue_.FailWaiting(status, now);
  cancelled_.clear();
  for (auto& [id, slot] : std::exchange(abandoned_, {})) slots.push_back(std::move(slot));
  for (CallPtr& call : queue_.TakeAllSent()) {
    if (call->slot.has_value()) {
      slots.push_back(*std::exchange(call->slot, std::nullopt));
      call->placed = false;
    }
    if (!queue_.Repeat(call, status, now)) final.push_back(std::move(call));
  }
  // The service may still be at work on these.
  for (const RegionPool::Slot& slot : slots) regions_->Retire(slot);
  if (stream_ == stream) stream_ = nullptr;
  Wake();
  lock.Unlock();

  slots.clear();
  for (CallPtr& call : final) Finish({std::move(call), status});
}

void AttendPipe::OnStreamGone() {
  const MutexLock lock(mutex_);
  --live_streams_;
  wake_.NotifyAll();
}

}  // namespace tributary::client
