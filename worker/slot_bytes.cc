#include "worker/slot_bytes.h"

#include <algorithm>

#include "kernels/output_format.h"

namespace tributary::worker {

mailbox::SlotRoom SlotBytes(const LayerGeometry& geometry, const OpenSessionCommand& session,
                            int64_t rows, int64_t tokens) {
  const KvGeometry& kv = geometry.kv;
  return {.q = BytesOf(session.q_dtype, rows * geometry.q_heads * kv.key_dim),
          .k = BytesOf(session.kv_dtype, tokens * kv.kv_heads * kv.key_dim),
          .v = BytesOf(session.kv_dtype, tokens * kv.kv_heads * kv.value_dim),
          .output = OutputBytes(session.output_dtype, rows * geometry.q_heads * kv.value_dim),
          .lse = BytesOf(DType::kF32, rows * geometry.q_heads)};
}

mailbox::SlotRoom MostSlotBytes(std::span<const LayerGeometry> layers,
                                const OpenSessionCommand& session, int64_t rows, int64_t tokens) {
  mailbox::SlotRoom most;
  for (const LayerGeometry& layer : layers) {
    const mailbox::SlotRoom bytes = SlotBytes(layer, session, rows, tokens);
    most.q = std::max(most.q, bytes.q);
    most.k = std::max(most.k, bytes.k);
    most.v = std::max(most.v, bytes.v);
    most.output = std::max(most.output, bytes.output);
    most.lse = std::max(most.lse, bytes.lse);
  }
  return most;
}

}  // namespace tributary::worker
