#include "worker/step_output.h"

#include <cstdint>
#include <cstring>

#include "kernels/cpu/backend.h"
#include "kernels/output_format.h"

namespace tributary::worker {
namespace {

int64_t RowHeads(const StepOutput& output, const LayerGeometry& geometry) {
  return int64_t{output.rows} * geometry.q_heads;
}

}  // namespace

size_t OutputBytesOf(const StepOutput& output, const LayerGeometry& geometry) {
  return OutputBytes(output.format.dtype, RowHeads(output, geometry) * geometry.kv.value_dim);
}

size_t LseBytesOf(const StepOutput& output, const LayerGeometry& geometry) {
  return static_cast<size_t>(RowHeads(output, geometry)) * sizeof(float);
}

size_t BytesInReply(std::span<const StepOutput> outputs, const LayerGeometry& geometry) {
  size_t bytes = 0;
  for (const StepOutput& output : outputs) {
    if (output.o.in_reply) bytes += OutputBytesOf(output, geometry);
    if (output.lse.in_reply) bytes += LseBytesOf(output, geometry);
  }
  return bytes;
}

void StoreOutputs(std::span<const StepOutput> outputs, const LayerGeometry& geometry,
                  const float* o, const float* lse, cpu::ThreadPool* pool) {
  for (const StepOutput& output : outputs) {
    const auto row_heads = static_cast<size_t>(RowHeads(output, geometry));
    const size_t numbers = row_heads * static_cast<size_t>(geometry.kv.value_dim);
    if (output.o.data != nullptr && output.o.data != reinterpret_cast<const std::byte*>(o)) {
      if (pool != nullptr) {
        cpu::StoreOutput(output.format, o, numbers, output.o.data, *pool);
      } else {
        cpu::StoreOutput(output.format, o, numbers, output.o.data);
      }
    }
    if (output.lse.data != nullptr && output.lse.data != reinterpret_cast<const std::byte*>(lse)) {
      std::memcpy(output.lse.data, lse, row_heads * sizeof(float));
    }
    o += numbers;
    lse += row_heads;
  }
}

}  // namespace tributary::worker
