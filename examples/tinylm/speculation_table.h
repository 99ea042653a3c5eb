// What speculation gives, for services and caches of several kinds: a table printed row by row, and
// comparisons between its rows.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "examples/tinylm/draft.h"
#include "examples/tinylm/host.h"
#include "examples/tinylm/model.h"
#include "examples/tinylm/speculate.h"
#include "kernels/dtype.h"

namespace tributary::tinylm {

struct SpeculationTableOptions {
  std::vector<std::string> prompts;
  int64_t tokens = 0;  // written behind each prompt
  int64_t block = 0;
  int parallel = 1;  // prompts at a time
  std::string calibration_text;
};

class SpeculationTable {
 public:
  // Prints the head. `model` and `draft` outlive the table.
  SpeculationTable(const Model& model, const Draft& draft, SpeculationTableOptions options);

  // Rows of one service: plain decoding, then speculation with full and with sliding attention,
  // with every type of cache.
  absl::Status AddService(const Host& host);

  // How much rows differ in acceptance: from the same caches in the service added first, and, FP8,
  // from bf16 in the same service.
  void PrintComparisons() const;

 private:
  struct Row {
    int ranks = 0;
    DType model_dtype{};
    DType draft_dtype{};
    bool sliding = false;
    // One per prompt: along the text that this model writes, and along the reference.
    std::vector<SpeculationCounts> own_text;
    std::vector<SpeculationCounts> same_text;
  };
  // Sequences of one type of the model's cache, and of one kind of the draft's.
  struct Target;
  struct Drafts;
  // Greedy texts of all prompts.
  struct Written;
  // Writes behind a prompt, in the sequences of a thread.
  using Write = std::function<absl::StatusOr<std::string>(int64_t prompt, int thread)>;

  absl::StatusOr<Target> OpenTarget(const Host& host, DType kv_dtype) const;
  absl::StatusOr<Drafts> OpenDrafts(const Host& host, DType kv_dtype, bool sliding) const;
  absl::StatusOr<Written> WriteAll(const Write& write) const;
  absl::StatusOr<Written> WritePlainly(const Target& target) const;
  absl::StatusOr<Written> SpeculateAll(const Target& target, const Drafts& drafts,
                                       std::vector<SpeculationCounts>& counts) const;
  // Along the reference, where the `texts` are not the reference themselves.
  absl::Status FollowReference(const Target& target, const Drafts& drafts,
                               const std::vector<std::string>& texts,
                               std::vector<SpeculationCounts>& counts) const;
  absl::Status AddRow(const Host& host, const Target& target, const Written& plain,
                      DType draft_dtype, bool sliding);
  const Row* Find(int ranks, DType model_dtype, DType draft_dtype, bool sliding) const;

  const Model& model_;
  const Draft& draft_;
  const SpeculationTableOptions options_;
  std::vector<std::string> reference_;  // the first plain texts
  std::vector<Row> rows_;
};

}  // namespace tributary::tinylm
