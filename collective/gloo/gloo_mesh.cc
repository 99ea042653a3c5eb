#include "collective/gloo/gloo_mesh.h"

#include <gloo/common/error.h>
#include <gloo/transport/address.h>
#include <gloo/transport/pair.h>
#include <gloo/transport/tcp/device.h>
#include <netdb.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <thread>
#include <utility>
#include <vector>

#include "base/sync/mutex.h"

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

// The first address of a host name that this machine can listen on, as numbers. Gloo would resolve
// names itself, but reads an uninitialised pointer when there is no such name, and leaks the
// addresses when it can bind none.
Status ResolveOwnAddress(const std::string& host, std::string* address) {
  addrinfo hints = {};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  if (const int rc = getaddrinfo(host.c_str(), nullptr, &hints, &found); rc != 0) {
    return InvalidArgument("host '" + host + "': " + gai_strerror(rc));
  }
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
  if (address->empty()) {
    return InvalidArgument("host '" + host + "' cannot be listened on: " + why);
  }
  return Status::Ok();
}

Status CreateDevice(const std::string& requested, std::shared_ptr<gloo::transport::Device>* out) {
  std::string host = requested;
  if (host.empty()) {
    char name[256] = {};
    if (gethostname(name, sizeof(name) - 1) != 0) {
      return {StatusCode::kInternal, std::string("gethostname: ") + std::strerror(errno)};
    }
    host = name;
  }
  std::string address;
  if (Status s = ResolveOwnAddress(host, &address); !s.ok()) return s;
  try {
    *out = gloo::transport::tcp::CreateDevice(gloo::transport::tcp::attr(address.c_str()));
  } catch (const std::exception& e) {
    return {StatusCode::kInternal, "host '" + host + "': " + StatusOf(e).message()};
  }
  return Status::Ok();
}

// What a rank publishes: the size it believes in, and the address at which each peer reaches it.
// Addresses are Gloo's own bytes, all of one length, in rank order without the own rank.
std::string EncodeAddresses(gloo::transport::Context& context) {
  std::string text = std::to_string(context.size) + "\n";
  for (int peer = 0; peer < context.size; ++peer) {
    if (peer == context.rank) continue;
    const std::vector<char> bytes = context.getPair(peer)->address().bytes();
    text.append(bytes.begin(), bytes.end());
  }
  return text;
}

// The address in what `peer` published that is meant for `rank`.
Status DecodeAddress(const std::string& text, int rank, int size, int peer,
                     std::vector<char>* address) {
  const std::string who = "rank " + std::to_string(peer);
  const size_t header = text.find('\n');
  if (header == std::string::npos) {
    return {StatusCode::kInternal, who + " published something that is not an address"};
  }
  if (text.substr(0, header) != std::to_string(size)) {
    return {StatusCode::kFailedPrecondition, who + " expects a group of " + text.substr(0, header) +
                                                 " ranks, rank " + std::to_string(rank) +
                                                 " one of " + std::to_string(size)};
  }
  const size_t length = (text.size() - header - 1) / (size - 1);
  const size_t index = rank > peer ? rank - 1 : rank;
  const auto begin = text.begin() + header + 1 + index * length;
  address->assign(begin, begin + length);
  return Status::Ok();
}

std::string KeyOf(uint64_t epoch, int rank) {
  return "tributary/gloo/" + std::to_string(epoch) + "/" + std::to_string(rank);
}

// Closes the connections under way when the deadline passes. Gloo bounds the wait for each single
// connection, and by five times its timeout; closing a connection ends that wait at once.
class ConnectWatchdog {
 public:
  ConnectWatchdog(GlooMesh& mesh, Deadline deadline)
      : thread_([this, &mesh, deadline] { Watch(mesh, deadline); }) {}

  ~ConnectWatchdog() {
    {
      const MutexLock lock(mutex_);
      done_ = true;
    }
    wake_.NotifyOne();
    thread_.join();
  }

 private:
  void Watch(GlooMesh& mesh, Deadline deadline) {
    const MutexLock lock(mutex_);
    while (!done_) {
      if (wake_.WaitUntil(mutex_, deadline) || done_) continue;
      CloseMesh(mesh);
      return;
    }
  }

  Mutex mutex_;
  CondVar wake_;
  bool done_ TRIBUTARY_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

Status ConnectToPeers(const GlooOptions& options, Rendezvous& rendezvous, Deadline deadline,
                      GlooMesh& mesh) {
  for (int peer = 0; peer < options.size; ++peer) {
    if (peer == options.rank) continue;
    const std::string who = "rank " + std::to_string(peer);
    std::string published;
    if (Status s = rendezvous.Get(KeyOf(options.epoch, peer), &published, deadline); !s.ok()) {
      return {s.code(), "no address of " + who + ": " + s.message()};
    }
    std::vector<char> address;
    if (Status s = DecodeAddress(published, options.rank, options.size, peer, &address); !s.ok()) {
      return s;
    }
    Status status;
    try {
      mesh.context->getPair(peer)->connect(address);
    } catch (const std::exception& e) {
      status = StatusOf(e);
    }
    // First: a connection that the watchdog closed looks connected, or broken.
    if (std::chrono::steady_clock::now() >= deadline) {
      return {StatusCode::kDeadlineExceeded, "no connection to " + who + " before the deadline"};
    }
    if (!status.ok()) return {status.code(), "no connection to " + who + ": " + status.message()};
  }
  return Status::Ok();
}

}  // namespace

Status ConnectMesh(const GlooOptions& options, Rendezvous& rendezvous, Deadline deadline,
                   GlooMesh* mesh) {
  if (Status s = CreateDevice(options.host, &mesh->device); !s.ok()) return s;
  try {
    mesh->context = mesh->device->createContext(options.rank, options.size);
    mesh->context->setTimeout(std::max(TimeoutOf(deadline), std::chrono::milliseconds(1)));
    for (int peer = 0; peer < options.size; ++peer) {
      if (peer != options.rank) mesh->context->createPair(peer);
    }
  } catch (const std::exception& e) {
    return StatusOf(e);
  }
  const ConnectWatchdog watchdog(*mesh, deadline);
  if (Status s =
          rendezvous.Set(KeyOf(options.epoch, options.rank), EncodeAddresses(*mesh->context));
      !s.ok()) {
    return s;
  }
  return ConnectToPeers(options, rendezvous, deadline, *mesh);
}

void CloseMesh(GlooMesh& mesh) {
  for (int peer = 0; peer < mesh.context->size; ++peer) {
    if (peer == mesh.context->rank) continue;
    try {
      mesh.context->getPair(peer)->close();
    } catch (const std::exception&) {
      // Closing the others matters more; a pair that cannot be closed is closed already.
    }
  }
}

Status StatusOf(const std::exception& e) {
  std::string text = e.what();
  // "[file:line] text"
  if (const size_t end = text.find("] "); !text.empty() && text[0] == '[' && end < text.size()) {
    text.erase(0, end + 2);
  }
  const bool io = dynamic_cast<const gloo::IoException*>(&e) != nullptr;
  return {io ? StatusCode::kUnavailable : StatusCode::kInternal, std::move(text)};
}

std::chrono::milliseconds TimeoutOf(Deadline deadline) {
  constexpr std::chrono::milliseconds kLongest = std::chrono::hours(24 * 365 * 10);
  const Deadline now = std::chrono::steady_clock::now();
  if (deadline <= now) return std::chrono::milliseconds(0);
  return std::min(std::chrono::ceil<std::chrono::milliseconds>(deadline - now), kLongest);
}

}  // namespace tributary::collective
