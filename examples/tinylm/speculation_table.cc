#include "examples/tinylm/speculation_table.h"

#include <chrono>
#include <cstdio>
#include <memory>
#include <utility>

#include "absl/strings/str_format.h"
#include "examples/tinylm/acceptance.h"
#include "examples/tinylm/for_each.h"
#include "examples/tinylm/generate.h"
#include "examples/tinylm/service_attention.h"

namespace tributary::tinylm {
namespace {

const char* MaskName(bool sliding) { return sliding ? "sliding" : "full"; }

// A sequence for each thread.
template <typename SequenceAttention>
absl::StatusOr<std::vector<std::unique_ptr<SequenceAttention>>> OpenSequences(
    const ServiceCache& cache, int count) {
  std::vector<std::unique_ptr<SequenceAttention>> sequences;
  for (int i = 0; i < count; ++i) {
    auto sequence = SequenceAttention::Open(&cache);
    if (!sequence.ok()) return sequence.status();
    sequences.push_back(*std::move(sequence));
  }
  return sequences;
}

std::string WithError(const Estimate& estimate) {
  return absl::StrFormat("%.3f +- %.3f", estimate.value, estimate.standard_error);
}

// Of a ratio: by how many percent it is not 1.
std::string InPercent(const Estimate& ratio) {
  return absl::StrFormat("%+.2f%% +- %.2f%%", 100 * (ratio.value - 1), 100 * ratio.standard_error);
}

void PrintRow(const std::string& model_cache, const char* draft_cache, const char* mask,
              const std::string& own_text, const std::string& same_text, double seconds_per_token,
              double speed_up, const char* text) {
  absl::PrintF("%-16s %-10s %-8s %15s %15s %9.2f %8.2fx  %s\n", model_cache, draft_cache, mask,
               own_text, same_text, 1e3 * seconds_per_token, speed_up, text);
  std::fflush(stdout);
}

}  // namespace

struct SpeculationTable::Target {
  DType kv_dtype{};
  std::unique_ptr<ServiceCache> cache;
  std::vector<std::unique_ptr<ServiceAttention>> sequences;  // one per thread

  std::string label() const { return absl::StrFormat("DCP%d %s", cache->ranks(), Name(kv_dtype)); }
};

struct SpeculationTable::Drafts {
  std::unique_ptr<ServiceCache> cache;
  std::vector<std::unique_ptr<ServiceDraftAttention>> sequences;  // one per thread
};

struct SpeculationTable::Written {
  std::vector<std::string> texts;
  double seconds_per_token = 0;
};

SpeculationTable::SpeculationTable(const Model& model, const Draft& draft,
                                   SpeculationTableOptions options)
    : model_(model), draft_(draft), options_(std::move(options)) {
  absl::PrintF("Greedy decoding of %d tokens after each of %d prompts, %d at a time.\n\n",
               options_.tokens, options_.prompts.size(), options_.parallel);
  absl::PrintF("%-16s %-10s %-8s %15s %15s %9s %9s\n", "", "", "", "acceptance +-",
               "along the text", "", "");
  absl::PrintF("%-16s %-10s %-8s %15s %15s %9s %9s\n", "model's cache", "draft's", "mask",
               "standard error", "of the 1st row", "ms/token", "speed-up");
}

absl::Status SpeculationTable::AddService(const Host& host) {
  const std::pair<DType, std::vector<DType>> types[] = {
      {DType::kBf16, {DType::kBf16, DType::kFp8E4M3}}, {DType::kFp8E4M3, {DType::kFp8E4M3}}};
  for (const auto& [model_dtype, draft_dtypes] : types) {
    const absl::StatusOr<Target> target = OpenTarget(host, model_dtype);
    if (!target.ok()) return target.status();
    const absl::StatusOr<Written> plain = WritePlainly(*target);
    if (!plain.ok()) return plain.status();
    if (reference_.empty()) reference_ = plain->texts;
    PrintRow(target->label(), "-", "-", "1", "1", plain->seconds_per_token, 1, "");
    for (const DType draft_dtype : draft_dtypes) {
      for (const bool sliding : {false, true}) {
        absl::Status status = AddRow(host, *target, *plain, draft_dtype, sliding);
        if (!status.ok()) return status;
      }
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<SpeculationTable::Target> SpeculationTable::OpenTarget(const Host& host,
                                                                      DType kv_dtype) const {
  Target target;
  target.kv_dtype = kv_dtype;
  auto cache =
      CreateModelCache(host, model_, kv_dtype, options_.calibration_text, options_.parallel);
  if (!cache.ok()) return cache.status();
  target.cache = *std::move(cache);
  auto sequences = OpenSequences<ServiceAttention>(*target.cache, options_.parallel);
  if (!sequences.ok()) return sequences.status();
  target.sequences = *std::move(sequences);
  return target;
}

absl::StatusOr<SpeculationTable::Drafts> SpeculationTable::OpenDrafts(const Host& host,
                                                                      DType kv_dtype,
                                                                      bool sliding) const {
  Drafts drafts;
  auto cache = CreateDraftCache(host, model_, draft_, kv_dtype,
                                sliding ? draft_.config().sliding_window_left : -1,
                                options_.calibration_text, options_.parallel);
  if (!cache.ok()) return cache.status();
  drafts.cache = *std::move(cache);
  auto sequences = OpenSequences<ServiceDraftAttention>(*drafts.cache, options_.parallel);
  if (!sequences.ok()) return sequences.status();
  drafts.sequences = *std::move(sequences);
  return drafts;
}

absl::StatusOr<SpeculationTable::Written> SpeculationTable::WriteAll(const Write& write) const {
  const auto prompts = static_cast<int64_t>(options_.prompts.size());
  Written written;
  written.texts.resize(prompts);
  const auto begin = std::chrono::steady_clock::now();
  const absl::Status status = ForEach(prompts, options_.parallel, [&](int64_t prompt, int thread) {
    absl::StatusOr<std::string> text = write(prompt, thread);
    if (!text.ok()) return text.status();
    written.texts[prompt] = *std::move(text);
    return absl::OkStatus();
  });
  if (!status.ok()) return status;
  const std::chrono::duration<double> spent = std::chrono::steady_clock::now() - begin;
  written.seconds_per_token = spent.count() / static_cast<double>(prompts * options_.tokens);
  return written;
}

absl::StatusOr<SpeculationTable::Written> SpeculationTable::WritePlainly(
    const Target& target) const {
  return WriteAll([&](int64_t prompt, int thread) {
    return Generate(model_, options_.prompts[prompt], options_.tokens, Sampler(),
                    *target.sequences[thread]);
  });
}

absl::StatusOr<SpeculationTable::Written> SpeculationTable::SpeculateAll(
    const Target& target, const Drafts& drafts, std::vector<SpeculationCounts>& counts) const {
  return WriteAll([&](int64_t prompt, int thread) -> absl::StatusOr<std::string> {
    absl::StatusOr<Speculated> speculated =
        Speculate(model_, draft_, options_.prompts[prompt], options_.tokens, options_.block,
                  *target.sequences[thread], *drafts.sequences[thread]);
    if (!speculated.ok()) return speculated.status();
    counts[prompt] = speculated->counts;
    return std::move(speculated->text);
  });
}

absl::Status SpeculationTable::FollowReference(const Target& target, const Drafts& drafts,
                                               const std::vector<std::string>& texts,
                                               std::vector<SpeculationCounts>& counts) const {
  const auto prompts = static_cast<int64_t>(texts.size());
  return ForEach(prompts, options_.parallel, [&](int64_t prompt, int thread) {
    if (texts[prompt] == reference_[prompt]) return absl::OkStatus();
    const absl::StatusOr<SpeculationCounts> along =
        SpeculateAlong(model_, draft_, options_.prompts[prompt], reference_[prompt], options_.block,
                       *target.sequences[thread], *drafts.sequences[thread]);
    if (along.ok()) counts[prompt] = *along;
    return along.status();
  });
}

absl::Status SpeculationTable::AddRow(const Host& host, const Target& target, const Written& plain,
                                      DType draft_dtype, bool sliding) {
  const absl::StatusOr<Drafts> drafts = OpenDrafts(host, draft_dtype, sliding);
  if (!drafts.ok()) return drafts.status();
  Row row{.ranks = target.cache->ranks(),
          .model_dtype = target.kv_dtype,
          .draft_dtype = draft_dtype,
          .sliding = sliding,
          .own_text = std::vector<SpeculationCounts>(options_.prompts.size()),
          .same_text = {}};
  const absl::StatusOr<Written> written = SpeculateAll(target, *drafts, row.own_text);
  if (!written.ok()) return written.status();
  // Where a text is the reference, the steps along it have been taken.
  row.same_text = row.own_text;
  const absl::Status followed = FollowReference(target, *drafts, written->texts, row.same_text);
  if (!followed.ok()) return followed;

  PrintRow(target.label(), Name(draft_dtype), MaskName(sliding),
           WithError(AcceptanceLength(row.own_text)), WithError(AcceptanceLength(row.same_text)),
           written->seconds_per_token, plain.seconds_per_token / written->seconds_per_token,
           written->texts == plain.texts ? "same text" : "OTHER TEXT");
  rows_.push_back(std::move(row));
  return absl::OkStatus();
}

const SpeculationTable::Row* SpeculationTable::Find(int ranks, DType model_dtype, DType draft_dtype,
                                                    bool sliding) const {
  for (const Row& row : rows_) {
    if (row.ranks == ranks && row.model_dtype == model_dtype && row.draft_dtype == draft_dtype &&
        row.sliding == sliding) {
      return &row;
    }
  }
  return nullptr;
}

void SpeculationTable::PrintComparisons() const {
  absl::PrintF("\n%-16s %-10s %-8s %-14s %19s %19s\n", "model's cache", "draft's", "mask",
               "against", "each its own text", "along one text");
  for (const Row& row : rows_) {
    const std::pair<std::string, const Row*> others[] = {
        {absl::StrFormat("DCP%d", rows_.front().ranks),
         Find(rows_.front().ranks, row.model_dtype, row.draft_dtype, row.sliding)},
        {"both bf16", Find(row.ranks, DType::kBf16, DType::kBf16, row.sliding)}};
    for (const auto& [label, other] : others) {
      if (other == nullptr || other == &row) continue;
      absl::PrintF("%-16s %-10s %-8s %-14s %19s %19s\n",
                   absl::StrFormat("DCP%d %s", row.ranks, Name(row.model_dtype)),
                   Name(row.draft_dtype), MaskName(row.sliding), label,
                   InPercent(AcceptanceRatio(row.own_text, other->own_text)),
                   InPercent(AcceptanceRatio(row.same_text, other->same_text)));
    }
  }
}

}  // namespace tributary::tinylm
