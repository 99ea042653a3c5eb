// Sizes of a step's results, on the way to their callers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "kernels/output_format.h"
#include "worker/cache_spec.h"
#include "worker/command.h"

namespace tributary::worker {

inline int64_t RowHeadsOf(const StepOutput& output, const LayerGeometry& geometry) {
  return int64_t{output.rows} * geometry.q_heads;
}

// Bytes of an output's o, in its format.
inline size_t OutputBytesOf(const StepOutput& output, const LayerGeometry& geometry) {
  return OutputBytes(output.format.dtype, RowHeadsOf(output, geometry) * geometry.kv.value_dim);
}

// Bytes of its LSEs.
inline size_t LseBytesOf(const StepOutput& output, const LayerGeometry& geometry) {
  return static_cast<size_t>(RowHeadsOf(output, geometry)) * sizeof(float);
}

// Bytes of the results that go into the reply: the size of Reply::result.
inline size_t BytesInReply(std::span<const StepOutput> outputs, const LayerGeometry& geometry) {
  size_t bytes = 0;
  for (const StepOutput& output : outputs) {
    if (output.o.in_reply) bytes += OutputBytesOf(output, geometry);
    if (output.lse.in_reply) bytes += LseBytesOf(output, geometry);
  }
  return bytes;
}

}  // namespace tributary::worker
