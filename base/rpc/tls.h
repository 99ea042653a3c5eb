// TLS credentials from PEM files, which are read again when they change: certificates rotate
// without a restart, and connections that are open stay open.
#pragma once

#include <grpcpp/security/credentials.h>
#include <grpcpp/security/server_credentials.h>

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace tributary {

// Paths; empty when not used. To rotate, replace the files in one go (rename over them, or move
// the symbolic link of their folder, as Kubernetes does with secrets).
struct TlsFiles {
  std::string certificate;  // own chain, leaf first
  std::string key;          // of the leaf
  std::string authorities;  // whose signature makes a peer's certificate good
};

// How often files are looked at.
inline constexpr unsigned kTlsRefreshSeconds = 5;

// Whether the files can be read and belong together, before anything depends on them.
// INVALID_ARGUMENT names "<prefix>cert", "<prefix>key" or the name of the authorities' setting.
absl::Status CheckTlsFiles(const TlsFiles& files, absl::string_view prefix,
                           absl::string_view authorities_name);

// Of a server. With authorities, clients must show a certificate that one of them signed. Plain
// text when no certificate is given.
std::shared_ptr<grpc::ServerCredentials> ServerCredentialsFrom(
    const TlsFiles& files, unsigned refresh_seconds = kTlsRefreshSeconds);

// Of what dials. Plain text when no authorities are given.
std::shared_ptr<grpc::ChannelCredentials> ChannelCredentialsFrom(
    const TlsFiles& files, unsigned refresh_seconds = kTlsRefreshSeconds);

// Whether only processes of this machine can reach an address to listen at, or it is one to dial on
// this machine: "unix:..." or a loopback host. Names but "localhost" count as remote.
bool IsLocalAddress(absl::string_view address);

}  // namespace tributary
