#include "base/rpc/connection_failure.h"

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"

namespace tributary {
namespace {

// The host that a certificate must name.
std::string ExpectedName(absl::string_view target, const ChannelSecurity& security) {
  if (!security.server_name.empty()) return absl::StrCat("'", security.server_name, "'");
  if (absl::StartsWith(target, "unix:")) return "'localhost', which stands for a Unix socket";
  return absl::StrCat("'", target.substr(0, target.rfind(':')), "'");
}

std::string ClosedByPeer(absl::string_view target, const ChannelSecurity& security) {
  if (security.tls.authorities.empty()) {
    return absl::StrCat("the service at ", target,
                        " closed the connection, which is in plain text: it may want TLS "
                        "(--tls_ca)");
  }
  return absl::StrCat("the service at ", target, " closed the connection after the handshake: ",
                      security.tls.certificate.empty()
                          ? "it may want a certificate (--tls_cert and --tls_key)"
                          : "none of its authorities signed the certificate of --tls_cert");
}

}  // namespace

std::string ExplainConnectionFailure(absl::string_view target, const ChannelSecurity& security,
                                     absl::string_view message) {
  const auto says = [&](absl::string_view part) { return absl::StrContains(message, part); };
  if (says("Connection refused")) {
    return absl::StrCat("nobody listens at ", target, " (connection refused)");
  }
  if (says("No such file or directory")) {
    return absl::StrCat("nobody listens at ", target, " (no such socket)");
  }
  if (says("Permission denied")) {
    return absl::StrCat("may not connect to ", target,
                        " (permission denied): a socket is for the user who listens at it");
  }
  if (says("DNS resolution failed") || says("Domain name not found")) {
    return absl::StrCat("no address is known for ", target);
  }
  if (says("Hostname Verification Check failed")) {
    return absl::StrCat("the certificate of the service at ", target, " does not name ",
                        ExpectedName(target, security),
                        "; --tls_server_name says by which name to know it");
  }
  // The last: signed by another authority that has the name of one in the file.
  if (says("certificate verify failed") || says("CERTIFICATE_VERIFY_FAILED") || says("EVP lib")) {
    return absl::StrCat("the certificate of the service at ", target,
                        " is not trusted: no authority in ", security.tls.authorities,
                        " (--tls_ca) signed it, or it has expired");
  }
  if (says("wrong version number") || says("WRONG_VERSION_NUMBER")) {
    return absl::StrCat("the service at ", target,
                        " speaks plain text, not TLS: leave out --tls_ca, or ask another port");
  }
  if (says("Socket closed") || says("Connection reset")) {
    return ClosedByPeer(target, security);
  }
  return absl::StrCat(target, ": ", message);
}

}  // namespace tributary
