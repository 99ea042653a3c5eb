// The files by which a process proves itself and knows its peers. Plain data: a host that includes
// the client library's headers reads no gRPC header because of them.
#pragma once

#include <string>

namespace tributary {

// Paths of PEM files; empty when not used. To rotate, replace the files in one go (rename over
// them, or move the symbolic link of their folder, as Kubernetes does with secrets).
struct TlsFiles {
  std::string certificate;  // the process's own chain, leaf first
  std::string key;          // of the leaf
  std::string authorities;  // a peer's certificate is good when one of these signed it
};

// How a process that dials proves itself to a server, and which servers it believes.
struct ChannelSecurity {
  // When `authorities` is set, the connection uses TLS, and the server's certificate must be signed
  // by one of them and name the host dialled. Certificate and key are shown to servers that ask
  // (mTLS). When all are empty, the connection is plain text.
  TlsFiles tls;
  // The name that the server's certificate must have in place of the host dialled: of a Unix
  // socket, an address, a tunnel. When empty, the host's.
  std::string server_name;
  // The file's first line is sent with every call as "authorization: Bearer <line>"; the file is
  // read again when it changes. When empty, no token is sent.
  std::string token_file;
  // The same for the secret of a group that a worker joins, as kJoinSecretHeader.
  std::string join_secret_file;
};

// Metadata, and so in small letters.
inline constexpr char kJoinSecretHeader[] = "tributary-join-secret";

}  // namespace tributary
