// The yardstick: reads memory from one end to the other and does nothing else with it.
#pragma once

#include <cstddef>

namespace tributary::bench {

inline constexpr size_t kReadUnit = 512;  // bytes an iteration reads

// Reads [data, data + bytes) with the widest loads the processor has. `bytes` is a multiple of
// kReadUnit and `data` is aligned to 64.
void StreamingRead(const std::byte* data, size_t bytes);

}  // namespace tributary::bench
