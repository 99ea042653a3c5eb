// The address at which a rank listens for its peers.
#pragma once

#include <string>

#include "kernels/status.h"

namespace tributary::collective {

// The first address of `host` (a name or an IP; empty: this machine's name) that this machine can
// listen on, as numbers. kInvalidArgument, which names the host, when there is none.
Status ResolveOwnAddress(const std::string& host, std::string* address);

}  // namespace tributary::collective
