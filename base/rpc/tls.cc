#include "base/rpc/tls.h"

#include <arpa/inet.h>
#include <grpcpp/security/tls_certificate_provider.h>
#include <grpcpp/security/tls_credentials_options.h>
#include <openssl/err.h>
#include <openssl/ssl.h>

#include <vector>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "base/status/errors.h"

namespace tributary {
namespace {

namespace tls = grpc::experimental;

// The last thing OpenSSL had to complain about, for a message.
std::string WhyNot() {
  const unsigned long code = ERR_peek_last_error();  // NOLINT(google-runtime-int): OpenSSL's type
  ERR_clear_error();
  const char* const reason = code == 0 ? nullptr : ERR_reason_error_string(code);
  return reason == nullptr ? "cannot be read" : reason;
}

std::shared_ptr<tls::FileWatcherCertificateProvider> Watch(const TlsFiles& files,
                                                           unsigned refresh_seconds) {
  return std::make_shared<tls::FileWatcherCertificateProvider>(files.key, files.certificate,
                                                               files.authorities, refresh_seconds);
}

}  // namespace

absl::Status CheckTlsFiles(const TlsFiles& files, absl::string_view prefix,
                           absl::string_view authorities_name) {
  const std::string cert_name = absl::StrCat(prefix, "cert");
  const std::string key_name = absl::StrCat(prefix, "key");
  if (files.certificate.empty() != files.key.empty()) {
    return files.key.empty()
               ? InvalidField(key_name, absl::StrCat("is missing; ", cert_name, " is given"))
               : InvalidField(cert_name, absl::StrCat("is missing; ", key_name, " is given"));
  }
  SSL_CTX* const context = SSL_CTX_new(TLS_method());
  if (context == nullptr) return absl::InternalError("OpenSSL has no memory");
  const absl::Cleanup free_context = [context] { SSL_CTX_free(context); };
  if (!files.certificate.empty()) {
    if (SSL_CTX_use_certificate_chain_file(context, files.certificate.c_str()) != 1) {
      return InvalidField(cert_name, absl::StrCat(files.certificate, ": ", WhyNot()));
    }
    if (SSL_CTX_use_PrivateKey_file(context, files.key.c_str(), SSL_FILETYPE_PEM) != 1) {
      return InvalidField(key_name, absl::StrCat(files.key, ": ", WhyNot()));
    }
  }
  if (!files.authorities.empty() &&
      SSL_CTX_load_verify_locations(context, files.authorities.c_str(), nullptr) != 1) {
    return InvalidField(authorities_name, absl::StrCat(files.authorities, ": ", WhyNot()));
  }
  return absl::OkStatus();
}

std::shared_ptr<grpc::ServerCredentials> ServerCredentialsFrom(const TlsFiles& files,
                                                               unsigned refresh_seconds) {
  if (files.certificate.empty()) return grpc::InsecureServerCredentials();
  tls::TlsServerCredentialsOptions options(Watch(files, refresh_seconds));
  options.watch_identity_key_cert_pairs();
  if (!files.authorities.empty()) {
    options.watch_root_certs();
    options.set_cert_request_type(GRPC_SSL_REQUEST_AND_REQUIRE_CLIENT_CERTIFICATE_AND_VERIFY);
  }
  return tls::TlsServerCredentials(options);
}

std::shared_ptr<grpc::ChannelCredentials> ChannelCredentialsFrom(const TlsFiles& files,
                                                                 unsigned refresh_seconds) {
  if (files.authorities.empty()) return grpc::InsecureChannelCredentials();
  tls::TlsChannelCredentialsOptions options;
  options.set_certificate_provider(Watch(files, refresh_seconds));
  options.watch_root_certs();
  if (!files.certificate.empty()) options.watch_identity_key_cert_pairs();
  return tls::TlsCredentials(options);
}

bool IsLocalAddress(absl::string_view address) {
  if (absl::StartsWith(address, "unix:") || absl::StartsWith(address, "unix-abstract:")) {
    return true;
  }
  absl::ConsumePrefix(&address, "dns:///");
  absl::ConsumePrefix(&address, "ipv4:");
  absl::ConsumePrefix(&address, "ipv6:");
  absl::string_view host = address.substr(0, address.rfind(':'));
  if (absl::ConsumePrefix(&host, "[")) absl::ConsumeSuffix(&host, "]");
  if (host == "localhost") return true;
  in_addr v4;
  if (inet_pton(AF_INET, std::string(host).c_str(), &v4) == 1) {
    return (ntohl(v4.s_addr) >> 24) == 127;
  }
  in6_addr v6;
  return inet_pton(AF_INET6, std::string(host).c_str(), &v6) == 1 && IN6_IS_ADDR_LOOPBACK(&v6);
}

}  // namespace tributary
