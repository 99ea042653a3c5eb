// A file descriptor from one process to another, over a Unix socket.
#pragma once

#include <optional>

#include "absl/status/statusor.h"

namespace tributary {

// Sends a descriptor with one byte, without waiting. A peer that is gone, or that has not read what
// was sent before, gets nothing. The sender keeps its descriptor.
void SendDescriptor(int connection, int descriptor);

// What the next message on the connection brings: a descriptor, which the caller closes, or none
// where it brings no descriptor or the peer has closed the connection. UNAVAILABLE: the connection
// failed.
absl::StatusOr<std::optional<int>> ReceiveDescriptor(int connection);

}  // namespace tributary
