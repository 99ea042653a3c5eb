#include "collective/tls/tls_mesh.h"

#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <sstream>
#include <string>
#include <utility>

#include "base/rpc/descriptor.h"
#include "collective/peers/announcement.h"
#include "collective/peers/own_address.h"
#include "collective/rendezvous/hex.h"
#include "collective/tls/poll_until.h"
#include "collective/tls/tls_strangers.h"

namespace tributary::collective {
namespace {

constexpr char kTlsTransport[] = "tls";
// Beyond the peers themselves.
constexpr size_t kMostStrangers = 64;

// Where a rank listens, and by what it is known. As text: "address port fingerprint".
struct Listener {
  std::string address;  // as numbers
  std::string port;
  Fingerprint fingerprint = {};
};

std::string Encode(const Listener& listener) {
  return listener.address + " " + listener.port + " " +
         ToHex(listener.fingerprint.data(), listener.fingerprint.size());
}

bool Decode(const std::string& text, Listener* out) {
  std::istringstream words(text);
  std::string fingerprint, more;
  return words >> out->address >> out->port >> fingerprint && !(words >> more) &&
         FromHex(fingerprint, out->fingerprint.data(), out->fingerprint.size());
}

Status SystemError(const std::string& what) {
  return {StatusCode::kUnavailable, what + ": " + std::strerror(errno)};
}

// The socket address of numbers; null when they are none.
using AddressPtr = std::unique_ptr<addrinfo, decltype(&freeaddrinfo)>;
AddressPtr SocketAddress(const std::string& address, const std::string& port) {
  addrinfo hints = {};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV;
  addrinfo* found = nullptr;
  if (getaddrinfo(address.c_str(), port.c_str(), &hints, &found) != 0) found = nullptr;
  return {found, &freeaddrinfo};
}

Descriptor NewSocket(const addrinfo& address) {
  return Descriptor(socket(address.ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
}

void SendAtOnce(int socket) {
  const int yes = 1;
  setsockopt(socket, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof(yes));
}

// Listens at a free port of the host.
Status Listen(const std::string& host, Descriptor* socket, Listener* own) {
  if (Status s = ResolveOwnAddress(host, &own->address); !s.ok()) return s;
  const AddressPtr address = SocketAddress(own->address, "0");
  if (address == nullptr) return InvalidArgument("host '" + host + "' has no socket address");
  *socket = NewSocket(*address);
  if (!socket->open() || bind(socket->get(), address->ai_addr, address->ai_addrlen) != 0 ||
      listen(socket->get(), SOMAXCONN) != 0) {
    return SystemError("host '" + host + "' cannot be listened on");
  }
  sockaddr_storage bound = {};
  socklen_t length = sizeof(bound);
  char port[NI_MAXSERV];
  if (getsockname(socket->get(), reinterpret_cast<sockaddr*>(&bound), &length) != 0 ||
      getnameinfo(reinterpret_cast<sockaddr*>(&bound), length, nullptr, 0, port, sizeof(port),
                  NI_NUMERICSERV) != 0) {
    return SystemError("host '" + host + "': no port");
  }
  own->port = port;
  return Status::Ok();
}

// A connection to a peer of lower rank, as it is being made.
struct Dialled {
  int rank = 0;
  std::unique_ptr<TlsConnection> connection;
  bool connected = false;  // under TCP

  std::string who() const { return "rank " + std::to_string(rank); }
};

// Makes the connections of one rank, all at the same time.
class Meeting {
 public:
  Meeting(const TlsOptions& options, Descriptor listening, std::vector<Listener> peers,
          TlsMesh& mesh)
      : options_(options),
        own_(options.place.rank),
        size_(options.place.size),
        listening_(std::move(listening)),
        peers_(std::move(peers)),
        mesh_(mesh),
        strangers_(*mesh.identity, FingerprintsAbove(), options.records_per_key,
                   kMostStrangers + peers_.size()) {}

  Status Run(Deadline deadline) {
    for (int peer = 0; peer < own_; ++peer) {
      if (Status s = Dial(peer); !s.ok()) return s;
    }
    while (true) {
      for (Dialled& dialled : dialled_) {
        if (Status s = Advance(dialled); !s.ok()) return s;
      }
      if (Status s = Accept(); !s.ok()) return s;
      strangers_.Advance([this](std::unique_ptr<TlsConnection> c) { Seat(std::move(c)); });
      const std::string missing = Missing();
      if (missing.empty()) return Status::Ok();
      if (std::chrono::steady_clock::now() >= deadline) {
        return {StatusCode::kDeadlineExceeded,
                "no connection to " + missing + " before the deadline"};
      }
      std::vector<pollfd> waits = {{.fd = listening_.get(), .events = POLLIN}};
      for (const Dialled& dialled : dialled_) {
        if (dialled.connection == nullptr) continue;
        const short events = dialled.connected ? dialled.connection->events() : POLLOUT;
        waits.push_back({.fd = dialled.connection->socket(), .events = events});
      }
      strangers_.AppendTo(&waits);
      PollUntil(waits, std::min(deadline, strangers_.next_look()));
    }
  }

 private:
  std::vector<Fingerprint> FingerprintsAbove() const {
    std::vector<Fingerprint> above;
    for (int peer = own_ + 1; peer < size_; ++peer) above.push_back(peers_[peer].fingerprint);
    return above;
  }

  // The ranks without a connection, by name.
  std::string Missing() const {
    std::string missing;
    for (int peer = 0; peer < size_; ++peer) {
      if (peer == own_ || mesh_.peers[peer] != nullptr) continue;
      missing += (missing.empty() ? "rank " : ", ") + std::to_string(peer);
    }
    return missing;
  }

  Status Dial(int peer) {
    Dialled dialled{.rank = peer};
    const AddressPtr address = SocketAddress(peers_[peer].address, peers_[peer].port);
    if (address == nullptr) {
      return {StatusCode::kInternal, dialled.who() + " published something that is not an address"};
    }
    Descriptor socket = NewSocket(*address);
    if (!socket.open()) return SystemError("no connection to " + dialled.who());
    if (connect(socket.get(), address->ai_addr, address->ai_addrlen) != 0 && errno != EINPROGRESS) {
      return SystemError("no connection to " + dialled.who());
    }
    SendAtOnce(socket.get());
    dialled.connection =
        TlsConnection::Create(*mesh_.identity, std::move(socket), TlsEnd::kConnects,
                              {peers_[peer].fingerprint}, options_.records_per_key);
    if (dialled.connection == nullptr) return NoMemory();
    dialled_.push_back(std::move(dialled));
    return Status::Ok();
  }

  Status Advance(Dialled& dialled) {
    if (dialled.connection == nullptr) return Status::Ok();  // it has its seat
    if (!dialled.connected) {
      pollfd wait = {.fd = dialled.connection->socket(), .events = POLLOUT};
      if (poll(&wait, 1, 0) == 0) return Status::Ok();
      int error = 0;
      socklen_t length = sizeof(error);
      getsockopt(wait.fd, SOL_SOCKET, SO_ERROR, &error, &length);
      if (error != 0) {
        errno = error;
        return SystemError("no connection to " + dialled.who());
      }
      dialled.connected = true;
    }
    switch (dialled.connection->Handshake()) {
      case TlsConnection::Io::kWaits:
        return Status::Ok();
      case TlsConnection::Io::kBroken:
        return {StatusCode::kUnavailable,
                "no connection to " + dialled.who() + ": " + dialled.connection->error()};
      case TlsConnection::Io::kDone:
        break;
    }
    mesh_.peers[dialled.rank] = std::move(dialled.connection);
    return Status::Ok();
  }

  Status Accept() {
    while (true) {
      Descriptor socket(accept4(listening_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
      if (socket.open()) {
        SendAtOnce(socket.get());
        strangers_.Add(std::move(socket));
      } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
        return Status::Ok();
      } else if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM) {
        return SystemError("cannot take connections of peers");
      }  // else whoever it was has gone already
    }
  }

  // A peer connects once; whoever comes with its certificate again is sent away.
  void Seat(std::unique_ptr<TlsConnection> connection) {
    const Fingerprint found = connection->peer();
    for (int peer = own_ + 1; peer < size_; ++peer) {
      if (peers_[peer].fingerprint != found || mesh_.peers[peer] != nullptr) continue;
      mesh_.peers[peer] = std::move(connection);
      return;
    }
  }

  static Status NoMemory() { return {StatusCode::kInternal, "TLS: " + TakeSslError()}; }

  const TlsOptions& options_;
  const int own_;
  const int size_;
  const Descriptor listening_;
  const std::vector<Listener> peers_;  // by rank
  TlsMesh& mesh_;
  TlsStrangers strangers_;
  std::vector<Dialled> dialled_;
};

}  // namespace

Status ConnectTlsMesh(const TlsOptions& options, Rendezvous& rendezvous, Deadline deadline,
                      TlsMesh* mesh) {
  const GroupPlace& place = options.place;
  std::vector<Listener> listeners(static_cast<size_t>(place.size));
  Listener& own = listeners[place.rank];
  Descriptor listening;
  if (Status s = Listen(place.host, &listening, &own); !s.ok()) return s;
  if (Status s = TlsIdentity::Create(place, &mesh->identity); !s.ok()) return s;
  own.fingerprint = mesh->identity->fingerprint();
  if (Status s = Announce(kTlsTransport, place, Encode(own), rendezvous); !s.ok()) return s;
  for (int peer = 0; peer < place.size; ++peer) {
    if (peer == place.rank) continue;
    std::string body;
    if (Status s = AwaitAnnouncement(kTlsTransport, place, peer, rendezvous, deadline, &body);
        !s.ok()) {
      return s;
    }
    if (!Decode(body, &listeners[peer])) {
      return {StatusCode::kInternal,
              "rank " + std::to_string(peer) + " published something that is not an address"};
    }
  }
  mesh->peers.resize(static_cast<size_t>(place.size));
  return Meeting(options, std::move(listening), std::move(listeners), *mesh).Run(deadline);
}

}  // namespace tributary::collective
