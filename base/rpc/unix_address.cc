#include "base/rpc/unix_address.h"

#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"

namespace tributary {
namespace {

// Calls connect or bind.
absl::StatusOr<int> OpenAt(absl::string_view path, int flags,
                           int (*call)(int, const sockaddr*, socklen_t)) {
  sockaddr_un address{};
  if (path.size() >= sizeof(address.sun_path)) {
    return absl::InvalidArgumentError(absl::StrCat("the path ", path, " is too long for a socket"));
  }
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path, path.data(), path.size());
  const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | flags, 0);
  if (fd >= 0 && call(fd, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0) {
    return fd;
  }
  const int error = errno;
  if (fd >= 0) close(fd);
  return absl::UnavailableError(absl::StrCat("the socket ", path, ": ", std::strerror(error)));
}

}  // namespace

absl::string_view UnixPath(absl::string_view address) {
  if (!absl::ConsumePrefix(&address, "unix:")) return {};
  if (absl::StartsWith(address, "///")) address.remove_prefix(2);
  return address;
}

absl::StatusOr<int> ConnectToUnix(absl::string_view path, int flags) {
  return OpenAt(path, flags, connect);
}

absl::StatusOr<int> BindToUnix(absl::string_view path, int flags) {
  return OpenAt(path, flags, bind);
}

std::optional<uid_t> UserAt(int connection) {
  ucred peer{};
  socklen_t bytes = sizeof(peer);
  if (getsockopt(connection, SOL_SOCKET, SO_PEERCRED, &peer, &bytes) != 0 ||
      bytes != sizeof(peer) || peer.uid == static_cast<uid_t>(-1)) {
    return std::nullopt;
  }
  return peer.uid;
}

std::string CompanionSocketOf(absl::string_view path) { return absl::StrCat(path, ".mailbox"); }

}  // namespace tributary
