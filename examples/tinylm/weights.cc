#include "examples/tinylm/weights.h"

#include <algorithm>
#include <fstream>
#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "examples/tinylm/safetensors.h"

namespace tributary::tinylm {
namespace {

// Reads the file and hands it on; what `read` throws becomes an error.
template <typename Read>
absl::Status ReadJson(const std::string& path, Read read) {
  std::ifstream file(path);
  if (!file) return absl::NotFoundError(absl::StrCat(path, ": cannot be opened"));
  try {
    read(nlohmann::json::parse(file));
  } catch (const nlohmann::json::exception& error) {
    return absl::InvalidArgumentError(absl::StrCat(path, ": ", error.what()));
  }
  return absl::OkStatus();
}

void ReadShape(const nlohmann::json& json, ModelConfig* config) {
  config->hidden_size = json.at("hidden_size");
  config->intermediate_size = json.at("intermediate_size");
  config->layers = json.at("num_hidden_layers");
  config->q_heads = json.at("num_attention_heads");
  config->kv_heads = json.at("num_key_value_heads");
  config->head_dim = json.at("head_dim");
  config->max_positions = json.at("max_position_embeddings");
  config->rms_norm_eps = json.at("rms_norm_eps");
  config->rope_theta = json.at("rope_theta");
}

absl::Status CheckShape(const std::string& path, const ModelConfig& config) {
  const int32_t least = std::min({config.hidden_size, config.intermediate_size, config.layers,
                                  config.q_heads, config.kv_heads, config.max_positions});
  if (least < 1 || config.q_heads % config.kv_heads != 0 || config.head_dim < 2 ||
      config.head_dim % 2 != 0) {
    return absl::InvalidArgumentError(absl::StrCat(path, ": sizes that make no model"));
  }
  return absl::OkStatus();
}

absl::StatusOr<ModelConfig> LoadConfig(const std::string& path) {
  ModelConfig config;
  absl::Status read = ReadJson(path, [&](const nlohmann::json& json) {
    ReadShape(json, &config);
    config.vocab_size = json.at("vocab_size");
    config.tied_embeddings = json.at("tie_word_embeddings");
  });
  if (!read.ok()) return read;
  if (absl::Status shape = CheckShape(path, config); !shape.ok()) return shape;
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

absl::StatusOr<DraftConfig> LoadDraftConfig(const std::string& path, const ModelConfig& target) {
  DraftConfig config;
  absl::Status read = ReadJson(path, [&](const nlohmann::json& json) {
    ReadShape(json, &config.shape);
    config.target_layers = json.at("target_layers").get<std::vector<int32_t>>();
    config.sliding_window_left = json.at("sliding_window_left");
    config.block_size = json.at("block_size");
  });
  if (!read.ok()) return read;
  if (absl::Status shape = CheckShape(path, config.shape); !shape.ok()) return shape;
  const auto exists = [&](int32_t layer) { return layer >= 0 && layer < target.layers; };
  const auto& layers = config.target_layers;
  if (layers.empty() || !std::all_of(layers.begin(), layers.end(), exists) ||
      config.shape.hidden_size != target.hidden_size || config.block_size < 2) {
    return absl::InvalidArgumentError(absl::StrCat(path, ": no draft of this target"));
  }
  return config;
}

LayerWeights ReadLayer(Reader& reader, const ModelConfig& c, const std::string& prefix) {
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
    weights.layers.push_back(ReadLayer(reader, c, absl::StrCat("model.layers.", layer, ".")));
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

absl::StatusOr<DraftWeights> LoadDraft(const std::string& folder, const ModelConfig& target) {
  absl::StatusOr<DraftConfig> config = LoadDraftConfig(folder + "/draft.json", target);
  if (!config.ok()) return config.status();
  const std::string path = folder + "/draft.safetensors";
  const absl::StatusOr<Safetensors> file = Safetensors::Read(path);
  if (!file.ok()) return file.status();

  Reader reader(*file);
  DraftWeights weights;
  weights.config = *std::move(config);
  const ModelConfig& c = weights.config.shape;
  const auto states = static_cast<int64_t>(weights.config.target_layers.size()) * c.hidden_size;
  weights.fc = reader.ReadMatrix("fc.weight", c.hidden_size, states);
  weights.hidden_norm = reader.ReadVector("hidden_norm.weight", c.hidden_size);
  weights.mask_embedding = reader.ReadVector("mask_embedding", c.hidden_size);
  for (int32_t layer = 0; layer < c.layers && reader.status().ok(); ++layer) {
    weights.layers.push_back(ReadLayer(reader, c, absl::StrCat("layers.", layer, ".")));
  }
  weights.norm = reader.ReadVector("norm.weight", c.hidden_size);
  if (!reader.status().ok()) {
    return absl::Status(reader.status().code(),
                        absl::StrCat(path, ": ", reader.status().message()));
  }
  return weights;
}

}  // namespace tributary::tinylm
