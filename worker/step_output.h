// Sizes of a step's results, on the way to their callers.
#pragma once

#include <cstddef>
#include <span>

#include "kernels/cpu/thread_pool.h"
#include "worker/cache_spec.h"
#include "worker/command.h"

namespace tributary::worker {

// Bytes of an output's o, in its format, and of its LSEs.
size_t OutputBytesOf(const StepOutput& output, const LayerGeometry& geometry);
size_t LseBytesOf(const StepOutput& output, const LayerGeometry& geometry);

// Bytes of the results that go into the reply: the size of Reply::result.
size_t BytesInReply(std::span<const StepOutput> outputs, const LayerGeometry& geometry);

// Stores what is wanted in host memory, from the numbers of all rows: o [rows, q_heads, value_dim],
// lse [rows, q_heads]. Numbers that lie where they are wanted are left alone. `pool` may be null.
void StoreOutputs(std::span<const StepOutput> outputs, const LayerGeometry& geometry,
                  const float* o, const float* lse, cpu::ThreadPool* pool);

}  // namespace tributary::worker
