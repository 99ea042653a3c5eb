// A host and a coordinator in one, small enough to see through: opens sequences, deals pages, makes
// steps of random tensors, and checks every reply against the dense model.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <random>
#include <utility>
#include <vector>

#include "tests/support/compare.h"
#include "tests/worker/dense_model.h"
#include "tests/worker/output_check.h"
#include "tests/worker/ranks.h"
#include "tests/worker/specs.h"
#include "worker/command.h"

namespace tributary::worker::testing {

// What one sequence does in a step.
struct Move {
  SequenceId sequence = 0;
  int32_t query_rows = 0;
  int32_t new_tokens = 0;
  // Absent (-1): at the end. Otherwise a repeat or, without new tokens or of a draft, a look back.
  int64_t first_position = -1;
  // Of a repeat: change the token at this offset, so that its owner reports a conflict.
  int32_t corrupt_token = -1;
};

class TestHost {
 public:
  struct Options {
    DType q_dtype = DType::kBf16;
    DType input_dtype = DType::kBf16;
    uint64_t seed = 1;
    // Absent: what the CPU's kernels keep to.
    std::optional<test::Tolerance> o_tolerance;
    std::optional<test::Tolerance> lse_tolerance;
    bool bf16_partials = false;  // StepCommand's
    // Every step is repeated with outputs in all formats and places, and inputs in pinned memory
    // where there is a pinner.
    bool checks_outputs = false;
    Pinner pin;
  };

  // Creates the cache on `ranks`, which outlive the host.
  TestHost(Ranks& ranks, const CacheSpec& spec, const Options& options);

  // Tables of new sequences start with entries of other sequences' pages, all of them dead.
  void Open(SequenceId sequence);
  void Fork(SequenceId parent, SequenceId child, int64_t length);
  void Truncate(SequenceId sequence, int64_t length);
  void Close(SequenceId sequence);
  int64_t length(SequenceId sequence) const { return sequences_.at(sequence).length; }

  // One step of every layer, checked. Fails the test (non-fatally) where something is wrong.
  void Step(StepKind kind, const std::vector<Move>& moves);

  // The largest error of an output that was compared so far.
  double worst_o() const { return worst_o_; }
  // Of rank 0, for the last layer stepped, where rank 0 lives in this process.
  const std::vector<float>& last_o() const { return last_o_; }
  const std::vector<float>& last_lse() const { return last_lse_; }

  // New tokens are NaN from now on (false: random again). For poisoning slots that die afterwards;
  // replies are not compared while it is on.
  void set_nan_tokens(bool on) { nan_tokens_ = on; }
  // Check every `stride`th row of a step against the model; 1 by default.
  void set_row_stride(int stride) { row_stride_ = stride; }

 private:
  struct Sequence {
    int64_t length = 0;
    std::vector<int32_t> pages;
    std::vector<DenseLayer> layers;
  };
  struct Tensor {
    std::vector<float> values;
    std::vector<std::byte> bytes;
    DType dtype = DType::kF32;
    TensorView view() const { return {bytes.data(), dtype, bytes.size()}; }
  };
  // What a step has to do besides the tensors: the same for all layers, pages told once.
  struct Prepared {
    std::vector<StepEntry> entries;
    std::vector<PageCopy> copies;
    std::vector<PageUpdate> updates;
  };

  LayerGeometry Geometry(int32_t layer) const {
    return GeometryOf(spec_, spec_.layers[static_cast<size_t>(layer)]);
  }
  // Elements of a token's keys and of its values, all heads of the layer.
  std::pair<size_t, size_t> TokenElements(int32_t layer) const;
  void TruncateLayers(int64_t length, std::vector<DenseLayer>* layers) const;
  Prepared Prepare(StepKind kind, const std::vector<Move>& moves);
  void MakeWritable(SequenceId id, int64_t first, int64_t end, Prepared* prepared);
  void StepLayer(StepKind kind, const std::vector<Move>& moves, const Prepared& prepared,
                 int32_t layer);
  void FillTokens(const std::vector<Move>& moves, const Prepared& prepared, int32_t layer,
                  Tensor* k, Tensor* v);
  // What a row of an entry is held against: of a draft, its context and its block, whose K/V follow
  // `token` others.
  DenseLayer ModelOf(StepKind kind, const StepEntry& entry, int32_t layer, size_t token,
                     const Tensor& k, const Tensor& v) const;
  void CheckConflicts(const std::vector<Move>& moves, const Prepared& prepared,
                      const std::map<int, Reply>& replies) const;
  void CheckRows(StepKind kind, const std::vector<Move>& moves, const Prepared& prepared,
                 int32_t layer, const Tensor& q, const Tensor& k, const Tensor& v,
                 const Reply& reply);

  // `row` values for each count of each entry; what an entry gets depends on the step, the layer
  // and its sequence, not on its company in the batch.
  Tensor Random(DType dtype, const Prepared& prepared, int32_t StepEntry::*count, size_t row,
                uint64_t salt) const;
  static void Encode(Tensor* tensor);
  // Repeats a step that gave `first`.
  void CheckOutputs(StepCommand step, const Reply& first);
  int32_t TakePage();
  void ReleasePage(int32_t page);
  Command Wrap(decltype(Command::body) body);
  std::map<int, Reply> ExecuteOk(const Command& command);

  Ranks& ranks_;
  const CacheSpec spec_;
  const Options options_;
  std::mt19937_64 page_random_;
  uint64_t number_ = 0;
  uint64_t steps_ = 0;
  int outputs_turn_ = 0;
  std::vector<int32_t> free_pages_;
  std::vector<int32_t> holders_;  // by page
  std::map<SequenceId, Sequence> sequences_;
  bool nan_tokens_ = false;
  int row_stride_ = 1;
  double worst_o_ = 0;
  std::vector<float> last_o_;
  std::vector<float> last_lse_;
};

}  // namespace tributary::worker::testing
