#include "worker/step_output.h"

#include <cstdint>
#include <cstring>

#include "kernels/cpu/backend.h"
#include "worker/output_bytes.h"

namespace tributary::worker {

void StoreOutputs(std::span<const StepOutput> outputs, const LayerGeometry& geometry,
                  const float* o, const float* lse, cpu::ThreadPool* pool) {
  for (const StepOutput& output : outputs) {
    const auto row_heads = static_cast<size_t>(RowHeadsOf(output, geometry));
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
