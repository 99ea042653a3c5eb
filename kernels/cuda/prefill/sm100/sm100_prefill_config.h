// The shapes of prefill on sm_100: those of the portable kernel, which stands in its place.
#pragma once

#include "kernels/cuda/prefill/sm80/mma_prefill_config.h"

namespace tributary::cuda {

constexpr int Sm100PrefillRows(int value_dim) { return MmaPrefillRows(value_dim); }
constexpr int Sm100PrefillKeys(int key_dim) { return MmaPrefillKeys(key_dim); }

}  // namespace tributary::cuda
