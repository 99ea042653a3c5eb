#include "service/api/attention_service.h"

#include <google/protobuf/descriptor.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <utility>

#include "base/status/grpc_status.h"
#include "base/status/status_macros.h"
#include "service/access/peer.h"
#include "service/api/raw_methods.h"
#include "service/api/reply_bytes.h"
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

// Whether the caller may name shared memory.
bool SharesMemory(const grpc::CallbackServerContext& context,
                  const AttentionServiceFront::Limits& limits) {
  return limits.shared_memory_from_anywhere || IsOnThisMachine(context.peer());
}

// Empty when there is none, or nobody wants to know.
std::string TraceparentOf(const grpc::CallbackServerContext& context, const Observer& observer) {
  if (!observer.traces()) return "";
  const auto& metadata = context.client_metadata();
  const auto found = metadata.find("traceparent");
  if (found == metadata.end()) return "";
  return {found->second.data(), found->second.size()};
}

// Holds the lease that the caller presents in its metadata; null when it presents none.
absl::StatusOr<Leases::HolderPtr> LeaseOf(const grpc::CallbackServerContext& context,
                                          Leases& leases) {
  constexpr char kKey[] = "tributary-lease";
  const auto& metadata = context.client_metadata();
  const auto found = metadata.find(kKey);
  if (found == metadata.end()) return nullptr;
  const std::string name(found->second.data(), found->second.size());
  TRIBUTARY_RETURN_IF_ERROR(Leases::CheckName(name, kKey));
  return leases.Present(name);
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
            size_t request_bytes, OpenCalls::Mark open, LongAnswers& long_answers)
      : observer_(observer),
        long_answers_(long_answers),
        open_(std::move(open)),
        record_(observer.OnCallBegun(method, TraceparentOf(context, observer), request_bytes)) {
    call_.deadline = DeadlineOf(context);
    call_.cancelled = cancelled_;
    call_.trace = record_.trace;
    call_.trace.span_id = record_.span_id;
  }

  const CallContext& call() const { return call_; }

  // Kept until the call is over.
  template <typename Request>
  void Keep(std::shared_ptr<const Request> request) {
    record_.request_id = RequestIdOf(*request);
    request_ = std::move(request);
  }

  // Whether the caller may make this call now.
  absl::Status Admit(const grpc::CallbackServerContext& context,
                     AttentionServiceFront::Callers callers, AccessControl& access,
                     const AttentionServiceFront::Limits& limits, Leases& leases,
                     size_t request_bytes) {
    TRIBUTARY_ASSIGN_OR_RETURN(const Caller caller,
                               callers == AttentionServiceFront::Callers::kClients
                                   ? access.Authorize(context, {Role::kClient})
                                   : access.Authorize(context, {Role::kClient, Role::kAdmin}));
    call_.caller = caller.name;
    call_.manages_all = caller.manages_all;
    call_.shares_memory = SharesMemory(context, limits);
    call_.lends = true;
    TRIBUTARY_RETURN_IF_ERROR(CheckMessage(request_bytes, limits.max_message_bytes));
    TRIBUTARY_ASSIGN_OR_RETURN(call_.lease, LeaseOf(context, leases));
    TRIBUTARY_ASSIGN_OR_RETURN(admission_, limits.calls->Admit(call_.caller));
    TRIBUTARY_ASSIGN_OR_RETURN(
        bytes_, limits.bytes->Take(call_.caller, static_cast<int64_t>(request_bytes)));
    call_.charge_reply = [bytes = bytes_](size_t more) {
      return bytes->Add(static_cast<int64_t>(more));
    };
    return absl::OkStatus();
  }

  // The callback that ends this call with a result.
  template <typename Reply>
  std::function<void(absl::StatusOr<Reply>)> ReplyInto(grpc::ByteBuffer* reply) {
    return [this, reply](absl::StatusOr<Reply> result) {
      const absl::Status status = result.status();
      if (status.ok()) *reply = SerializeMessage(*std::move(result));
      const size_t reply_bytes = status.ok() ? reply->Length() : 0;
      admission_.reset();  // before the caller can know, who may call again at once
      bytes_->Reduce(static_cast<int64_t>(reply_bytes));
      End(status, reply_bytes);
    };
  }
  void End(const absl::Status& status, size_t reply_bytes = 0) {
    observer_.OnCallEnded(record_, status, reply_bytes);
    long_answers_.Send(reply_bytes, [this, status] { Finish(ToGrpcStatus(status)); });
  }

 private:
  void OnCancel() override { cancelled_->store(true, std::memory_order_release); }
  void OnDone() override { delete this; }

  Observer& observer_;
  LongAnswers& long_answers_;
  const OpenCalls::Mark open_;
  CallRecord record_;
  const std::shared_ptr<std::atomic<bool>> cancelled_ = std::make_shared<std::atomic<bool>>(false);
  CallContext call_;
  std::shared_ptr<const void> request_;
  CallQuota::Admission admission_;
  ByteBudget::ChargePtr bytes_;  // until the reply has been sent
};

// A stream that ends before it begins.
class RefusedStream final : public grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer> {
 public:
  explicit RefusedStream(const absl::Status& status) { Finish(ToGrpcStatus(status)); }
  void OnDone() override { delete this; }
};

// Where gRPC keeps a method's handler.
int IndexOf(const char* method) {
  const google::protobuf::FileDescriptor& file = *v1::AttendRequest::descriptor()->file();
  return file.FindServiceByName("AttentionService")->FindMethodByName(method)->index();
}

}  // namespace

AttentionServiceFront::AttentionServiceFront(Coordinator* coordinator, Limits limits,
                                             std::shared_ptr<AccessControl> access,
                                             const StreamWatch::Options& watch)
    : coordinator_(coordinator),
      limits_(std::move(limits)),
      access_(std::move(access)),
      watch_(watch) {
  AddCacheMethods();
  AddSequenceMethods();
  AddOtherMethods();
  using Handler = grpc::internal::CallbackBidiHandler<grpc::ByteBuffer, grpc::ByteBuffer>;
  MarkMethodRawCallback(IndexOf("AttendStream"),
                        new Handler([this](Context* context) { return OpenStream(context); }));
  MarkMethodRawCallback(IndexOf("AttendSession"),
                        new Handler([this](Context* context) { return OpenSession(context); }));
}

template <typename Request, typename Reply, typename Begin>
void AttentionServiceFront::Add(const char* name, Method method, Callers callers,
                                const Begin& begin) {
  MarkMethodRawCallback(
      IndexOf(name),
      new grpc::internal::CallbackUnaryHandler<grpc::ByteBuffer, grpc::ByteBuffer>(
          [this, method, callers, begin](Context* context, const grpc::ByteBuffer* request,
                                         grpc::ByteBuffer* reply) {
            // gRPC made it for this call alone, and looks at it no more.
            auto* const bytes = const_cast<grpc::ByteBuffer*>(request);
            return Serve<Request, Reply>(context, method, callers, bytes, reply, begin);
          }));
}

template <typename Request, typename Reply, typename Begin>
AttentionServiceFront::Reactor* AttentionServiceFront::Serve(Context* context, Method method,
                                                             Callers callers,
                                                             grpc::ByteBuffer* request,
                                                             grpc::ByteBuffer* reply,
                                                             const Begin& begin) {
  const size_t bytes = request->Length();
  auto* call = new UnaryCall(*context, coordinator_->observer(), method, bytes, open_->Enter(),
                             long_answers_);
  absl::Status refused =
      call->Admit(*context, callers, *access_, limits_, coordinator_->leases(), bytes);
  if (refused.ok()) {
    absl::StatusOr<std::shared_ptr<Request>> parsed = ParseMessage<Request>(request);
    if (parsed.ok()) {
      const std::shared_ptr<const Request> message = *std::move(parsed);
      call->Keep(message);
      begin(message, call->call(), call->ReplyInto<Reply>(reply));
      coordinator_->Lend();  // gRPC keeps an answer until this returns
      return call;
    }
    refused = parsed.status();
  }
  call->End(refused);
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

absl::StatusOr<CallQuota::Admission> AttentionServiceFront::EnterStream(const Context& context,
                                                                        CallContext* call) {
  TRIBUTARY_ASSIGN_OR_RETURN(call->lease, LeaseOf(context, coordinator_->leases()));
  return limits_.streams->Admit(call->caller);
}

AttentionServiceFront::Stream* AttentionServiceFront::OpenStream(Context* context) {
  absl::StatusOr<Caller> caller = access_->Authorize(*context, {Role::kClient});
  if (!caller.ok()) return new RefusedStream(caller.status());
  CallContext call;
  call.deadline = DeadlineOf(*context);
  call.shares_memory = SharesMemory(*context, limits_);
  call.caller = caller->name;
  absl::StatusOr<CallQuota::Admission> place = EnterStream(*context, &call);
  if (!place.ok()) return new RefusedStream(place.status());
  const auto stream =
      service::AttendStream::Begin(coordinator_, context, std::move(call),
                                   {.max_message_bytes = limits_.max_message_bytes,
                                    .max_in_flight = limits_.max_calls_per_stream,
                                    .calls = limits_.calls,
                                    .bytes = limits_.bytes,
                                    .place = *std::move(place),
                                    .open = open_->Enter(),
                                    .long_answers = &long_answers_},
                                   TraceparentOf(*context, coordinator_->observer()));
  Watch(*context, stream);
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

AttentionServiceFront::Stream* AttentionServiceFront::OpenSession(Context* context) {
  absl::StatusOr<Caller> caller = access_->Authorize(*context, {Role::kClient});
  if (!caller.ok()) return new RefusedStream(caller.status());
  CallContext call;
  call.caller = caller->name;
  absl::StatusOr<CallQuota::Admission> place = EnterStream(*context, &call);
  if (!place.ok()) return new RefusedStream(place.status());
  const auto stream =
      SessionStream::Begin(coordinator_, std::move(call), CameThroughUnixSocket(context->peer()),
                           {.max_message_bytes = limits_.max_message_bytes,
                            .place = *std::move(place),
                            .open = open_->Enter()});
  Watch(*context, stream);
  return stream.get();
}

void AttentionServiceFront::Watch(const Context& context, std::weak_ptr<WatchedStream> stream) {
  watch_.Add(std::move(stream), [access = access_, shown = AccessControl::ShownBy(context)] {
    return access->Authorize(shown, {Role::kClient}).status();
  });
}

// ------------------------------------------------------------------------------ unary methods

void AttentionServiceFront::AddCacheMethods() {
  Add<v1::CreateCacheRequest, v1::CreateCacheReply>(
      "CreateCache", Method::kCreateCache, Callers::kClients,
      [this](const auto& request, const CallContext& call, auto done) {
        coordinator_->CreateCache(*request, call, std::move(done));
      });
  Add<v1::DeleteCacheRequest, v1::DeleteCacheReply>(
      "DeleteCache", Method::kDeleteCache, Callers::kClientsAndAdmins,
      [this](const auto& request, const CallContext& call, auto done) {
        coordinator_->DeleteCache(*request, call, std::move(done));
      });
  Add<v1::AppendRequest, v1::AppendReply>(
      "Append", Method::kAppend, Callers::kClients,
      [this](const auto& request, const CallContext& call, auto done) {
        coordinator_->Append(request, call, std::move(done));
      });
  Add<v1::AttendRequest, v1::AttendReply>(
      "Attend", Method::kAttend, Callers::kClients,
      [this](const auto& request, const CallContext& call, auto done) {
        coordinator_->Attend(request, call, std::move(done));
      });
}

void AttentionServiceFront::AddSequenceMethods() {
  Add<v1::OpenSequenceRequest, v1::OpenSequenceReply>(
      "OpenSequence", Method::kOpenSequence, Callers::kClients,
      [this](const auto& request, const CallContext& call, auto done) {
        coordinator_->OpenSequence(*request, call, std::move(done));
      });
  Add<v1::ForkSequenceRequest, v1::ForkSequenceReply>(
      "ForkSequence", Method::kForkSequence, Callers::kClients,
      [this](const auto& request, const CallContext& call, auto done) {
        coordinator_->ForkSequence(*request, call, std::move(done));
      });
  Add<v1::TruncateSequenceRequest, v1::TruncateSequenceReply>(
      "TruncateSequence", Method::kTruncateSequence, Callers::kClients,
      [this](const auto& request, const CallContext& call, auto done) {
        coordinator_->TruncateSequence(*request, call, std::move(done));
      });
  Add<v1::CloseSequenceRequest, v1::CloseSequenceReply>(
      "CloseSequence", Method::kCloseSequence, Callers::kClients,
      [this](const auto& request, const CallContext& call, auto done) {
        coordinator_->CloseSequence(*request, call, std::move(done));
      });
  Add<v1::UpdateSequencesRequest, v1::UpdateSequencesReply>(
      "UpdateSequences", Method::kUpdateSequences, Callers::kClients,
      [this](const auto& request, const CallContext& call, auto done) {
        coordinator_->UpdateSequences(*request, call, std::move(done));
      });
}

void AttentionServiceFront::AddOtherMethods() {
  Add<v1::RenewLeaseRequest, v1::RenewLeaseReply>(
      "RenewLease", Method::kRenewLease, Callers::kClients,
      [this](const auto& request, const CallContext&, auto done) {
        done(coordinator_->RenewLease(*request));
      });
  Add<v1::GetTopologyRequest, v1::GetTopologyReply>(
      "GetTopology", Method::kGetTopology, Callers::kClientsAndAdmins,
      [this](const auto& request, const CallContext& call, auto done) {
        done(coordinator_->GetTopology(*request, call));
      });
  Add<v1::GetLimitsRequest, v1::GetLimitsReply>(
      "GetLimits", Method::kGetLimits, Callers::kClientsAndAdmins,
      [this](const auto&, const CallContext& call, auto done) {
        v1::GetLimitsReply limits = coordinator_->GetLimits();
        v1::PerClientLimits* client = limits.mutable_per_client();
        client->set_calls(limits_.calls->most());
        client->set_streams(limits_.streams->most());
        client->set_message_bytes(limits_.bytes->limits().per_caller);
        limits.set_max_calls_per_stream(limits_.max_calls_per_stream);
        limits.set_shared_memory(call.shares_memory);
        done(std::move(limits));
      });
  Add<v1::RegisterSharedMemoryRequest, v1::RegisterSharedMemoryReply>(
      "RegisterSharedMemory", Method::kRegisterSharedMemory, Callers::kClients,
      [this](const auto& request, const CallContext& call, auto done) {
        coordinator_->RegisterSharedMemory(*request, call, std::move(done));
      });
  Add<v1::UnregisterSharedMemoryRequest, v1::UnregisterSharedMemoryReply>(
      "UnregisterSharedMemory", Method::kUnregisterSharedMemory, Callers::kClients,
      [this](const auto& request, const CallContext& call, auto done) {
        coordinator_->UnregisterSharedMemory(*request, call, std::move(done));
      });
}

}  // namespace tributary::service
