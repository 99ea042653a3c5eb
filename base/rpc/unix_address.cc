#include "base/rpc/unix_address.h"

#include <fcntl.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"

namespace tributary {
namespace {

using Clock = std::chrono::steady_clock;

// Calls connect or bind.
template <typename Call>
absl::StatusOr<int> OpenAt(absl::string_view path, int flags, const Call& call) {
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
  if (error == EAGAIN)
    return absl::DeadlineExceededError(absl::StrCat("the socket ", path, " is busy"));
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

absl::StatusOr<int> ConnectToUnixBy(absl::string_view path, Clock::time_point deadline) {
  const auto connect_by = [deadline](int fd, const sockaddr* address, socklen_t bytes) {
    // connect waits for room in the listener's queue for as long as a send may take.
    const auto left =
        std::chrono::duration_cast<std::chrono::microseconds>(deadline - Clock::now());
    const int64_t micros = std::max<int64_t>(left.count(), 1);  // 0 would be for ever
    timeval time{};
    time.tv_sec = static_cast<time_t>(micros / 1'000'000);
    time.tv_usec = static_cast<suseconds_t>(micros % 1'000'000);
    if (setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &time, sizeof(time)) != 0) return -1;
    if (connect(fd, address, bytes) != 0) return -1;
    const int flags = fcntl(fd, F_GETFL);
    return flags < 0 ? -1 : fcntl(fd, F_SETFL, flags | O_NONBLOCK);
  };
  return OpenAt(path, 0, connect_by);
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
