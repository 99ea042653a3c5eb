#include "collective/peers/own_address.h"

#include <netdb.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

namespace tributary::collective {
namespace {

// Whether a socket of this machine can be bound to the address; errno says why not.
bool CanBind(const addrinfo& address) {
  const int fd = socket(address.ai_family, address.ai_socktype | SOCK_CLOEXEC, 0);
  if (fd < 0) return false;
  const bool bound = bind(fd, address.ai_addr, address.ai_addrlen) == 0;
  const int error = errno;
  close(fd);
  errno = error;
  return bound;
}

}  // namespace

Status ResolveOwnAddress(const std::string& requested, std::string* address) {
  std::string host = requested;
  if (host.empty()) {
    char name[256] = {};
    if (gethostname(name, sizeof(name) - 1) != 0) {
      return {StatusCode::kInternal, std::string("gethostname: ") + std::strerror(errno)};
    }
    host = name;
  }
  addrinfo hints = {};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  if (const int rc = getaddrinfo(host.c_str(), nullptr, &hints, &found); rc != 0) {
    return InvalidArgument("host '" + host + "': " + gai_strerror(rc));
  }
  address->clear();
  std::string why = "it has no address";
  for (const addrinfo* a = found; a != nullptr && address->empty(); a = a->ai_next) {
    char text[NI_MAXHOST];
    if (!CanBind(*a)) {
      why = std::strerror(errno);
    } else if (getnameinfo(a->ai_addr, a->ai_addrlen, text, sizeof(text), nullptr, 0,
                           NI_NUMERICHOST) == 0) {
      *address = text;
    }
  }
  freeaddrinfo(found);
  if (!address->empty()) return Status::Ok();
  return InvalidArgument("host '" + host + "' cannot be listened on: " + why);
}

}  // namespace tributary::collective
