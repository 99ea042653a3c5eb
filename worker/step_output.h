// A step's results, on the way to their callers.
#pragma once

#include <span>

#include "kernels/cpu/thread_pool.h"
#include "worker/cache_spec.h"
#include "worker/command.h"
#include "worker/output_bytes.h"

namespace tributary::worker {

// Stores what is wanted in host memory, from the numbers of all rows: o [rows, q_heads, value_dim],
// lse [rows, q_heads]. Numbers that lie where they are wanted are left alone. `pool` may be null.
void StoreOutputs(std::span<const StepOutput> outputs, const LayerGeometry& geometry,
                  const float* o, const float* lse, cpu::ThreadPool* pool);

}  // namespace tributary::worker
