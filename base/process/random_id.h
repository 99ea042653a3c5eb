// Ids that nobody else has.
#pragma once

#include <cstdint>

namespace tributary {

// 64 bits from the system's source of random numbers; never 0, which stands for no id. It opens
// that source, so it is for ids of which a process draws few.
uint64_t RandomId();

}  // namespace tributary
