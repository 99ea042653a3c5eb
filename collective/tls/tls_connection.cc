#include "collective/tls/tls_connection.h"

#include <openssl/err.h>
#include <poll.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "base/rpc/descriptor.h"

namespace tributary::collective {
namespace {

constexpr size_t kRecord = SSL3_RT_MAX_PLAIN_LENGTH;

}  // namespace

std::unique_ptr<TlsConnection> TlsConnection::Create(const TlsIdentity& identity, Descriptor socket,
                                                     TlsEnd end, std::vector<Fingerprint> trusted,
                                                     uint64_t records_per_key) {
  std::unique_ptr<TlsConnection> connection(
      new TlsConnection(std::move(socket), std::move(trusted), records_per_key));
  connection->ssl_ = identity.NewConnection(connection->socket(), end, &connection->trusted_);
  return connection->ssl_ == nullptr ? nullptr : std::move(connection);
}

// OpenSSL's errors are of the thread, and an old one would be taken for this call's.
TlsConnection::Io TlsConnection::Handshake() {
  ERR_clear_error();
  const int result = SSL_do_handshake(ssl_.get());
  return result == 1 ? Io::kDone : Explain(result);
}

TlsConnection::Io TlsConnection::Read(std::byte* data, size_t bytes, size_t* done) {
  ERR_clear_error();
  const int result = SSL_read_ex(ssl_.get(), data, bytes, done);
  return result == 1 ? Io::kDone : Explain(result);
}

TlsConnection::Io TlsConnection::Write(const std::byte* data, size_t bytes, size_t* done) {
  ERR_clear_error();
  if (records_ >= records_per_key_) {
    // It goes out with the next record.
    if (SSL_key_update(ssl_.get(), SSL_KEY_UPDATE_NOT_REQUESTED) != 1) return Explain(0);
    records_ = 0;
  }
  const int result = SSL_write_ex(ssl_.get(), data, std::min(bytes, kRecord), done);
  if (result != 1) return Explain(result);
  ++records_;
  return Io::kDone;
}

TlsConnection::Io TlsConnection::Explain(int result) {
  const int system = errno;
  switch (SSL_get_error(ssl_.get(), result)) {
    case SSL_ERROR_WANT_READ:
      events_ = POLLIN;
      return Io::kWaits;
    case SSL_ERROR_WANT_WRITE:
      events_ = POLLOUT;
      return Io::kWaits;
    case SSL_ERROR_SYSCALL:
      error_ = system != 0 ? std::strerror(system) : "closed by the peer";
      break;
    case SSL_ERROR_ZERO_RETURN:
      error_ = "closed by the peer";
      break;
    default:
      error_ = ERR_GET_REASON(ERR_peek_error()) == SSL_R_UNEXPECTED_EOF_WHILE_READING
                   ? "closed by the peer"
                   : TakeSslError();
      break;
  }
  return Io::kBroken;
}

}  // namespace tributary::collective
