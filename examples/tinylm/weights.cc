#include "examples/tinylm/weights.h"

#include <algorithm>
#include <fstream>
#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "examples/tinylm/safetensors.h"

namespace tributary::tinylm {
namespace {

absl::StatusOr<ModelConfig> LoadConfig(const std::string& path) {
  std::ifstream file(path);
  if (!file) return absl::NotFoundError(absl::StrCat(path, ": cannot be opened"));
  ModelConfig config;
  try {
    const nlohmann::json json = nlohmann::json::parse(file);
    config.vocab_size = json.at("vocab_size");
    config.hidden_size = json.at("hidden_size");
    config.intermediate_size = json.at("intermediate_size");
    config.layers = json.at("num_hidden_layers");
    config.q_heads = json.at("num_attention_heads");
    config.kv_heads = json.at("num_key_value_heads");
    config.head_dim = json.at("head_dim");
    config.max_positions = json.at("max_position_embeddings");
    config.rms_norm_eps = json.at("rms_norm_eps");
    config.rope_theta = json.at("rope_theta");
    config.tied_embeddings = json.at("tie_word_embeddings");
  } catch (const nlohmann::json::exception& error) {
    return absl::InvalidArgumentError(absl::StrCat(path, ": ", error.what()));
  }
  const int32_t least = std::min({config.hidden_size, config.intermediate_size, config.layers,
                                  config.q_heads, config.kv_heads, config.max_positions});
  if (least < 1 || config.q_heads % config.kv_heads != 0 || config.head_dim < 2 ||
      config.head_dim % 2 != 0) {
    return absl::InvalidArgumentError(absl::StrCat(path, ": sizes that make no model"));
  }
  if (config.vocab_size != 256) {
    return absl::InvalidArgumentError(
        absl::StrCat(path, ": vocab_size is ", config.vocab_size, "; a token here is a byte, 256"));
  }
  return config;
}

// Reads tensors of a file one after the other; the first failure stays.
class Reader {
 public:
  explicit Reader(const Safetensors& file) : file_(file) {}

  Matrix ReadMatrix(const std::string& name, int64_t rows, int64_t columns) {
    const std::vector<float> values = Read(name, {rows, columns});
    if (values.empty()) return {};
    return Eigen::Map<const Matrix>(values.data(), rows, columns);
  }

  RowVector ReadVector(const std::string& name, int64_t size) {
    const std::vector<float> values = Read(name, {size});
    if (values.empty()) return {};
    return Eigen::Map<const RowVector>(values.data(), size);
  }

  const absl::Status& status() const { return status_; }

 private:
  std::vector<float> Read(const std::string& name, const std::vector<int64_t>& shape) {
    if (!status_.ok()) return {};
    absl::StatusOr<std::vector<float>> values = file_.Floats(name, shape);
    if (values.ok()) return *std::move(values);
    status_ = values.status();
    return {};
  }

  const Safetensors& file_;
  absl::Status status_;
};

LayerWeights ReadLayer(Reader& reader, const ModelConfig& c, int32_t layer) {
  const std::string prefix = absl::StrCat("model.layers.", layer, ".");
  const int64_t q_size = int64_t{c.q_heads} * c.head_dim;
  const int64_t kv_size = int64_t{c.kv_heads} * c.head_dim;
  const int64_t hidden = c.hidden_size;
  const int64_t inner = c.intermediate_size;
  LayerWeights w;
  w.input_norm = reader.ReadVector(prefix + "input_layernorm.weight", hidden);
  w.q_proj = reader.ReadMatrix(prefix + "self_attn.q_proj.weight", q_size, hidden);
  w.k_proj = reader.ReadMatrix(prefix + "self_attn.k_proj.weight", kv_size, hidden);
  w.v_proj = reader.ReadMatrix(prefix + "self_attn.v_proj.weight", kv_size, hidden);
  w.o_proj = reader.ReadMatrix(prefix + "self_attn.o_proj.weight", hidden, q_size);
  w.post_attention_norm = reader.ReadVector(prefix + "post_attention_layernorm.weight", hidden);
  w.gate_proj = reader.ReadMatrix(prefix + "mlp.gate_proj.weight", inner, hidden);
  w.up_proj = reader.ReadMatrix(prefix + "mlp.up_proj.weight", inner, hidden);
  w.down_proj = reader.ReadMatrix(prefix + "mlp.down_proj.weight", hidden, inner);
  return w;
}

}  // namespace

absl::StatusOr<Weights> LoadWeights(const std::string& folder) {
  absl::StatusOr<ModelConfig> config = LoadConfig(folder + "/config.json");
  if (!config.ok()) return config.status();
  const std::string path = folder + "/model.safetensors";
  const absl::StatusOr<Safetensors> file = Safetensors::Read(path);
  if (!file.ok()) return file.status();

  Reader reader(*file);
  Weights weights;
  weights.config = *config;
  const ModelConfig& c = weights.config;
  weights.embedding = reader.ReadMatrix("model.embed_tokens.weight", c.vocab_size, c.hidden_size);
  for (int32_t layer = 0; layer < c.layers && reader.status().ok(); ++layer) {
    weights.layers.push_back(ReadLayer(reader, c, layer));
  }
  weights.norm = reader.ReadVector("model.norm.weight", c.hidden_size);
  if (!c.tied_embeddings) {
    weights.lm_head = reader.ReadMatrix("lm_head.weight", c.vocab_size, c.hidden_size);
  }
  if (!reader.status().ok()) {
    return absl::Status(reader.status().code(),
                        absl::StrCat(path, ": ", reader.status().message()));
  }
  return weights;
}

}  // namespace tributary::tinylm
