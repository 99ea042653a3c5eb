// A full mesh of TLS connections, one to every peer. Internal to this room.
#pragma once

#include <memory>
#include <vector>

#include "collective/communicator.h"
#include "collective/rendezvous/rendezvous.h"
#include "collective/tls/tls.h"
#include "collective/tls/tls_connection.h"
#include "collective/tls/tls_identity.h"
#include "kernels/status.h"

namespace tributary::collective {

struct TlsMesh {
  std::unique_ptr<TlsIdentity> identity;
  std::vector<std::unique_ptr<TlsConnection>> peers;  // by rank; null for this one
};

// Publishes this rank's address and fingerprint, waits for those of its peers, connects to those of
// lower rank and takes the connections of those of higher rank. When it returns OK every peer has
// proved who it is; whether every peer has accepted this rank shows in the first operation.
Status ConnectTlsMesh(const TlsOptions& options, Rendezvous& rendezvous, Deadline deadline,
                      TlsMesh* mesh);

}  // namespace tributary::collective
