// How a host stores a step's results where their callers want them.
#pragma once

#include <span>

#include "kernels/cpu/thread_pool.h"
#include "worker/cache_spec.h"
#include "worker/command.h"
#include "worker/output_bytes.h"

namespace tributary::worker {

// Stores the outputs that are wanted in host memory. `o` and `lse` are the results of all rows:
// [rows, q_heads, value_dim] and [rows, q_heads]. What lies where it is wanted already is left
// alone. `pool` may be null.
void StoreOutputs(std::span<const StepOutput> outputs, const LayerGeometry& geometry,
                  const float* o, const float* lse, cpu::ThreadPool* pool);

}  // namespace tributary::worker
