#include "service/cli/self_check.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <random>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "kernels/half.h"

namespace tributary::cli {
namespace {

constexpr int kQHeads = 4;
constexpr int kKvHeads = 1;
constexpr int kHeadDim = 128;
constexpr v1::DType kDType = v1::DTYPE_BF16;

// bf16 output over an FP8 cache; the LSE is computed and sent in float.
constexpr double kOutputTolerance = 0.02;  // of the expected value
constexpr double kLseTolerance = 1e-3;

// Small whole numbers: every cache dtype holds them exactly.
double ValueOfRank(int64_t rank) { return static_cast<double>(1 + rank % 8); }

std::string UniqueCacheId() {
  std::random_device dice;
  return absl::StrCat("check-", absl::Hex(dice(), absl::kZeroPad8),
                      absl::Hex(dice(), absl::kZeroPad8));
}

std::vector<uint16_t> Constant(int64_t count, double value) {
  return std::vector<uint16_t>(static_cast<size_t>(count),
                               Bf16FromFloat(static_cast<float>(value)));
}

// Values of the tokens [first, first + count), one row each.
std::vector<uint16_t> Values(int64_t first, int64_t count, int page_size, int ranks) {
  std::vector<uint16_t> values;
  for (int64_t t = first; t < first + count; ++t) {
    const auto row = Constant(kKvHeads * kHeadDim, ValueOfRank(t / page_size % ranks));
    values.insert(values.end(), row.begin(), row.end());
  }
  return values;
}

struct Answer {
  std::vector<uint16_t> output = Constant(kQHeads * kHeadDim, 0);
  std::vector<float> lse = std::vector<float>(kQHeads, 0.0F);
};

// One row at `position`, with its own key and value.
absl::StatusOr<Answer> AttendAt(client::Client& client, const std::string& cache_id,
                                uint64_t sequence, int64_t position,
                                const std::vector<uint16_t>& value) {
  Answer answer;
  const std::vector<uint16_t> q = Constant(kQHeads * kHeadDim, 1);
  const std::vector<uint16_t> k = Constant(kKvHeads * kHeadDim, 0);
  const absl::Status status = client.Attend({.cache_id = cache_id,
                                             .layer = 0,
                                             .entries = {{sequence, position, 1, 1}},
                                             .dtype = kDType,
                                             .q = q.data(),
                                             .k = k.data(),
                                             .v = value.data(),
                                             .q_heads = kQHeads,
                                             .kv_heads = kKvHeads,
                                             .head_dim = kHeadDim,
                                             .output = answer.output.data(),
                                             .lse = answer.lse.data()});
  if (!status.ok()) return status;
  return answer;
}

// The element farthest from what is expected stands for all.
template <typename T, typename ToDouble>
double Worst(const std::vector<T>& numbers, double expected, ToDouble to_double) {
  double worst = expected;
  for (const T number : numbers) {
    const double value = to_double(number);
    if (std::isnan(value)) return value;
    if (std::abs(value - expected) > std::abs(worst - expected)) worst = value;
  }
  return worst;
}

void JudgeAnswer(const std::string& over, double mean, double lse, const Answer& answer,
                 SelfCheck* check) {
  check->findings.push_back(
      Judge(absl::StrCat("output over ", over), mean,
            Worst(answer.output, mean, [](uint16_t half) { return FloatFromBf16(half); }),
            kOutputTolerance * std::abs(mean)));
  check->findings.push_back(Judge(absl::StrCat("LSE over ", over), lse,
                                  Worst(answer.lse, lse, [](float value) { return value; }),
                                  kLseTolerance));
}

v1::CacheSpec Spec() {
  v1::CacheSpec spec;
  spec.set_layers(1);
  spec.set_q_heads(kQHeads);
  spec.set_kv_heads(kKvHeads);
  spec.set_head_dim(kHeadDim);
  spec.set_capacity_tokens(1);  // rounded up to a virtual page, a page of every rank
  return spec;
}

}  // namespace

Finding Judge(std::string what, double expected, double found, double tolerance) {
  return {std::move(what), expected, found, std::abs(found - expected) <= tolerance};
}

bool SelfCheck::good() const {
  return !findings.empty() && std::all_of(findings.begin(), findings.end(),
                                          [](const Finding& finding) { return finding.good; });
}

absl::StatusOr<SelfCheck> RunSelfCheck(client::Client& client) {
  const std::string cache_id = UniqueCacheId();
  const auto created = client.CreateCache(cache_id, Spec());
  if (!created.ok()) return created.status();
  const absl::Cleanup remove = [&] { client.DeleteCache(cache_id).IgnoreError(); };
  const int ranks = created->ranks();
  const int page = created->spec().page_size();
  if (ranks < 1 || page < 1) return absl::InternalError("the service has no ranks or no pages");
  SelfCheck check{.ranks = ranks, .backend = created->backend()};

  const auto sequence = client.OpenSequence(cache_id);
  if (!sequence.ok()) return sequence.status();
  const auto first = AttendAt(client, cache_id, *sequence, 0, Values(0, 1, page, ranks));
  if (!first.ok()) return first.status();
  JudgeAnswer("1 token", ValueOfRank(0), 0.0, *first, &check);

  // The virtual page but its last token, which the query brings along.
  const int64_t tokens = int64_t{page} * ranks;
  const std::vector<uint16_t> k = Constant((tokens - 2) * kKvHeads * kHeadDim, 0);
  const std::vector<uint16_t> v = Values(1, tokens - 2, page, ranks);
  const absl::Status appended =
      client.Append({.cache_id = cache_id,
                     .layer = 0,
                     .entries = {{*sequence, 1, static_cast<int32_t>(tokens - 2)}},
                     .dtype = kDType,
                     .k = k.data(),
                     .v = v.data(),
                     .kv_heads = kKvHeads,
                     .head_dim = kHeadDim});
  if (!appended.ok()) return appended;
  const auto all =
      AttendAt(client, cache_id, *sequence, tokens - 1, Values(tokens - 1, 1, page, ranks));
  if (!all.ok()) return all.status();
  double sum = 0;
  for (int rank = 0; rank < ranks; ++rank) sum += ValueOfRank(rank);
  JudgeAnswer(absl::StrCat(tokens, " tokens of all ranks"), sum / ranks,
              std::log(static_cast<double>(tokens)), *all, &check);
  return check;
}

}  // namespace tributary::cli
