#include "worker/self_test.h"

#include <chrono>
#include <cmath>
#include <cstdint>
#include <numbers>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status/status_macros.h"
#include "collective/in_process.h"
#include "collective/rendezvous/memory_rendezvous.h"
#include "kernels/half.h"
#include "worker/executor.h"

namespace tributary::worker {
namespace {

constexpr std::chrono::seconds kPatience{30};
constexpr uint64_t kEpoch = 1;
constexpr int32_t kTokens = 2;
constexpr int32_t kQHeads = 4;
constexpr int32_t kKvHeads = 2;
constexpr int32_t kHeadDim = 64;
// Every score is q * k * kHeadDim * kScale = 1: a row's output is the mean of the values it sees.
constexpr float kQ = 1.0f;
constexpr float kK = 0.125f;
constexpr float kScale = 0.125f;
constexpr float kV[kTokens] = {1.0f, 3.0f};
constexpr float kOutput[kTokens] = {1.0f, 2.0f};
constexpr float kLse[kTokens] = {1.0f, 1.0f + std::numbers::ln2_v<float>};
constexpr float kTolerance = 0.02f;  // of bf16 products

CacheSpec Spec() {
  CacheSpec spec;
  spec.q_heads = kQHeads;
  spec.kv_heads = kKvHeads;
  spec.head_dim = kHeadDim;
  spec.page_size = 16;
  spec.interleave = 16;
  spec.kv_dtype = DType::kBf16;
  spec.sm_scale = kScale;
  spec.num_pages = 2;
  spec.layers.resize(1);
  return spec;
}

// `row_values[i]`, `width` times, for each i, in bf16.
std::vector<uint16_t> Rows(std::initializer_list<float> row_values, int32_t width) {
  std::vector<uint16_t> rows;
  for (const float value : row_values) {
    rows.insert(rows.end(), static_cast<size_t>(width), Bf16FromFloat(value));
  }
  return rows;
}

TensorView ViewOf(const std::vector<uint16_t>& values) {
  return {.data = reinterpret_cast<const std::byte*>(values.data()),
          .dtype = DType::kBf16,
          .bytes = values.size() * sizeof(uint16_t)};
}

Command Wrap(uint64_t number, decltype(Command::body) body) {
  Command command;
  command.epoch = kEpoch;
  command.number = number;
  command.cache = 1;
  command.deadline = std::chrono::steady_clock::now() + kPatience;
  command.body = std::move(body);
  return command;
}

absl::Status CheckRow(absl::string_view what, const float* values, int32_t count, float expected) {
  for (int32_t i = 0; i < count; ++i) {
    if (std::abs(values[i] - expected) <= kTolerance) continue;  // false for NaN
    return absl::InternalError(absl::StrCat("self-test: ", what, " is ", values[i], " where it is ",
                                            expected, ": this device does not compute rightly"));
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status CheckSelfTestReply(const Reply& reply) {
  if (!reply.status.ok()) {
    return {reply.status.code(), absl::StrCat("self-test: ", reply.status.message())};
  }
  if (reply.o.size() != size_t{kTokens} * kQHeads * kHeadDim ||
      reply.lse.size() != size_t{kTokens} * kQHeads) {
    return absl::InternalError("self-test: the result has another shape");
  }
  for (int32_t row = 0; row < kTokens; ++row) {
    constexpr int32_t kWidth = kQHeads * kHeadDim;
    TRIBUTARY_RETURN_IF_ERROR(
        CheckRow("a row's output", reply.o.data() + row * kWidth, kWidth, kOutput[row]));
    TRIBUTARY_RETURN_IF_ERROR(
        CheckRow("a row's LSE", reply.lse.data() + row * kQHeads, kQHeads, kLse[row]));
  }
  return absl::OkStatus();
}

absl::Status SelfTest(std::unique_ptr<Backend> backend) {
  Executor executor({}, std::move(backend));
  collective::MemoryRendezvous rendezvous;
  auto group = collective::CreateInProcessGroup(1, kEpoch);
  TRIBUTARY_RETURN_IF_ERROR(executor.Join(std::move(group.front()), rendezvous,
                                          std::chrono::steady_clock::now() + kPatience));
  const Reply created = executor.Execute(Wrap(1, CreateCacheCommand{Spec()}));
  if (!created.status.ok()) return CheckSelfTestReply(created);

  const std::vector<uint16_t> q = Rows({kQ, kQ}, kQHeads * kHeadDim);
  const std::vector<uint16_t> k = Rows({kK, kK}, kKvHeads * kHeadDim);
  const std::vector<uint16_t> v = Rows({kV[0], kV[1]}, kKvHeads * kHeadDim);
  StepCommand step;
  step.kind = StepKind::kDecode;
  step.page_updates = {{.sequence = 1, .first_index = 0, .pages = {0}}};
  step.entries = {
      {.sequence = 1, .first_position = 0, .query_rows = kTokens, .new_tokens = kTokens}};
  step.q = ViewOf(q);
  step.k = ViewOf(k);
  step.v = ViewOf(v);
  return CheckSelfTestReply(executor.Execute(Wrap(2, std::move(step))));
}

}  // namespace tributary::worker
