// TLS credentials from PEM files, which are read again when they change: certificates rotate
// without a restart, and connections that are open stay open.
#pragma once

#include <grpcpp/security/credentials.h>
#include <grpcpp/security/server_credentials.h>

#include <memory>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "base/rpc/security_options.h"

namespace tributary {

// Seconds between two looks at the files.
inline constexpr unsigned kTlsRefreshSeconds = 5;

// Whether the files can be read and belong together, before anything depends on them.
// INVALID_ARGUMENT names "<prefix>cert", "<prefix>key" or the name of the authorities' setting.
absl::Status CheckTlsFiles(const TlsFiles& files, absl::string_view prefix,
                           absl::string_view authorities_name);

// The credentials of a server. With authorities, clients must show a certificate that one of them
// signed. The server speaks plain text when no certificate is given.
std::shared_ptr<grpc::ServerCredentials> ServerCredentialsFrom(
    const TlsFiles& files, unsigned refresh_seconds = kTlsRefreshSeconds);

// The credentials of a process that dials. It speaks plain text when no authorities are given.
std::shared_ptr<grpc::ChannelCredentials> ChannelCredentialsFrom(
    const TlsFiles& files, unsigned refresh_seconds = kTlsRefreshSeconds);

// Whether an address, to listen at or to dial, stays on this machine: "unix:..." or a loopback
// host. Every name except "localhost" counts as remote.
bool IsLocalAddress(absl::string_view address);

}  // namespace tributary
