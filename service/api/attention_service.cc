#include "service/api/attention_service.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <utility>

#include "absl/strings/match.h"
#include "base/status/grpc_status.h"
#include "base/status/status_macros.h"
#include "service/api/session_stream.h"

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

// Empty when there is none, or nobody wants to know.
std::string TraceparentOf(const grpc::CallbackServerContext& context, const Observer& observer) {
  if (!observer.traces()) return "";
  const auto& metadata = context.client_metadata();
  const auto found = metadata.find("traceparent");
  if (found == metadata.end()) return "";
  return {found->second.data(), found->second.size()};
}

// 0 for requests without one.
template <typename Request>
uint64_t RequestIdOf(const Request& request) {
  if constexpr (requires { request.request_id(); }) return request.request_id();
  return 0;
}

// A unary call until its reply is sent.
class UnaryCall final : public grpc::ServerUnaryReactor {
 public:
  UnaryCall(const grpc::CallbackServerContext& context, Observer& observer, Method method,
            const google::protobuf::Message& request, uint64_t request_id)
      : observer_(observer),
        record_(observer.OnCallBegun(method, TraceparentOf(context, observer),
                                     request.ByteSizeLong())) {
    record_.request_id = request_id;
    call_.deadline = DeadlineOf(context);
    call_.cancelled = cancelled_;
    call_.trace = record_.trace;
    call_.trace.span_id = record_.span_id;
  }

  const CallContext& call() const { return call_; }

  // Whether the caller may make this call now.
  absl::Status Admit(const grpc::ServerContextBase& context, std::initializer_list<Role> roles,
                     AccessControl& access, CallQuota& quota) {
    TRIBUTARY_ASSIGN_OR_RETURN(call_.caller, access.Authorize(context, roles));
    TRIBUTARY_ASSIGN_OR_RETURN(admission_, quota.Admit(call_.caller));
    return absl::OkStatus();
  }

  // The callback that ends this call with a result.
  template <typename Reply>
  std::function<void(absl::StatusOr<Reply>)> ReplyInto(Reply* reply) {
    return [this, reply](absl::StatusOr<Reply> result) {
      const absl::Status status = result.status();
      if (status.ok()) *reply = *std::move(result);
      admission_.reset();  // before the caller can know, who may call again at once
      End(status, status.ok() ? reply->ByteSizeLong() : 0);
    };
  }
  void End(const absl::Status& status, size_t reply_bytes = 0) {
    observer_.OnCallEnded(record_, status, reply_bytes);
    Finish(ToGrpcStatus(status));
  }

 private:
  void OnCancel() override { cancelled_->store(true, std::memory_order_release); }
  void OnDone() override { delete this; }

  Observer& observer_;
  CallRecord record_;
  const std::shared_ptr<std::atomic<bool>> cancelled_ = std::make_shared<std::atomic<bool>>(false);
  CallContext call_;
  CallQuota::Admission admission_;
};

// A stream that ends before it begins.
template <typename Request, typename Reply>
class RefusedStream final : public grpc::ServerBidiReactor<Request, Reply> {
 public:
  explicit RefusedStream(const grpc::Status& status) { this->Finish(status); }
  void OnDone() override { delete this; }
};

}  // namespace

AttentionServiceFront::AttentionServiceFront(Coordinator* coordinator, int max_calls_per_stream,
                                             std::shared_ptr<AccessControl> access,
                                             std::shared_ptr<CallQuota> quota)
    : coordinator_(coordinator),
      max_calls_per_stream_(max_calls_per_stream),
      access_(std::move(access)),
      quota_(std::move(quota)) {
  SetMessageAllocatorFor_Append(&append_messages_);
  SetMessageAllocatorFor_Attend(&attend_messages_);
}

template <typename Request, typename Reply, typename Begin>
AttentionServiceFront::Reactor* AttentionServiceFront::Serve(Context* context, Method method,
                                                             std::initializer_list<Role> roles,
                                                             const Request& request, Reply* reply,
                                                             const Begin& begin) {
  auto* call =
      new UnaryCall(*context, coordinator_->observer(), method, request, RequestIdOf(request));
  if (absl::Status refused = call->Admit(*context, roles, *access_, *quota_); !refused.ok()) {
    call->End(refused);
  } else {
    begin(call->call(), call->ReplyInto(reply));
  }
  return call;
}

void AttentionServiceFront::DrainStreams() {
  std::vector<std::weak_ptr<service::AttendStream>> streams;
  {
    const MutexLock lock(mutex_);
    draining_ = true;
    streams.swap(streams_);
  }
  for (const auto& weak : streams) {
    if (const auto stream = weak.lock()) stream->Drain();
  }
}

size_t AttentionServiceFront::open_streams() const {
  const MutexLock lock(mutex_);
  const auto expired = [](const auto& weak) { return weak.expired(); };
  return streams_.size() -
         static_cast<size_t>(std::count_if(streams_.begin(), streams_.end(), expired));
}

grpc::ServerBidiReactor<v1::AttendRequest, v1::AttendReply>* AttentionServiceFront::AttendStream(
    Context* context) {
  absl::StatusOr<std::string> caller = access_->Authorize(*context, {Role::kClient});
  if (!caller.ok()) {
    return new RefusedStream<v1::AttendRequest, v1::AttendReply>(ToGrpcStatus(caller.status()));
  }
  CallContext call;
  call.deadline = DeadlineOf(*context);
  call.caller = *std::move(caller);
  const auto stream =
      service::AttendStream::Begin(coordinator_, std::move(call), max_calls_per_stream_, quota_,
                                   TraceparentOf(*context, coordinator_->observer()));
  MutexLock lock(mutex_);
  if (draining_) {
    lock.Unlock();
    stream->Drain();
    return stream.get();
  }
  streams_.erase(std::remove_if(streams_.begin(), streams_.end(),
                                [](const auto& weak) { return weak.expired(); }),
                 streams_.end());
  streams_.push_back(stream);
  return stream.get();
}

grpc::ServerBidiReactor<v1::SessionRequest, v1::SessionReply>* AttentionServiceFront::AttendSession(
    Context* context) {
  absl::StatusOr<std::string> caller = access_->Authorize(*context, {Role::kClient});
  if (!caller.ok()) {
    return new RefusedStream<v1::SessionRequest, v1::SessionReply>(ToGrpcStatus(caller.status()));
  }
  CallContext call;
  call.caller = *std::move(caller);
  const bool local = absl::StartsWith(context->peer(), "unix:");
  return SessionStream::Begin(coordinator_, std::move(call), local).get();
}

// ------------------------------------------------------------------------------ unary methods

AttentionServiceFront::Reactor* AttentionServiceFront::CreateCache(
    Context* context, const v1::CreateCacheRequest* request, v1::CreateCacheReply* reply) {
  return Serve(
      context, Method::kCreateCache, {Role::kClient}, *request, reply,
      [&](const CallContext&, auto done) { coordinator_->CreateCache(*request, std::move(done)); });
}

AttentionServiceFront::Reactor* AttentionServiceFront::DeleteCache(
    Context* context, const v1::DeleteCacheRequest* request, v1::DeleteCacheReply* reply) {
  return Serve(
      context, Method::kDeleteCache, {Role::kClient, Role::kAdmin}, *request, reply,
      [&](const CallContext&, auto done) { coordinator_->DeleteCache(*request, std::move(done)); });
}

AttentionServiceFront::Reactor* AttentionServiceFront::OpenSequence(
    Context* context, const v1::OpenSequenceRequest* request, v1::OpenSequenceReply* reply) {
  return Serve(context, Method::kOpenSequence, {Role::kClient}, *request, reply,
               [&](const CallContext& call, auto done) {
                 coordinator_->OpenSequence(*request, call, std::move(done));
               });
}

AttentionServiceFront::Reactor* AttentionServiceFront::ForkSequence(
    Context* context, const v1::ForkSequenceRequest* request, v1::ForkSequenceReply* reply) {
  return Serve(context, Method::kForkSequence, {Role::kClient}, *request, reply,
               [&](const CallContext& call, auto done) {
                 coordinator_->ForkSequence(*request, call, std::move(done));
               });
}

AttentionServiceFront::Reactor* AttentionServiceFront::TruncateSequence(
    Context* context, const v1::TruncateSequenceRequest* request,
    v1::TruncateSequenceReply* reply) {
  return Serve(context, Method::kTruncateSequence, {Role::kClient}, *request, reply,
               [&](const CallContext& call, auto done) {
                 coordinator_->TruncateSequence(*request, call, std::move(done));
               });
}

AttentionServiceFront::Reactor* AttentionServiceFront::CloseSequence(
    Context* context, const v1::CloseSequenceRequest* request, v1::CloseSequenceReply* reply) {
  return Serve(context, Method::kCloseSequence, {Role::kClient}, *request, reply,
               [&](const CallContext& call, auto done) {
                 coordinator_->CloseSequence(*request, call, std::move(done));
               });
}

AttentionServiceFront::Reactor* AttentionServiceFront::UpdateSequences(
    Context* context, const v1::UpdateSequencesRequest* request, v1::UpdateSequencesReply* reply) {
  return Serve(context, Method::kUpdateSequences, {Role::kClient}, *request, reply,
               [&](const CallContext& call, auto done) {
                 coordinator_->UpdateSequences(*request, call, std::move(done));
               });
}

AttentionServiceFront::Reactor* AttentionServiceFront::Append(Context* context,
                                                              const v1::AppendRequest* request,
                                                              v1::AppendReply* reply) {
  return Serve(context, Method::kAppend, {Role::kClient}, *request, reply,
               [&](const CallContext& call, auto done) {
                 coordinator_->Append(decltype(append_messages_)::RequestOf(context), call,
                                      std::move(done));
               });
}

AttentionServiceFront::Reactor* AttentionServiceFront::Attend(Context* context,
                                                              const v1::AttendRequest* request,
                                                              v1::AttendReply* reply) {
  return Serve(context, Method::kAttend, {Role::kClient}, *request, reply,
               [&](const CallContext& call, auto done) {
                 coordinator_->Attend(decltype(attend_messages_)::RequestOf(context), call,
                                      std::move(done));
               });
}

AttentionServiceFront::Reactor* AttentionServiceFront::GetTopology(
    Context* context, const v1::GetTopologyRequest* request, v1::GetTopologyReply* reply) {
  return Serve(context, Method::kGetTopology, {Role::kClient, Role::kAdmin}, *request, reply,
               [&](const CallContext&, auto done) { done(coordinator_->GetTopology(*request)); });
}

AttentionServiceFront::Reactor* AttentionServiceFront::RegisterSharedMemory(
    Context* context, const v1::RegisterSharedMemoryRequest* request,
    v1::RegisterSharedMemoryReply* reply) {
  return Serve(context, Method::kRegisterSharedMemory, {Role::kClient}, *request, reply,
               [&](const CallContext&, auto done) {
                 coordinator_->RegisterSharedMemory(*request, std::move(done));
               });
}

AttentionServiceFront::Reactor* AttentionServiceFront::UnregisterSharedMemory(
    Context* context, const v1::UnregisterSharedMemoryRequest* request,
    v1::UnregisterSharedMemoryReply* reply) {
  return Serve(context, Method::kUnregisterSharedMemory, {Role::kClient}, *request, reply,
               [&](const CallContext&, auto done) {
                 coordinator_->UnregisterSharedMemory(*request, std::move(done));
               });
}

}  // namespace tributary::service
