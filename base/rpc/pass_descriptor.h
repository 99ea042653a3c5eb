// A file descriptor from one process to another, over a Unix socket.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <cstddef>
#include <optional>
#include <span>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "base/rpc/descriptor.h"

namespace tributary {

// Sends a descriptor with one byte, without waiting. A peer that is gone, or that has not read what
// was sent before, gets nothing. The sender keeps its descriptor.
void SendDescriptor(int connection, int descriptor);
// Sends a descriptor with bytes, without waiting. Returns false when not all of it was sent; errno
// says why.
bool SendWithDescriptor(int connection, absl::string_view bytes, int descriptor);

// Waits until there is something to read. DEADLINE_EXCEEDED: nothing came in time. UNAVAILABLE: the
// connection has ended.
absl::Status AwaitReadable(int connection, std::chrono::steady_clock::time_point deadline);

// What the next message on the connection brings: a descriptor, which the caller closes, or none
// where it brings no descriptor or the peer has closed the connection. UNAVAILABLE: the connection
// failed.
absl::StatusOr<std::optional<int>> ReceiveDescriptor(int connection);

// Some of the bytes that have come, and the descriptor that came with them, if one did. More than
// one descriptor at a time never arrives: the system drops the others.
struct ReceivedBytes {
  ssize_t count = 0;  // what recvmsg returned; errno says why where it is negative
  Descriptor descriptor;
};
// Takes at most bytes.size() bytes, without waiting.
ReceivedBytes ReceiveWithDescriptor(int connection, std::span<char> bytes);

}  // namespace tributary
