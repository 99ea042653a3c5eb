// How well a model predicts a text, and how that changes with where its attention is computed.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "examples/tinylm/draft.h"
#include "examples/tinylm/model.h"
#include "examples/tinylm/service_attention.h"

namespace tributary::tinylm {

struct Evaluation {
  double perplexity = 0;      // per byte: exp of the mean of -log p(next byte)
  std::vector<Token> greedy;  // the most likely next byte at every position
};

// Feeds each window from an empty cache, `chunk` tokens per call (1: as in decoding), and scores
// every byte but a window's first. Up to 64 tokens per call the service reads them back from its
// cache, so that what is measured includes the rounding of every key.
absl::StatusOr<Evaluation> Evaluate(const Model& model, const std::vector<std::string>& windows,
                                    int64_t chunk, Attention& attention);

// The share of positions where both would write the same byte.
double GreedyAgreement(const Evaluation& a, const Evaluation& b);

// `count` windows of `size` bytes, spread evenly over the text. Fewer when it is too short.
std::vector<std::string> Windows(absl::string_view text, int64_t count, int64_t size);

// Scales of an FP8 cache, one per layer and KV head. Twice the largest |K| (and |V|) that `text`
// gives comes to lie at the top of the format's range.
absl::StatusOr<std::vector<LayerScales>> CalibrateScales(const Model& model, absl::string_view text,
                                                         DType kv_dtype);

// The same of the draft's context.
absl::StatusOr<std::vector<LayerScales>> CalibrateDraftScales(const Model& model,
                                                              const Draft& draft,
                                                              absl::string_view text,
                                                              DType kv_dtype);

}  // namespace tributary::tinylm
