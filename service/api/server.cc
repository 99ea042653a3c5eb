#include "service/api/server.h"

#include <grpcpp/ext/health_check_service_server_builder_option.h>
#include <grpcpp/ext/proto_server_reflection_plugin.h>
#include <grpcpp/grpcpp.h>

#include <algorithm>
#include <thread>
#include <utility>

#include "base/rpc/admin_server.h"
#include "base/rpc/keepalive.h"
#include "base/rpc/listening.h"
#include "base/status/status_macros.h"
#include "service/api/attention_service.h"

namespace tributary::service {
namespace {

using Clock = std::chrono::steady_clock;

// After the last accepted call is answered: time for replies to leave the process.
constexpr std::chrono::seconds kFlushTime{5};

std::chrono::system_clock::time_point ToSystem(Clock::time_point time) {
  return std::chrono::system_clock::now() +
         std::chrono::duration_cast<std::chrono::system_clock::duration>(time - Clock::now());
}

class GrpcServer final : public Server {
 public:
  GrpcServer(const ServerOptions& options, Coordinator* coordinator,
             std::shared_ptr<AccessControl> access)
      : settle_(options.drain_settle),
        keepalive_(options.keepalive),
        coordinator_(coordinator),
        front_(coordinator, options.max_calls_per_stream, std::move(access),
               CallQuota::Create(options.max_calls_per_client, [coordinator](ClientLimit limit) {
                 coordinator->observer().OnLimitReached(limit);
               })) {}
  ~GrpcServer() override {
    if (server_ != nullptr) server_->Shutdown(std::chrono::system_clock::now());
  }

  absl::Status StartAll(const ServerOptions& options);

  std::vector<std::string> addresses() const override { return addresses_; }
  std::string admin_address() const override { return admin_ == nullptr ? "" : admin_->address(); }
  void SetReady(bool ready) override {
    if (admin_ != nullptr) admin_->SetReady(ready);
  }
  size_t open_streams() const override { return front_.open_streams(); }
  bool Drain(Clock::time_point deadline) override;

 private:
  absl::Status StartPublic(const ServerOptions& options);

  const std::chrono::milliseconds settle_;
  const ServerKeepalive keepalive_;
  Coordinator* const coordinator_;
  AttentionServiceFront front_;
  std::vector<std::string> addresses_;
  std::unique_ptr<AdminServer> admin_;
  std::unique_ptr<grpc::Server> server_;
};

absl::Status GrpcServer::StartAll(const ServerOptions& options) {
  if (!options.admin_listen.empty()) {
    TRIBUTARY_ASSIGN_OR_RETURN(admin_, AdminServer::Start(options.admin_listen, keepalive_));
    SetReady(coordinator_->ready());
  }
  return StartPublic(options);
}

absl::Status GrpcServer::StartPublic(const ServerOptions& options) {
  grpc::ServerBuilder builder;
  SetServerKeepalive(builder, keepalive_);
  if (options.reflection) {
    grpc::reflection::InitProtoReflectionServerBuilderPlugin();
  } else {
    builder.SetOption(std::make_unique<WithoutReflection>());
  }
  // No health here: its Watch streams would outlast the drain.
  builder.SetOption(std::make_unique<grpc::HealthCheckServiceServerBuilderOption>(nullptr));
  builder.SetMaxReceiveMessageSize(options.max_message_bytes);
  // A message is limited as it comes over the wire; what it inflates to is not, so none may
  // inflate.
  builder.SetCompressionAlgorithmSupportStatus(GRPC_COMPRESS_DEFLATE, false);
  builder.SetCompressionAlgorithmSupportStatus(GRPC_COMPRESS_GZIP, false);
  // Replies are limited one by one; tensors with their shapes and lengths may be a little larger.
  builder.SetMaxSendMessageSize(-1);
  builder.RegisterService(&front_);
  for (grpc::Service* service : options.more_services) builder.RegisterService(service);
  TRIBUTARY_ASSIGN_OR_RETURN(
      server_, ListenAt(options.listen, ServerCredentialsFrom(options.tls), &builder, &addresses_));
  return absl::OkStatus();
}

bool GrpcServer::Drain(Clock::time_point deadline) {
  SetReady(false);
  coordinator_->StartDraining();
  front_.DrainStreams();
  const bool idle = coordinator_->WaitIdle(deadline);
  // A call that arrives while gRPC shuts down is reset and its caller sees CANCELLED. So callers
  // first have time to come back and be told UNAVAILABLE by us.
  std::this_thread::sleep_until(std::min(deadline, Clock::now() + settle_));
  // What is open now is a reply on its way, or a stream without calls: it may not hold us longer.
  const Clock::time_point flushed = Clock::now() + kFlushTime;
  server_->Shutdown(ToSystem(idle ? flushed : std::min(deadline, flushed)));
  return idle;
}

}  // namespace

absl::StatusOr<std::unique_ptr<Server>> Server::Start(const ServerOptions& options,
                                                      Coordinator* coordinator) {
  if (absl::Status s = CheckTlsFiles(options.tls, "tls_", "tls_client_ca"); !s.ok()) {
    return s;
  }
  std::shared_ptr<AccessControl> access = options.access;
  if (access == nullptr) {
    TRIBUTARY_ASSIGN_OR_RETURN(access, AccessControl::Create({}));
  }
  auto server = std::make_unique<GrpcServer>(options, coordinator, std::move(access));
  if (absl::Status started = server->StartAll(options); !started.ok()) return started;
  return server;
}

}  // namespace tributary::service
