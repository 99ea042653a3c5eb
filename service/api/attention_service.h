// The public API over gRPC: messages in, coordinator calls, statuses out. No decisions here.
#pragma once

#include <grpcpp/grpcpp.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "base/sync/mutex.h"
#include "service/access/access_control.h"
#include "service/api/attend_stream.h"
#include "service/api/byte_budget.h"
#include "service/api/call_quota.h"
#include "service/api/long_answers.h"
#include "service/api/open_calls.h"
#include "service/api/stream_watch.h"
#include "service/coordinator/coordinator.h"
#include "tributary/v1/attention.grpc.pb.h"

namespace tributary::service {

class AttentionServiceFront final : public v1::AttentionService::CallbackService {
 public:
  // What callers may do, and have at a time.
  struct Limits {
    size_t max_message_bytes = size_t{64} << 20;
    bool shared_memory_from_anywhere = false;
    int max_calls_per_stream = 256;
    std::shared_ptr<CallQuota> calls;
    std::shared_ptr<CallQuota> streams;
    std::shared_ptr<ByteBudget> bytes;
  };

  // Who may call a method.
  enum class Callers : uint8_t { kClients, kClientsAndAdmins };

  // The coordinator outlives this.
  AttentionServiceFront(Coordinator* coordinator, Limits limits,
                        std::shared_ptr<AccessControl> access, const StreamWatch::Options& watch);

  // Open streams end when their calls in flight are answered.
  void DrainStreams();
  size_t open_streams() const;
  OpenCalls& open() { return *open_; }

 private:
  using Context = grpc::CallbackServerContext;
  using Reactor = grpc::ServerUnaryReactor;

  using Stream = grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>;

  // Of a caller that may open a stream: holds the lease that it presents, and its place.
  absl::StatusOr<CallQuota::Admission> EnterStream(const Context& context, CallContext* call);
  Stream* OpenStream(Context* context);
  Stream* OpenSession(Context* context);

  // Every unary method is added once, by its name in the proto: begin(request, call, done), where
  // `done` takes the reply or why there is none.
  void AddCacheMethods();
  void AddSequenceMethods();
  void AddOtherMethods();
  template <typename Request, typename Reply, typename Begin>
  void Add(const char* name, Method method, Callers callers, const Begin& begin);
  template <typename Request, typename Reply, typename Begin>
  Reactor* Serve(Context* context, Method method, Callers callers, grpc::ByteBuffer* request,
                 grpc::ByteBuffer* reply, const Begin& begin);

  // The watch asks whether the caller may still have its stream, by what it showed.
  void Watch(const Context& context, std::weak_ptr<WatchedStream> stream);

  Coordinator* const coordinator_;
  const Limits limits_;
  const std::shared_ptr<AccessControl> access_;

  const std::shared_ptr<OpenCalls> open_ = OpenCalls::Create();
  LongAnswers long_answers_;
  StreamWatch watch_;
  mutable Mutex mutex_;
  bool draining_ TRIBUTARY_GUARDED_BY(mutex_) = false;
  std::vector<std::weak_ptr<class AttendStream>> streams_ TRIBUTARY_GUARDED_BY(mutex_);
};

}  // namespace tributary::service
