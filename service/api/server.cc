#include "service/api/server.h"

#include <grpcpp/ext/health_check_service_server_builder_option.h>
#include <grpcpp/ext/proto_server_reflection_plugin.h>
#include <grpcpp/generic/async_generic_service.h>
#include <grpcpp/grpcpp.h>
#include <grpcpp/health_check_service_interface.h>

#include <algorithm>
#include <thread>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
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

// "host:0" as bound.
std::string Bound(const std::string& address, int port) {
  const size_t colon = address.rfind(':');
  if (absl::StartsWith(address, "unix:") || colon == std::string::npos) return address;
  return absl::StrCat(address.substr(0, colon), ":", port);
}

// Linking gRPC's reflection adds it to every server of the process; this takes it out of one.
class WithoutReflection final : public grpc::ServerBuilderOption {
 public:
  void UpdateArguments(grpc::ChannelArguments*) override {}
  void UpdatePlugins(std::vector<std::unique_ptr<grpc::ServerBuilderPlugin>>* plugins) override {
    plugins->erase(std::remove_if(plugins->begin(), plugins->end(),
                                  [](const auto& plugin) {
                                    return plugin->name() == "proto_server_reflection";
                                  }),
                   plugins->end());
  }
};

// Builds, or says which address is to blame.
absl::StatusOr<std::unique_ptr<grpc::Server>> Build(
    grpc::ServerBuilder* builder, const std::vector<std::string>& listen,
    const std::shared_ptr<grpc::ServerCredentials>& credentials, std::vector<std::string>* bound) {
  std::vector<int> ports(listen.size(), 0);
  for (size_t i = 0; i < listen.size(); ++i) {
    if (absl::Status free = CheckFree(listen[i]); !free.ok()) return free;
    builder->AddListeningPort(listen[i], credentials, &ports[i]);
  }
  std::unique_ptr<grpc::Server> server = builder->BuildAndStart();
  for (size_t i = 0; i < listen.size(); ++i) {
    if (server != nullptr && ports[i] != 0) {
      bound->push_back(Bound(listen[i], ports[i]));
    } else if (ports[i] == 0) {
      return absl::UnavailableError(absl::StrCat(
          "cannot listen at ", listen[i], ": the address is in use, unknown or not permitted"));
    }
  }
  if (server == nullptr) return absl::UnavailableError("the server could not be started");
  return server;
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
    if (admin_ != nullptr) admin_->Shutdown(std::chrono::system_clock::now());
  }

  absl::Status StartAll(const ServerOptions& options);

  std::vector<std::string> addresses() const override { return addresses_; }
  std::string admin_address() const override {
    return admin_addresses_.empty() ? "" : admin_addresses_.front();
  }
  void SetReady(bool ready) override {
    if (admin_ == nullptr) return;
    admin_->GetHealthCheckService()->SetServingStatus("readiness", ready);
  }
  size_t open_streams() const override { return front_.open_streams(); }
  bool Drain(Clock::time_point deadline) override;

 private:
  absl::Status StartAdmin(const std::string& listen);
  absl::Status StartPublic(const ServerOptions& options);

  const std::chrono::milliseconds settle_;
  const ServerKeepalive keepalive_;
  Coordinator* const coordinator_;
  AttentionServiceFront front_;
  grpc::CallbackGenericService nothing_;
  std::vector<std::string> addresses_;
  std::vector<std::string> admin_addresses_;
  std::unique_ptr<grpc::Server> admin_;
  std::unique_ptr<grpc::Server> server_;
};

absl::Status GrpcServer::StartAll(const ServerOptions& options) {
  if (!options.admin_listen.empty()) {
    if (absl::Status started = StartAdmin(options.admin_listen); !started.ok()) return started;
  }
  return StartPublic(options);
}

absl::Status GrpcServer::StartAdmin(const std::string& listen) {
  grpc::EnableDefaultHealthCheckService(true);
  grpc::ServerBuilder builder;
  ForbidSharedPorts(&builder);
  SetServerKeepalive(builder, keepalive_);
  builder.SetOption(std::make_unique<WithoutReflection>());
  // gRPC builds no server of default services alone; this one says UNIMPLEMENTED to all the rest.
  builder.RegisterCallbackGenericService(&nothing_);
  auto built = Build(&builder, {listen}, grpc::InsecureServerCredentials(), &admin_addresses_);
  if (!built.ok()) return built.status();
  admin_ = *std::move(built);
  admin_->GetHealthCheckService()->SetServingStatus("liveness", true);
  SetReady(coordinator_->ready());
  return absl::OkStatus();
}

absl::Status GrpcServer::StartPublic(const ServerOptions& options) {
  grpc::ServerBuilder builder;
  ForbidSharedPorts(&builder);
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
  auto built = Build(&builder, options.listen, ServerCredentialsFrom(options.tls), &addresses_);
  if (!built.ok()) return built.status();
  server_ = *std::move(built);
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
