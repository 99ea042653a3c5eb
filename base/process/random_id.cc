#include "base/process/random_id.h"

#include <random>

namespace tributary {

uint64_t RandomId() {
  std::random_device device;
  const uint64_t id = (uint64_t{device()} << 32) | device();
  return id == 0 ? 1 : id;
}

}  // namespace tributary
