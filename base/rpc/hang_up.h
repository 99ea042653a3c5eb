// The end of a server's connections as the system brings it about when a process dies.
//
// A call that reaches a gRPC server while it shuts down is reset, and its caller sees CANCELLED, as
// if it had wanted that itself. Over a connection that has ended the same call is UNAVAILABLE.
#pragma once

#include <string>
#include <vector>

namespace tributary {

// Nobody connects to these addresses any more ("host:port", "unix:PATH"), which this process
// listens at, and every connection that was accepted there ends. What was written to it before
// still reaches the peer. Their descriptors stay their owners' to close.
//
// All of the process's connections at a port count, whichever of its addresses they came to.
void HangUp(const std::vector<std::string>& addresses);

}  // namespace tributary
