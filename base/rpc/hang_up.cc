#include "base/rpc/hang_up.h"

#include <dirent.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <algorithm>
#include <memory>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "base/rpc/descriptor.h"
#include "base/rpc/unix_address.h"

namespace tributary {
namespace {

// The descriptors that the process has open.
std::vector<int> OpenFiles() {
  std::vector<int> files;
  const std::unique_ptr<DIR, int (*)(DIR*)> directory(opendir("/proc/self/fd"), closedir);
  if (directory == nullptr) return files;
  while (const dirent* entry = readdir(directory.get())) {
    int file = -1;
    if (absl::SimpleAtoi(entry->d_name, &file)) files.push_back(file);
  }
  return files;
}

int OptionOf(int socket, int option) {
  int value = -1;
  socklen_t size = sizeof value;
  return getsockopt(socket, SOL_SOCKET, option, &value, &size) == 0 ? value : -1;
}

// Where a stream socket is bound: the path of a Unix socket, or ":port". Empty for anything else.
std::string BoundTo(int socket) {
  sockaddr_storage address{};
  socklen_t size = sizeof address;
  auto* const any = reinterpret_cast<sockaddr*>(&address);
  if (OptionOf(socket, SO_TYPE) != SOCK_STREAM || getsockname(socket, any, &size) != 0) return "";
  switch (address.ss_family) {
    case AF_INET:
      return absl::StrCat(":", ntohs(reinterpret_cast<const sockaddr_in*>(any)->sin_port));
    case AF_INET6:
      return absl::StrCat(":", ntohs(reinterpret_cast<const sockaddr_in6*>(any)->sin6_port));
    case AF_UNIX:
      return reinterpret_cast<const sockaddr_un*>(any)->sun_path;
    default:
      return "";
  }
}

std::string PlaceOf(const std::string& address) {
  const absl::string_view path = UnixPath(address);
  return path.empty() ? address.substr(std::min(address.rfind(':'), address.size()))
                      : std::string(path);
}

}  // namespace

void HangUp(const std::vector<std::string>& addresses) {
  std::vector<std::string> places;
  for (const std::string& address : addresses) places.push_back(PlaceOf(address));
  // Of sockets at these places. The number may become another file's at any time, so the socket is
  // looked at, and worked with, under a number of our own.
  const auto for_each = [&places](bool listening, const auto& act) {
    for (const int file : OpenFiles()) {
      const Descriptor socket(fcntl(file, F_DUPFD_CLOEXEC, 0));
      if (!socket.open() || (OptionOf(socket.get(), SO_ACCEPTCONN) == 1) != listening) continue;
      const std::string place = BoundTo(socket.get());
      if (place.empty() || std::find(places.begin(), places.end(), place) == places.end()) continue;
      act(file, socket.get());
    }
  };
  // A socket that nobody reaches takes the place of one that listens. (Its owner, when asked to
  // accept from a socket that had been shut down, would report an error.)
  const Descriptor unreachable(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (unreachable.open()) {
    for_each(true, [&](int file, int) { dup3(unreachable.get(), file, O_CLOEXEC); });
  }
  for_each(false, [](int, int connection) { shutdown(connection, SHUT_RDWR); });
}

}  // namespace tributary
