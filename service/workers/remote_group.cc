#include "service/workers/remote_group.h"

#include <grpcpp/server_builder.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status/grpc_status.h"
#include "service/workers/remote_core.h"
#include "tributary/v1/worker.grpc.pb.h"

namespace tributary::service {
namespace {

// Ends a stream that is not wanted.
class RefusedRegistration : public grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer> {
 public:
  explicit RefusedRegistration(const grpc::Status& status) { Finish(status); }
  void OnDone() override { delete this; }
};

class RemoteGroupImpl
    : public RemoteGroup,
      private v1::GroupService::WithRawCallbackMethod_Session<v1::GroupService::Service> {
 public:
  explicit RemoteGroupImpl(const RemoteGroupOptions& options)
      : core_(std::make_shared<RemoteCore>(options)) {}
  ~RemoteGroupImpl() override { core_->Stop(); }

  void AddTo(grpc::ServerBuilder& builder) override {
    const int limit =
        static_cast<int>(std::min<size_t>(core_->options().max_message_bytes, INT32_MAX));
    builder.SetMaxReceiveMessageSize(limit);
    builder.SetMaxSendMessageSize(limit);
    builder.RegisterService(static_cast<v1::GroupService::Service*>(this));
  }
  uint64_t id() const override { return core_->group_id(); }
  int size() const override { return core_->size(); }
  worker::Device device() const override { return core_->options().device; }
  bool sends_tensors() const override { return true; }
  // A process that was stopped and goes on after the group formed without it could still write the
  // result of its last step: epochs fence messages, not stores to a host's memory. A mailbox is the
  // worker's own and of one epoch, so that nobody reads what such a process writes there.
  absl::Status CheckDeviceSessions() const override {
    if (device() != worker::Device::kCuda) {
      return NoDeviceSessions(absl::StrCat("the workers compute on the ", Name(device())));
    }
    return absl::OkStatus();
  }
  absl::Status CheckRegions() const override {
    return NoRegions(
        "the workers are processes of their own; embedded workers with GPUs can "
        "(--device=cuda --embedded_workers)");
  }
  absl::Status Start(GroupObserver* observer) override { return core_->Start(observer); }
  void Submit(std::shared_ptr<const worker::Command> command, Done done) override {
    core_->Submit(std::move(command), std::move(done));
  }
  std::vector<Member> members() const override { return core_->members(); }
  std::string exchange() const override { return core_->exchange(); }
  void LetGo(int rank) override { core_->LetGo(rank); }
  absl::Status CheckResize() const override { return absl::OkStatus(); }
  void Expect(int workers) override { core_->Expect(workers); }
  void Regroup(const Regrouping& regrouping) override { core_->Regroup(regrouping); }
  void Stop() override { core_->Stop(); }

 private:
  RefusedRegistration* Refuse(const grpc::CallbackServerContext& context,
                              const absl::Status& why) const {
    core_->join_log().Refused(context.peer(), why);
    return new RefusedRegistration(ToGrpcStatus(why));
  }

  grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* Session(
      grpc::CallbackServerContext* context) override {
    if (const auto& access = core_->options().access; access != nullptr) {
      const absl::Status allowed = access->Authorize(*context, {Role::kWorker}).status();
      if (!allowed.ok()) return Refuse(*context, allowed);
    }
    if (const auto& secret = core_->options().join_secret; secret != nullptr) {
      const absl::Status shown = secret->Check(*context);
      if (!shown.ok()) return Refuse(*context, shown);
    }
    RemoteCore::Stream stream;
    if (!core_->Accept(context, &stream)) {
      return new RefusedRegistration(
          {grpc::StatusCode::UNAVAILABLE, "the coordinator is stopping"});
    }
    return stream.get();  // kept alive by itself
  }

  const std::shared_ptr<RemoteCore> core_;
};

}  // namespace

std::unique_ptr<RemoteGroup> CreateRemoteGroup(const RemoteGroupOptions& options) {
  return std::make_unique<RemoteGroupImpl>(options);
}

}  // namespace tributary::service
