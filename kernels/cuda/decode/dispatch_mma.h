// From a choice to the template arguments of mma_attention's shapes.
#pragma once

#include "kernels/cuda/decode/choose_kernel.h"

namespace tributary::cuda {

// Calls f.operator()<tiles of 8 packed rows, thread blocks per multiprocessor>() for the choice.
template <typename F>
auto DispatchMmaShape(const KernelChoice& choice, F f) {
  const bool alone = choice.blocks_per_multiprocessor == 1;
  if (choice.tile_rows == 8) {
    return alone ? f.template operator()<1, 1>() : f.template operator()<1, 2>();
  }
  return alone ? f.template operator()<2, 1>() : f.template operator()<2, 2>();
}

}  // namespace tributary::cuda
