#include "service/attention_service.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <utility>

#include "service/grpc_status.h"

namespace tributary::service {
namespace {

// Deadlines inside are by the steady clock; gRPC's are by the system's.
std::chrono::steady_clock::time_point DeadlineOf(const grpc::CallbackServerContext& context) {
  using std::chrono::steady_clock;
  using std::chrono::system_clock;
  const system_clock::time_point deadline = context.deadline();
  const system_clock::duration left = deadline - system_clock::now();
  // gRPC's "no deadline" is centuries away, beyond what may be added to a steady time.
  if (left > std::chrono::hours(24 * 365)) return steady_clock::time_point::max();
  return steady_clock::now() + std::chrono::duration_cast<steady_clock::duration>(left);
}

// A unary call until its reply is sent.
class UnaryCall final : public grpc::ServerUnaryReactor {
 public:
  explicit UnaryCall(const grpc::CallbackServerContext& context) {
    call_.deadline = DeadlineOf(context);
    call_.cancelled = cancelled_;
  }

  const CallContext& call() const { return call_; }

  // The callback that ends this call with a result.
  template <typename Reply>
  std::function<void(absl::StatusOr<Reply>)> ReplyInto(Reply* reply) {
    return [this, reply](absl::StatusOr<Reply> result) {
      const absl::Status status = result.status();
      if (status.ok()) *reply = *std::move(result);
      Finish(ToGrpcStatus(status));
    };
  }

 private:
  void OnCancel() override { cancelled_->store(true, std::memory_order_release); }
  void OnDone() override { delete this; }

  const std::shared_ptr<std::atomic<bool>> cancelled_ = std::make_shared<std::atomic<bool>>(false);
  CallContext call_;
};

}  // namespace

AttentionServiceFront::AttentionServiceFront(Coordinator* coordinator, int max_calls_per_stream)
    : coordinator_(coordinator), max_calls_per_stream_(max_calls_per_stream) {
  SetMessageAllocatorFor_Append(&append_messages_);
  SetMessageAllocatorFor_Attend(&attend_messages_);
}

void AttentionServiceFront::DrainStreams() {
  std::vector<std::weak_ptr<service::AttendStream>> streams;
  {
    std::lock_guard lock(mutex_);
    draining_ = true;
    streams.swap(streams_);
  }
  for (const auto& weak : streams) {
    if (const auto stream = weak.lock()) stream->Drain();
  }
}

grpc::ServerBidiReactor<v1::AttendRequest, v1::AttendReply>* AttentionServiceFront::AttendStream(
    Context* context) {
  CallContext call;
  call.deadline = DeadlineOf(*context);
  const auto stream =
      service::AttendStream::Begin(coordinator_, std::move(call), max_calls_per_stream_);
  std::unique_lock lock(mutex_);
  if (draining_) {
    lock.unlock();
    stream->Drain();
    return stream.get();
  }
  streams_.erase(std::remove_if(streams_.begin(), streams_.end(),
                                [](const auto& weak) { return weak.expired(); }),
                 streams_.end());
  streams_.push_back(stream);
  return stream.get();
}

AttentionServiceFront::Reactor* AttentionServiceFront::CreateCache(
    Context* context, const v1::CreateCacheRequest* request, v1::CreateCacheReply* reply) {
  auto* call = new UnaryCall(*context);
  coordinator_->CreateCache(*request, call->ReplyInto(reply));
  return call;
}

AttentionServiceFront::Reactor* AttentionServiceFront::DeleteCache(
    Context* context, const v1::DeleteCacheRequest* request, v1::DeleteCacheReply* reply) {
  auto* call = new UnaryCall(*context);
  coordinator_->DeleteCache(*request, call->ReplyInto(reply));
  return call;
}

AttentionServiceFront::Reactor* AttentionServiceFront::OpenSequence(
    Context* context, const v1::OpenSequenceRequest* request, v1::OpenSequenceReply* reply) {
  auto* call = new UnaryCall(*context);
  coordinator_->OpenSequence(*request, call->call(), call->ReplyInto(reply));
  return call;
}

AttentionServiceFront::Reactor* AttentionServiceFront::ForkSequence(
    Context* context, const v1::ForkSequenceRequest* request, v1::ForkSequenceReply* reply) {
  auto* call = new UnaryCall(*context);
  coordinator_->ForkSequence(*request, call->call(), call->ReplyInto(reply));
  return call;
}

AttentionServiceFront::Reactor* AttentionServiceFront::TruncateSequence(
    Context* context, const v1::TruncateSequenceRequest* request,
    v1::TruncateSequenceReply* reply) {
  auto* call = new UnaryCall(*context);
  coordinator_->TruncateSequence(*request, call->call(), call->ReplyInto(reply));
  return call;
}

AttentionServiceFront::Reactor* AttentionServiceFront::CloseSequence(
    Context* context, const v1::CloseSequenceRequest* request, v1::CloseSequenceReply* reply) {
  auto* call = new UnaryCall(*context);
  coordinator_->CloseSequence(*request, call->call(), call->ReplyInto(reply));
  return call;
}

AttentionServiceFront::Reactor* AttentionServiceFront::Append(Context* context,
                                                              const v1::AppendRequest*,
                                                              v1::AppendReply* reply) {
  auto* call = new UnaryCall(*context);
  coordinator_->Append(decltype(append_messages_)::RequestOf(context), call->call(),
                       call->ReplyInto(reply));
  return call;
}

AttentionServiceFront::Reactor* AttentionServiceFront::Attend(Context* context,
                                                              const v1::AttendRequest*,
                                                              v1::AttendReply* reply) {
  auto* call = new UnaryCall(*context);
  coordinator_->Attend(decltype(attend_messages_)::RequestOf(context), call->call(),
                       call->ReplyInto(reply));
  return call;
}

AttentionServiceFront::Reactor* AttentionServiceFront::GetTopology(
    Context* context, const v1::GetTopologyRequest* request, v1::GetTopologyReply* reply) {
  auto* call = new UnaryCall(*context);
  call->ReplyInto(reply)(coordinator_->GetTopology(*request));
  return call;
}

AttentionServiceFront::Reactor* AttentionServiceFront::RegisterSharedMemory(
    Context* context, const v1::RegisterSharedMemoryRequest* request,
    v1::RegisterSharedMemoryReply*) {
  auto* call = new UnaryCall(*context);
  call->Finish(ToGrpcStatus(coordinator_->RegisterSharedMemory(*request)));
  return call;
}

AttentionServiceFront::Reactor* AttentionServiceFront::UnregisterSharedMemory(
    Context* context, const v1::UnregisterSharedMemoryRequest* request,
    v1::UnregisterSharedMemoryReply*) {
  auto* call = new UnaryCall(*context);
  call->Finish(ToGrpcStatus(coordinator_->UnregisterSharedMemory(*request)));
  return call;
}

}  // namespace tributary::service
