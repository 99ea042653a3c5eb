#include "tests/service/endpoint_work.h"

#include <random>

#include "absl/strings/escaping.h"

namespace tributary::service::testing {
namespace {

std::vector<float> Draw(int32_t rows, int32_t heads, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> values(static_cast<size_t>(rows) * static_cast<size_t>(heads * kWorkDim));
  for (float& value : values) value = normal(random);
  return values;
}

// Heads [first, first + count) of [rows, all, dim], in place.
client::HeadRows Part(std::vector<float>& tensor, int32_t rows, int32_t all, int32_t first,
                      int32_t count) {
  if (count == 0) return {};
  return {.data = tensor.data() + static_cast<size_t>(first) * kWorkDim,
          .rows = rows,
          .heads = count,
          .dim = kWorkDim,
          .row_stride = int64_t{all} * kWorkDim};
}

}  // namespace

v1::CacheSpec WorkSpec() {
  v1::CacheSpec spec;
  spec.set_layers(kWorkLayers);
  spec.set_q_heads(kWorkQHeads);
  spec.set_kv_heads(kWorkKvHeads);
  spec.set_head_dim(kWorkDim);
  spec.set_page_size(16);
  spec.set_kv_dtype(v1::DTYPE_BF16);
  spec.set_capacity_tokens(4096);
  return spec;
}

WorkTensors::WorkTensors(int64_t position, int32_t layer, int32_t rows) {
  const uint64_t seed = static_cast<uint64_t>(position) * 8 + static_cast<uint64_t>(layer) * 4;
  q = Draw(rows, kWorkQHeads, seed);
  k = Draw(rows, kWorkKvHeads, seed + 1);
  v = Draw(rows, kWorkKvHeads, seed + 2);
}

absl::Status DriveEndpoint(client::HostSession& session, uint64_t sequence, int64_t position,
                           int32_t rows, const OnOutput& done) {
  const auto step = session.Submit({.layers = kWorkLayers,
                                    .entries = {{.sequence_id = sequence,
                                                 .first_position = position,
                                                 .query_rows = rows,
                                                 .new_tokens = rows}}});
  if (!step.ok()) return step.status();
  const v1::LayerShape& shape = session.opened().shapes(0);
  const int32_t q_heads = shape.q_heads();
  for (int32_t layer = 0; layer < kWorkLayers; ++layer) {
    WorkTensors tensors(position, layer, rows);
    std::vector<float> output(static_cast<size_t>(rows) * static_cast<size_t>(q_heads * kWorkDim));
    const absl::Status attended = session.Attend(
        {.q = Part(tensors.q, rows, kWorkQHeads, shape.first_q_head(), q_heads),
         .k = Part(tensors.k, rows, kWorkKvHeads, shape.first_kv_head(), shape.kv_heads()),
         .v = Part(tensors.v, rows, kWorkKvHeads, shape.first_kv_head(), shape.kv_heads()),
         .output = Part(output, rows, q_heads, 0, q_heads)});
    if (!attended.ok()) return attended;
    done(layer, output);
  }
  return session.Await(*step);
}

std::string ToHex(const std::string& bytes) { return absl::BytesToHexString(bytes); }
std::string FromHex(const std::string& digits) { return absl::HexStringToBytes(digits); }

}  // namespace tributary::service::testing
