#include "base/rpc/admin_server.h"

#include <grpcpp/health_check_service_interface.h>
#include <grpcpp/security/server_credentials.h>
#include <grpcpp/server_builder.h>

#include <chrono>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "base/rpc/listening.h"

namespace tributary {

absl::StatusOr<std::unique_ptr<AdminServer>> AdminServer::Start(const std::string& address,
                                                                const ServerKeepalive& keepalive) {
  std::unique_ptr<AdminServer> admin(new AdminServer);
  grpc::EnableDefaultHealthCheckService(true);
  grpc::ServerBuilder builder;
  SetServerKeepalive(builder, keepalive);
  builder.SetOption(std::make_unique<WithoutReflection>());
  builder.RegisterCallbackGenericService(&admin->others_);
  std::vector<std::string> bound;
  absl::StatusOr<std::unique_ptr<grpc::Server>> server =
      ListenAt({address}, grpc::InsecureServerCredentials(), &builder, &bound);
  if (!server.ok()) return server.status();
  admin->server_ = *std::move(server);
  admin->address_ = bound.front();
  admin->server_->GetHealthCheckService()->SetServingStatus("liveness", true);
  admin->SetReady(false);
  return admin;
}

AdminServer::~AdminServer() {
  if (server_ != nullptr) server_->Shutdown(std::chrono::system_clock::now());
}

int AdminServer::port() const {
  int port = 0;
  const size_t colon = address_.rfind(':');
  if (absl::StartsWith(address_, "unix:") || colon == std::string::npos) return 0;
  return absl::SimpleAtoi(absl::string_view(address_).substr(colon + 1), &port) ? port : 0;
}

void AdminServer::SetReady(bool ready) {
  server_->GetHealthCheckService()->SetServingStatus("readiness", ready);
}

}  // namespace tributary
