// What both ends of a session must agree on before they can talk.
#pragma once

#include <cstdint>

namespace tributary::worker {

// The version of worker.proto. It is raised by a change that an older end would misread.
inline constexpr uint32_t kProtocolVersion = 7;

// The version of this build. Ranks of different builds may compute differently, so they never form
// a group.
const char* BuildVersion();

}  // namespace tributary::worker
