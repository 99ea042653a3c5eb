#include "collective/tls/tls_identity.h"

#include <openssl/err.h>
#include <openssl/evp.h>
#include <openssl/x509.h>
#include <openssl/x509_vfy.h>

#include <algorithm>
#include <string>

namespace tributary::collective {
namespace {

// AES with the 128-bit key first: it is as safe here, and faster.
constexpr char kCiphers[] =
    "TLS_AES_128_GCM_SHA256:TLS_AES_256_GCM_SHA384:TLS_CHACHA20_POLY1305_SHA256";
constexpr size_t kReadBuffer = 128 << 10;
constexpr long kValidSeconds = 24L * 3600 * 365 * 10;

struct FreeKey {
  void operator()(EVP_PKEY* key) const { EVP_PKEY_free(key); }
};
struct FreeCertificate {
  void operator()(X509* certificate) const { X509_free(certificate); }
};
using KeyPtr = std::unique_ptr<EVP_PKEY, FreeKey>;
using CertificatePtr = std::unique_ptr<X509, FreeCertificate>;

bool Digest(const X509* certificate, Fingerprint* out) {
  unsigned int bytes = 0;
  return X509_digest(certificate, EVP_sha256(), out->data(), &bytes) == 1 && bytes == out->size();
}

// In place of the checks of chains, names and dates: the certificate is one of those announced.
int AcceptAnnounced(X509_STORE_CTX* store, void*) {
  const auto* ssl = static_cast<const SSL*>(
      X509_STORE_CTX_get_ex_data(store, SSL_get_ex_data_X509_STORE_CTX_idx()));
  const auto* trusted = static_cast<const std::vector<Fingerprint>*>(SSL_get_app_data(ssl));
  const X509* shown = X509_STORE_CTX_get0_cert(store);
  Fingerprint found;
  if (trusted != nullptr && shown != nullptr && Digest(shown, &found) &&
      std::find(trusted->begin(), trusted->end(), found) != trusted->end()) {
    X509_STORE_CTX_set_error(store, X509_V_OK);
    return 1;
  }
  X509_STORE_CTX_set_error(store, X509_V_ERR_APPLICATION_VERIFICATION);
  return 0;
}

// Signed by the key itself. What it says matters to people who look at the traffic, at most.
CertificatePtr CertificateOf(EVP_PKEY* key, const GroupPlace& place) {
  CertificatePtr certificate(X509_new());
  X509* x = certificate.get();
  if (x == nullptr) return nullptr;
  const std::string name =
      "tributary rank " + std::to_string(place.rank) + ", epoch " + std::to_string(place.epoch);
  X509_NAME* subject = X509_get_subject_name(x);
  const bool made = X509_set_version(x, X509_VERSION_3) == 1 &&
                    ASN1_INTEGER_set(X509_get_serialNumber(x), 1) == 1 &&
                    X509_gmtime_adj(X509_getm_notBefore(x), 0) != nullptr &&
                    X509_gmtime_adj(X509_getm_notAfter(x), kValidSeconds) != nullptr &&
                    X509_NAME_add_entry_by_txt(subject, "CN", MBSTRING_ASC,
                                               reinterpret_cast<const unsigned char*>(name.c_str()),
                                               -1, -1, 0) == 1 &&
                    X509_set_issuer_name(x, subject) == 1 && X509_set_pubkey(x, key) == 1 &&
                    X509_sign(x, key, EVP_sha256()) > 0;
  return made ? std::move(certificate) : nullptr;
}

bool Configure(SSL_CTX* context, EVP_PKEY* key, X509* certificate) {
  SSL_CTX_set_verify(context, SSL_VERIFY_PEER | SSL_VERIFY_FAIL_IF_NO_PEER_CERT, nullptr);
  SSL_CTX_set_cert_verify_callback(context, AcceptAnnounced, nullptr);
  // A connection is made once. Tickets would also be data that a rank which only sends never reads,
  // and closing a socket with such data in it throws away what was sent.
  SSL_CTX_set_session_cache_mode(context, SSL_SESS_CACHE_OFF);
  SSL_CTX_set_mode(context, SSL_MODE_ENABLE_PARTIAL_WRITE | SSL_MODE_ACCEPT_MOVING_WRITE_BUFFER);
  SSL_CTX_set_read_ahead(context, 1);
  SSL_CTX_set_default_read_buffer_len(context, kReadBuffer);
  return SSL_CTX_set_min_proto_version(context, TLS1_3_VERSION) == 1 &&
         SSL_CTX_set_ciphersuites(context, kCiphers) == 1 &&
         SSL_CTX_set_num_tickets(context, 0) == 1 &&
         SSL_CTX_use_certificate(context, certificate) == 1 &&
         SSL_CTX_use_PrivateKey(context, key) == 1;
}

}  // namespace

Status TlsIdentity::Create(const GroupPlace& place, std::unique_ptr<TlsIdentity>* out) {
  ERR_clear_error();
  const auto failed = [](const char* what) -> Status {
    return {StatusCode::kInternal, std::string("TLS: ") + what + ": " + TakeSslError()};
  };
  const KeyPtr key(EVP_EC_gen("P-256"));
  if (key == nullptr) return failed("no key");
  const CertificatePtr certificate = CertificateOf(key.get(), place);
  std::unique_ptr<TlsIdentity> identity(new TlsIdentity());
  if (certificate == nullptr || !Digest(certificate.get(), &identity->fingerprint_)) {
    return failed("no certificate");
  }
  identity->context_.reset(SSL_CTX_new(TLS_method()));
  if (identity->context_ == nullptr ||
      !Configure(identity->context_.get(), key.get(), certificate.get())) {
    return failed("no context");
  }
  *out = std::move(identity);
  return Status::Ok();
}

SslPtr TlsIdentity::NewConnection(int socket, TlsEnd end,
                                  const std::vector<Fingerprint>* trusted) const {
  SslPtr ssl(SSL_new(context_.get()));
  if (ssl == nullptr || SSL_set_fd(ssl.get(), socket) != 1) return nullptr;
  // It is only read.
  SSL_set_app_data(ssl.get(), const_cast<std::vector<Fingerprint>*>(trusted));
  if (end == TlsEnd::kAccepts) {
    SSL_set_accept_state(ssl.get());
  } else {
    SSL_set_connect_state(ssl.get());
  }
  return ssl;
}

Fingerprint PeerFingerprint(const SSL* ssl) {
  Fingerprint found = {};
  const CertificatePtr shown(SSL_get1_peer_certificate(ssl));
  if (shown != nullptr && !Digest(shown.get(), &found)) found = {};
  return found;
}

std::string TakeSslError() {
  const unsigned long error = ERR_get_error();
  ERR_clear_error();
  const char* reason = ERR_reason_error_string(error);
  return reason == nullptr ? "the peer ended it" : reason;
}

}  // namespace tributary::collective
