#include "base/rpc/listening.h"

#include <unistd.h>

#include <algorithm>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/rpc/unix_address.h"

namespace tributary {
namespace {

// "host:0" as bound.
std::string Bound(const std::string& address, int port) {
  const size_t colon = address.rfind(':');
  if (absl::StartsWith(address, "unix:") || colon == std::string::npos) return address;
  return absl::StrCat(address.substr(0, colon), ":", port);
}

}  // namespace

void ForbidSharedPorts(grpc::ServerBuilder* builder) {
  builder->AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);
}

absl::Status CheckFree(const std::string& address) {
  const absl::string_view path = UnixPath(address);
  if (path.empty()) return absl::OkStatus();
  const absl::StatusOr<int> connected = ConnectToUnix(path, 0);
  if (absl::IsInvalidArgument(connected.status())) {
    return absl::InvalidArgumentError(absl::StrCat("the path of ", address, " is too long"));
  }
  if (!connected.ok()) return absl::OkStatus();
  close(*connected);
  return absl::UnavailableError(
      absl::StrCat("cannot listen at ", address, ": another process does"));
}

absl::StatusOr<std::unique_ptr<grpc::Server>> ListenAt(
    const std::vector<std::string>& addresses,
    const std::shared_ptr<grpc::ServerCredentials>& credentials, grpc::ServerBuilder* builder,
    std::vector<std::string>* bound) {
  ForbidSharedPorts(builder);
  std::vector<int> ports(addresses.size(), 0);
  for (size_t i = 0; i < addresses.size(); ++i) {
    if (absl::Status free = CheckFree(addresses[i]); !free.ok()) return free;
    builder->AddListeningPort(addresses[i], credentials, &ports[i]);
  }
  std::unique_ptr<grpc::Server> server = builder->BuildAndStart();
  for (size_t i = 0; i < addresses.size(); ++i) {
    if (server != nullptr && ports[i] != 0) {
      bound->push_back(Bound(addresses[i], ports[i]));
    } else if (ports[i] == 0) {
      return absl::UnavailableError(absl::StrCat(
          "cannot listen at ", addresses[i], ": the address is in use, unknown or not permitted"));
    }
  }
  if (server == nullptr) return absl::UnavailableError("the server could not be started");
  return server;
}

void WithoutReflection::UpdatePlugins(
    std::vector<std::unique_ptr<grpc::ServerBuilderPlugin>>* plugins) {
  plugins->erase(std::remove_if(plugins->begin(), plugins->end(),
                                [](const auto& plugin) {
                                  return plugin->name() == "proto_server_reflection";
                                }),
                 plugins->end());
}

}  // namespace tributary
