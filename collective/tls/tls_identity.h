// A rank's key and certificate for one epoch. Internal to this room.
#pragma once

#include <openssl/ssl.h>

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "collective/peers/group_place.h"
#include "kernels/status.h"

namespace tributary::collective {

// SHA-256 of a certificate.
using Fingerprint = std::array<uint8_t, 32>;

struct FreeSsl {
  void operator()(SSL* ssl) const { SSL_free(ssl); }
};
using SslPtr = std::unique_ptr<SSL, FreeSsl>;

enum class TlsEnd : uint8_t { kConnects, kAccepts };

// The key and the certificate are in this object's memory and nowhere else. Connections keep what
// they need of it.
class TlsIdentity {
 public:
  // Makes both. kInternal: OpenSSL cannot.
  static Status Create(const GroupPlace& place, std::unique_ptr<TlsIdentity>* out);

  const Fingerprint& fingerprint() const { return fingerprint_; }

  // One end of a connection over the socket, which stays the caller's. Its handshake fails unless
  // the peer has the key of a certificate whose fingerprint is in `trusted`, which outlives the
  // handshake. Null: OpenSSL has no memory.
  SslPtr NewConnection(int socket, TlsEnd end, const std::vector<Fingerprint>* trusted) const;

 private:
  struct FreeContext {
    void operator()(SSL_CTX* context) const { SSL_CTX_free(context); }
  };

  TlsIdentity() = default;

  std::unique_ptr<SSL_CTX, FreeContext> context_;
  Fingerprint fingerprint_ = {};
};

// Of the certificate with which the peer has proved itself; all zero when there is none.
Fingerprint PeerFingerprint(const SSL* ssl);

// What went wrong on this thread, by OpenSSL's own words; it is forgotten.
std::string TakeSslError();

}  // namespace tributary::collective
