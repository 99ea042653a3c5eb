// Messages of gRPC 1.51, as it gives them, and what becomes of them.
#include "base/rpc/connection_failure.h"

#include <gtest/gtest.h>

namespace tributary {
namespace {

ChannelSecurity Believing(const std::string& authorities) {
  ChannelSecurity security;
  security.tls.authorities = authorities;
  return security;
}

TEST(ConnectionFailure, NobodyListens) {
  EXPECT_EQ(ExplainConnectionFailure("127.0.0.1:1", {},
                                     "failed to connect to all addresses; last error: UNKNOWN: "
                                     "ipv4:127.0.0.1:1: Failed to connect to remote host: "
                                     "Connection refused"),
            "nobody listens at 127.0.0.1:1 (connection refused)");
  EXPECT_EQ(ExplainConnectionFailure("unix:/a", {},
                                     "last error: UNKNOWN: unix:/a: No such file or directory"),
            "nobody listens at unix:/a (no such socket)");
  EXPECT_EQ(ExplainConnectionFailure("a.example:1", {},
                                     "DNS resolution failed for a.example:1: C-ares status is not "
                                     "ARES_SUCCESS qtype=AAAA name=a.example"),
            "no address is known for a.example:1");
}

TEST(ConnectionFailure, TheNameInTheCertificate) {
  const std::string message =
      "UNKNOWN: ipv4:127.0.0.1:1: Custom verification check failed with error: UNAUTHENTICATED: "
      "Hostname Verification Check failed.";
  EXPECT_EQ(ExplainConnectionFailure("127.0.0.1:1", Believing("ca.pem"), message),
            "the certificate of the service at 127.0.0.1:1 does not name '127.0.0.1'; "
            "--tls_server_name says by which name to know it");
  ChannelSecurity named = Believing("ca.pem");
  named.server_name = "a.example";
  EXPECT_EQ(ExplainConnectionFailure("unix:/a", named, message),
            "the certificate of the service at unix:/a does not name 'a.example'; "
            "--tls_server_name says by which name to know it");
}

TEST(ConnectionFailure, TrustInTheCertificate) {
  EXPECT_EQ(ExplainConnectionFailure("a:1", Believing("ca.pem"),
                                     "Tls handshake failed: SSL_ERROR_SSL: error:0A000086:SSL "
                                     "routines::certificate verify failed"),
            "the certificate of the service at a:1 is not trusted: no authority in ca.pem "
            "(--tls_ca) signed it, or it has expired");
  EXPECT_EQ(ExplainConnectionFailure("a:1", Believing("ca.pem"),
                                     "Tls handshake failed: SSL_ERROR_SSL: error:06880006:asn1 "
                                     "encoding routines::EVP lib"),
            "the certificate of the service at a:1 is not trusted: no authority in ca.pem "
            "(--tls_ca) signed it, or it has expired");
}

TEST(ConnectionFailure, OneEndSpeaksPlainText) {
  EXPECT_EQ(ExplainConnectionFailure("a:1", Believing("ca.pem"),
                                     "Tls handshake failed: SSL_ERROR_SSL: error:0A00010B:SSL "
                                     "routines::wrong version number"),
            "the service at a:1 speaks plain text, not TLS: leave out --tls_ca, or ask another "
            "port");
  EXPECT_EQ(ExplainConnectionFailure("a:1", {}, "UNAVAILABLE: ipv4:127.0.0.1:1: Socket closed"),
            "the service at a:1 closed the connection, which is in plain text: it may want TLS "
            "(--tls_ca)");
}

TEST(ConnectionFailure, TheCertificateThatIsMissingOrRefused) {
  const std::string closed = "UNAVAILABLE: ipv4:127.0.0.1:1: Socket closed";
  EXPECT_EQ(ExplainConnectionFailure("a:1", Believing("ca.pem"), closed),
            "the service at a:1 closed the connection after the handshake: it may want a "
            "certificate (--tls_cert and --tls_key)");
  ChannelSecurity showing = Believing("ca.pem");
  showing.tls.certificate = "own.pem";
  EXPECT_EQ(ExplainConnectionFailure("a:1", showing, closed),
            "the service at a:1 closed the connection after the handshake: none of its authorities "
            "signed the certificate of --tls_cert");
}

TEST(ConnectionFailure, WhatIsNotKnownStaysAsItIs) {
  EXPECT_EQ(ExplainConnectionFailure("a:1", {}, "the dog ate it"), "a:1: the dog ate it");
}

}  // namespace
}  // namespace tributary
