// Operations over a mesh of TLS connections. Internal to this room.
#pragma once

#include <memory>

#include "collective/peers/group_place.h"
#include "collective/peers/transfers.h"
#include "collective/tls/tls_mesh.h"
#include "kernels/status.h"

namespace tributary::collective {

// Sends and receives on the thread that calls Run; there are no others. kUnavailable: the system
// has no descriptor left to be woken by.
Status CreateTlsTransfers(const GroupPlace& place, TlsMesh mesh, std::unique_ptr<Transfers>* out);

}  // namespace tributary::collective
