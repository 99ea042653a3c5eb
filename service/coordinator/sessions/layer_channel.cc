#include "service/coordinator/sessions/layer_channel.h"

namespace tributary::service {

LayerBytes BytesOf(const LayerCall& call, const SessionTerms& terms) {
  const auto rows = static_cast<size_t>(call.query_rows);
  const auto tokens = static_cast<size_t>(call.new_tokens);
  const auto q_heads = static_cast<size_t>(call.geometry.q_heads);
  const auto kv_heads = static_cast<size_t>(call.geometry.kv.kv_heads);
  const auto key_dim = static_cast<size_t>(call.geometry.kv.key_dim);
  const auto value_dim = static_cast<size_t>(call.geometry.kv.value_dim);
  return {.q = rows * q_heads * key_dim * SizeOf(terms.command.q_dtype),
          .k = tokens * kv_heads * key_dim * SizeOf(terms.command.kv_dtype),
          .v = tokens * kv_heads * value_dim * SizeOf(terms.command.kv_dtype),
          .output = rows * q_heads * value_dim * SizeOf(terms.command.output_dtype),
          .lse = terms.command.return_lse ? rows * q_heads * sizeof(float) : 0};
}

}  // namespace tributary::service
