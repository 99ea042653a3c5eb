#include "examples/tinylm/draft.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "examples/tinylm/project.h"

namespace tributary::tinylm {

Draft::Draft(DraftWeights weights, const Model& target)
    : weights_(std::move(weights)), target_(target), rope_(weights_.config.shape) {}

absl::Status Draft::Extend(int64_t first_position, const Matrix& states,
                           DraftAttention& attention) const {
  const ModelConfig& c = config().shape;
  const Matrix context =
      RmsNorm(Project(states, weights_.fc), weights_.hidden_norm, c.rms_norm_eps);
  for (int32_t layer = 0; layer < c.layers; ++layer) {
    Matrix k = Project(context, weights_.layers[layer].k_proj);
    const Matrix v = Project(context, weights_.layers[layer].v_proj);
    rope_.Rotate(first_position, c.kv_heads, k);
    const absl::Status status = attention.Append(layer, first_position, k, v);
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::StatusOr<Matrix> Draft::Guess(Token anchor, int64_t position, int64_t block,
                                    DraftAttention& attention) const {
  const ModelConfig& c = config().shape;
  if (block < 2 || position + block > c.max_positions) {
    return absl::OutOfRangeError(absl::StrCat("a block of ", block, " at ", position,
                                              "; positions end at ", c.max_positions));
  }
  Matrix x = weights_.mask_embedding.replicate(block, 1);
  x.row(0) = target_.weights().embedding.row(anchor);
  Matrix attended(block, int64_t{c.q_heads} * c.head_dim);
  for (int32_t layer = 0; layer < c.layers; ++layer) {
    const LayerWeights& w = weights_.layers[layer];
    const Projections p = ProjectForAttention(x, position, c, w, rope_);
    const absl::Status status = attention.AttendBlock(layer, position, p.q, p.k, p.v, attended);
    if (!status.ok()) return status;
    FinishLayer(attended, c, w, x);
  }
  const Matrix masks = RmsNorm(x.bottomRows(block - 1), weights_.norm, c.rms_norm_eps);
  return Project(masks, target_.head());
}

}  // namespace tributary::tinylm
