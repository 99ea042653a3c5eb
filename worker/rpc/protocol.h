// What both ends of a session must agree on before they can talk.
#pragma once

#include <cstdint>

namespace tributary::worker {

// Raised when worker.proto changes so that an older end would misread it.
inline constexpr uint32_t kProtocolVersion = 4;

// Of this build. Ranks of different builds may compute differently, so they never form a group.
const char* BuildVersion();

}  // namespace tributary::worker
