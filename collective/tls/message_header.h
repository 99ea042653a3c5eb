// What stands in front of every message: the operation that its sender is in. Internal to this
// room.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "collective/op.h"

namespace tributary::collective {

// Sent as it lies in memory: the machines of a group store numbers alike, as their tensors do. The
// epoch is not part of it, since a connection is of one epoch.
struct MessageHeader {
  uint64_t sequence = 0;  // counts the operations of a communicator
  uint64_t bytes = 0;     // that follow
  uint32_t op = 0;
  int32_t root = 0;  // 0 where the operation has none

  bool operator==(const MessageHeader&) const = default;
};
static_assert(sizeof(MessageHeader) == 24);

// "all_gather of 40 bytes (operation 7)".
inline std::string Describe(const MessageHeader& header) {
  const bool known = header.op <= static_cast<uint32_t>(Op::kPass);
  return (known ? Name(static_cast<Op>(header.op)) : "an unknown operation") + std::string(" of ") +
         std::to_string(header.bytes) + " bytes (operation " + std::to_string(header.sequence) +
         (header.root == 0 ? ")" : ", root " + std::to_string(header.root) + ")");
}

}  // namespace tributary::collective
