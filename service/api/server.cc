#include "service/api/server.h"

#include <grpcpp/ext/health_check_service_server_builder_option.h>
#include <grpcpp/ext/proto_server_reflection_plugin.h>
#include <grpcpp/grpcpp.h>
#include <grpcpp/resource_quota.h>
#include <sys/stat.h>

#include <algorithm>
#include <cstdint>
#include <thread>
#include <utility>

#include "base/rpc/admin_server.h"
#include "base/rpc/hang_up.h"
#include "base/rpc/keepalive.h"
#include "base/rpc/listening.h"
#include "base/rpc/unix_address.h"
#include "base/status/status_macros.h"
#include "service/api/attention_service.h"
#include "service/api/companion_socket.h"
#include "service/api/unix_listener.h"

namespace tributary::service {
namespace {

using Clock = std::chrono::steady_clock;

// After the last accepted call is answered: time for replies to leave the process.
constexpr std::chrono::seconds kFlushTime{5};

AttentionServiceFront::Limits LimitsOf(const ServerOptions& options, Coordinator* coordinator) {
  const OnRefused on_refused = [coordinator](ClientLimit limit) {
    coordinator->observer().OnLimitReached(limit);
  };
  return {.max_message_bytes = static_cast<size_t>(options.max_message_bytes),
          .shared_memory_from_anywhere = options.shared_memory_from_anywhere,
          .max_calls_per_stream = options.max_calls_per_stream,
          .calls = CallQuota::Create(options.max_calls_per_client, on_refused),
          .streams =
              CallQuota::Create(options.max_streams_per_client, on_refused, ClientLimit::kStreams),
          .bytes = ByteBudget::Create(options.bytes_in_flight, on_refused)};
}

class GrpcServer final : public Server {
 public:
  GrpcServer(const ServerOptions& options, Coordinator* coordinator,
             std::shared_ptr<AccessControl> access)
      : settle_(options.drain_settle),
        keepalive_(options.keepalive),
        coordinator_(coordinator),
        limits_(LimitsOf(options, coordinator)),
        front_(coordinator, limits_, std::move(access), options.streams) {}
  ~GrpcServer() override {
    StopSockets();
    if (server_ != nullptr) server_->Shutdown(std::chrono::system_clock::now());
  }

  absl::Status StartAll(const ServerOptions& options);

  std::vector<std::string> addresses() const override { return addresses_; }
  std::string admin_address() const override { return admin_ == nullptr ? "" : admin_->address(); }
  void SetMaxCallsPerClient(int64_t calls) override { limits_.calls->SetMost(calls); }
  void SetMaxStreamsPerClient(int64_t streams) override { limits_.streams->SetMost(streams); }
  ByteLimits bytes_in_flight() const override { return limits_.bytes->limits(); }
  void SetBytesInFlight(const ByteLimits& limits) override { limits_.bytes->SetLimits(limits); }
  void SetReady(bool ready) override {
    if (admin_ != nullptr) admin_->SetReady(ready);
  }
  size_t open_streams() const override { return front_.open_streams(); }
  bool Drain(Clock::time_point deadline) override;

 private:
  absl::Status StartPublic(const ServerOptions& options);
  // The companion of a Unix socket. Where it cannot listen, hosts and service pass no memory.
  void StartCompanion(absl::string_view path);
  // The companions end first: another server may take their names as soon as it has the socket's.
  void StopSockets() {
    companion_sockets_.clear();
    listeners_.clear();
  }

  const std::chrono::milliseconds settle_;
  const ServerKeepalive keepalive_;
  Coordinator* const coordinator_;
  const AttentionServiceFront::Limits limits_;
  AttentionServiceFront front_;
  std::vector<std::string> addresses_;
  std::unique_ptr<AdminServer> admin_;
  std::vector<std::unique_ptr<CompanionSocket>> companion_sockets_;
  std::vector<std::unique_ptr<UnixListener>> listeners_;
  std::unique_ptr<grpc::Server> server_;
};

absl::Status GrpcServer::StartAll(const ServerOptions& options) {
  if (!options.admin_listen.empty()) {
    TRIBUTARY_ASSIGN_OR_RETURN(admin_, AdminServer::Start(options.admin_listen, keepalive_));
    SetReady(coordinator_->ready());
  }
  return StartPublic(options);
}

void GrpcServer::StartCompanion(absl::string_view path) {
  absl::StatusOr<std::unique_ptr<CompanionSocket>> socket =
      CompanionSocket::Listen(path, &coordinator_->mailboxes(), &coordinator_->deposit());
  const bool first = companion_sockets_.empty();
  if (first) {
    coordinator_->mailboxes().SetSocket(socket.ok() ? absl::StatusOr<std::string>((*socket)->path())
                                                    : socket.status());
  }
  if (socket.ok()) companion_sockets_.push_back(*std::move(socket));
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
  // gRPC ends a stream over a message that it finds too large, without details. So it takes some
  // that are, and they are refused one by one (CheckMessage).
  builder.SetMaxReceiveMessageSize(
      options.max_message_bytes > INT32_MAX / 2 ? INT32_MAX : 2 * options.max_message_bytes);
  // What has not been read yet, and replies that have not left, are gRPC's.
  if (options.bytes_in_flight.in_all > 0) {
    grpc::ResourceQuota quota("tributary");
    quota.Resize(static_cast<size_t>(options.bytes_in_flight.in_all) +
                 2 * static_cast<size_t>(options.max_message_bytes));
    builder.SetResourceQuota(quota);
  }
  // A message is limited as it comes over the wire; what it inflates to is not, so none may
  // inflate.
  builder.SetCompressionAlgorithmSupportStatus(GRPC_COMPRESS_DEFLATE, false);
  builder.SetCompressionAlgorithmSupportStatus(GRPC_COMPRESS_GZIP, false);
  // Replies are limited one by one; tensors with their shapes and lengths may be a little larger.
  builder.SetMaxSendMessageSize(-1);
  builder.RegisterService(&front_);
  for (grpc::Service* service : options.more_services) builder.RegisterService(service);
  // Whoever connects through a Unix socket is known by the user that it runs as, so the service
  // accepts there itself. gRPC takes such connections in plain text only: with TLS it listens at
  // all addresses, and certificates say who calls.
  const bool by_user = options.tls.certificate.empty();
  std::vector<std::string> of_grpc;
  for (const std::string& address : options.listen) {
    const absl::string_view path = UnixPath(address);
    if (path.empty() || !by_user) {
      of_grpc.push_back(address);
      continue;
    }
    TRIBUTARY_ASSIGN_OR_RETURN(std::unique_ptr<UnixListener> listener,
                               UnixListener::Bind(path, options.socket_mode));
    listeners_.push_back(std::move(listener));
    StartCompanion(path);
  }
  std::vector<std::string> bound;
  TRIBUTARY_ASSIGN_OR_RETURN(
      server_, ListenAt(of_grpc, ServerCredentialsFrom(options.tls), &builder, &bound));
  for (const auto& listener : listeners_) {
    TRIBUTARY_RETURN_IF_ERROR(listener->Serve(server_.get()));
  }
  auto next = bound.begin();
  for (const std::string& address : options.listen) {
    const absl::string_view path = UnixPath(address);
    const bool own = !path.empty() && by_user;
    addresses_.push_back(own ? address : *next++);
    if (path.empty() || own) continue;
    chmod(std::string(path).c_str(), options.socket_mode);
    StartCompanion(path);
  }
  return absl::OkStatus();
}

bool GrpcServer::Drain(Clock::time_point deadline) {
  SetReady(false);
  coordinator_->StartDraining();
  front_.DrainStreams();
  const bool idle = coordinator_->WaitIdle(deadline);
  // Callers have time to come back and be told UNAVAILABLE, with a delay, by us.
  std::this_thread::sleep_until(std::min(deadline, Clock::now() + settle_));
  // What is open now is a reply on its way, or a stream without calls: it may not hold us longer.
  // The replies of calls that come only now are not waited for: those callers may never cease.
  const Clock::time_point flushed = Clock::now() + kFlushTime;
  front_.open().WaitUntilOver(idle ? flushed : std::min(deadline, flushed));
  // A call that reached gRPC while it shuts down would be reset, and end as CANCELLED. Callers come
  // back after a connection that has ended, but not after that.
  StopSockets();
  HangUp(addresses_);
  server_->Shutdown(std::chrono::system_clock::now());
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
