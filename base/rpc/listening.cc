#include "base/rpc/listening.h"

#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"

namespace tributary {
namespace {

// A path that fits.
bool SomebodyListensAt(absl::string_view path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path, path.data(), path.size());
  const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (fd < 0) return false;
  const bool connected =
      connect(fd, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0;
  close(fd);
  return connected;
}

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
  absl::string_view path = address;
  if (!absl::ConsumePrefix(&path, "unix:")) return absl::OkStatus();
  if (absl::StartsWith(path, "///")) path.remove_prefix(2);
  if (path.size() >= sizeof(sockaddr_un{}.sun_path)) {
    return absl::InvalidArgumentError(absl::StrCat("the path of ", address, " is too long"));
  }
  if (SomebodyListensAt(path)) {
    return absl::UnavailableError(
        absl::StrCat("cannot listen at ", address, ": another process does"));
  }
  return absl::OkStatus();
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
