// The public API over gRPC: messages in, coordinator calls, statuses out. No decisions here.
#pragma once

#include <grpcpp/grpcpp.h>

#include <initializer_list>
#include <memory>
#include <vector>

#include "base/sync/mutex.h"
#include "service/access/access_control.h"
#include "service/api/attend_stream.h"
#include "service/api/call_quota.h"
#include "service/api/shared_request.h"
#include "service/coordinator/coordinator.h"
#include "tributary/v1/attention.grpc.pb.h"

namespace tributary::service {

class AttentionServiceFront final : public v1::AttentionService::CallbackService {
 public:
  // The coordinator outlives this. `quota` limits the calls in flight of each caller.
  AttentionServiceFront(Coordinator* coordinator, int max_calls_per_stream,
                        std::shared_ptr<AccessControl> access, std::shared_ptr<CallQuota> quota);

  // Open streams end when their calls in flight are answered.
  void DrainStreams();
  size_t open_streams() const;

 private:
  template <typename Request, typename Reply>
  using Allocator = SharedRequestAllocator<Request, Reply>;
  using Context = grpc::CallbackServerContext;
  using Reactor = grpc::ServerUnaryReactor;

  Reactor* CreateCache(Context* context, const v1::CreateCacheRequest* request,
                       v1::CreateCacheReply* reply) override;
  Reactor* DeleteCache(Context* context, const v1::DeleteCacheRequest* request,
                       v1::DeleteCacheReply* reply) override;
  Reactor* OpenSequence(Context* context, const v1::OpenSequenceRequest* request,
                        v1::OpenSequenceReply* reply) override;
  Reactor* ForkSequence(Context* context, const v1::ForkSequenceRequest* request,
                        v1::ForkSequenceReply* reply) override;
  Reactor* TruncateSequence(Context* context, const v1::TruncateSequenceRequest* request,
                            v1::TruncateSequenceReply* reply) override;
  Reactor* CloseSequence(Context* context, const v1::CloseSequenceRequest* request,
                         v1::CloseSequenceReply* reply) override;
  Reactor* UpdateSequences(Context* context, const v1::UpdateSequencesRequest* request,
                           v1::UpdateSequencesReply* reply) override;
  Reactor* Append(Context* context, const v1::AppendRequest* request,
                  v1::AppendReply* reply) override;
  Reactor* Attend(Context* context, const v1::AttendRequest* request,
                  v1::AttendReply* reply) override;
  grpc::ServerBidiReactor<v1::AttendRequest, v1::AttendReply>* AttendStream(
      Context* context) override;
  grpc::ServerBidiReactor<v1::SessionRequest, v1::SessionReply>* AttendSession(
      Context* context) override;
  Reactor* GetTopology(Context* context, const v1::GetTopologyRequest* request,
                       v1::GetTopologyReply* reply) override;
  Reactor* RegisterSharedMemory(Context* context, const v1::RegisterSharedMemoryRequest* request,
                                v1::RegisterSharedMemoryReply* reply) override;
  Reactor* UnregisterSharedMemory(Context* context,
                                  const v1::UnregisterSharedMemoryRequest* request,
                                  v1::UnregisterSharedMemoryReply* reply) override;

  // Begins a unary call for a caller with one of `roles`: begin(call, done), where `done` takes the
  // reply or why there is none.
  template <typename Request, typename Reply, typename Begin>
  Reactor* Serve(Context* context, Method method, std::initializer_list<Role> roles,
                 const Request& request, Reply* reply, const Begin& begin);

  Coordinator* const coordinator_;
  const int max_calls_per_stream_;
  const std::shared_ptr<AccessControl> access_;
  const std::shared_ptr<CallQuota> quota_;
  Allocator<v1::AppendRequest, v1::AppendReply> append_messages_;
  Allocator<v1::AttendRequest, v1::AttendReply> attend_messages_;

  mutable Mutex mutex_;
  bool draining_ TRIBUTARY_GUARDED_BY(mutex_) = false;
  std::vector<std::weak_ptr<class AttendStream>> streams_ TRIBUTARY_GUARDED_BY(mutex_);
};

}  // namespace tributary::service
