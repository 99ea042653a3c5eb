// One connection under TLS, over a socket that does not block. Internal to this room.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/rpc/descriptor.h"
#include "collective/tls/tls_identity.h"

namespace tributary::collective {

// Used from one thread at a time. Its end closes the socket; what was written still arrives.
class TlsConnection {
 public:
  enum class Io : uint8_t {
    kDone,
    kWaits,   // for the socket, as events() says
    kBroken,  // for good, as error() says
  };

  // Null: OpenSSL has no memory. `trusted` is whom the peer may be.
  static std::unique_ptr<TlsConnection> Create(const TlsIdentity& identity, Descriptor socket,
                                               TlsEnd end, std::vector<Fingerprint> trusted,
                                               uint64_t records_per_key);

  // Called until it is done. kDone: the peer has proved that it is one of those trusted.
  Io Handshake();
  // kDone: at least one byte was read, or written, and *done says how many.
  Io Read(std::byte* data, size_t bytes, size_t* done);
  Io Write(const std::byte* data, size_t bytes, size_t* done);

  int socket() const { return socket_.get(); }
  // Of poll(2): what the call that waits waits for.
  short events() const { return events_; }
  const std::string& error() const { return error_; }
  // Of the peer, after the handshake.
  Fingerprint peer() const { return PeerFingerprint(ssl_.get()); }

 private:
  TlsConnection(Descriptor socket, std::vector<Fingerprint> trusted, uint64_t records_per_key)
      : socket_(std::move(socket)),
        trusted_(std::move(trusted)),
        records_per_key_(records_per_key) {}

  // What a call that returned `result`, which is not its success, means.
  Io Explain(int result);

  const Descriptor socket_;
  const std::vector<Fingerprint> trusted_;
  const uint64_t records_per_key_;
  uint64_t records_ = 0;  // written under the present key
  short events_ = 0;
  std::string error_;
  SslPtr ssl_;  // last: it uses the above
};

}  // namespace tributary::collective
