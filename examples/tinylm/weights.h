// The model's shape and parameters, read from a folder laid out as Hugging Face's LlamaForCausalLM.
#pragma once

#include <Eigen/Core>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace tributary::tinylm {

// Rows are tokens or output features; one row after the other in memory.
using Matrix = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
using RowVector = Eigen::RowVectorXf;

struct ModelConfig {
  int32_t vocab_size = 0;
  int32_t hidden_size = 0;
  int32_t intermediate_size = 0;
  int32_t layers = 0;
  int32_t q_heads = 0;
  int32_t kv_heads = 0;
  int32_t head_dim = 0;
  int32_t max_positions = 0;
  float rms_norm_eps = 0;
  float rope_theta = 0;
  bool tied_embeddings = false;
};

struct LayerWeights {
  RowVector input_norm;           // [hidden]
  Matrix q_proj;                  // [q_heads * head_dim, hidden]
  Matrix k_proj;                  // [kv_heads * head_dim, hidden]
  Matrix v_proj;                  // [kv_heads * head_dim, hidden]
  Matrix o_proj;                  // [hidden, q_heads * head_dim]
  RowVector post_attention_norm;  // [hidden]
  Matrix gate_proj;               // [intermediate, hidden]
  Matrix up_proj;                 // [intermediate, hidden]
  Matrix down_proj;               // [hidden, intermediate]
};

struct Weights {
  ModelConfig config;
  Matrix embedding;  // [vocab, hidden]
  std::vector<LayerWeights> layers;
  RowVector norm;  // [hidden]
  Matrix lm_head;  // [vocab, hidden]; empty when the embedding serves
};

struct DraftConfig {
  ModelConfig shape;  // vocabulary and embeddings are the target's
  std::vector<int32_t> target_layers;
  int64_t sliding_window_left = 0;  // of the variant with windows
  int32_t block_size = 0;           // the one to use unless one knows better
};

struct DraftWeights {
  DraftConfig config;
  Matrix fc;              // [hidden, target_layers.size() * hidden]
  RowVector hidden_norm;  // [hidden]
  RowVector mask_embedding;
  std::vector<LayerWeights> layers;
  RowVector norm;
};

// From draft.json and draft.safetensors in `folder`, of a draft for a model of `target`'s shape.
absl::StatusOr<DraftWeights> LoadDraft(const std::string& folder, const ModelConfig& target);

// From config.json and model.safetensors in `folder`. NOT_FOUND or INVALID_ARGUMENT name the file
// and the field.
absl::StatusOr<Weights> LoadWeights(const std::string& folder);

}  // namespace tributary::tinylm
