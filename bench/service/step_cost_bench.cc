// The coordinator's own work for a step: checks, order, batching, pages, command, settling, reply.
// The workers answer at once with zeros, so that nothing else is measured.
#include <benchmark/benchmark.h>

#include <memory>
#include <string>

#include "service/coordinator/coordinator.h"
#include "service/journal/journal.h"
#include "tests/service/fake_group.h"
#include "tests/support/process.h"

namespace tributary::service {
namespace {

constexpr int kQHeads = 8;
constexpr int kKvHeads = 1;
constexpr int kHeadDim = 64;
constexpr int32_t kChunk = 1 << 14;

v1::Tensor Zeros(int64_t rows, int64_t heads) {
  v1::Tensor tensor;
  tensor.set_dtype(v1::DTYPE_BF16);
  for (const int64_t extent : {rows, heads, int64_t{kHeadDim}}) tensor.add_shape(extent);
  tensor.set_inline_(std::string(rows * heads * kHeadDim * 2, '\0'));
  return tensor;
}

// Fails the benchmark's process loudly: a refused call is fast and would look good.
template <typename Reply>
Coordinator::Done<Reply> MustSucceed() {
  return [](absl::StatusOr<Reply> reply) {
    if (!reply.ok()) {
      std::fprintf(stderr, "%s\n", reply.status().ToString().c_str());
      std::abort();
    }
  };
}

// A sequence of `length` tokens and `batch` - 1 forks of it, with a journal or without.
class Subject {
 public:
  Subject(int64_t length, int batch, bool journal)
      : coordinator_(OptionsOf(directory_, journal),
                     std::make_unique<testing::FakeGroup>(4, /*record=*/false), Log()),
        length_(length),
        batch_(batch) {
    coordinator_.Start().IgnoreError();
    v1::CreateCacheRequest create;
    create.set_cache_id("m");
    v1::CacheSpec* spec = create.mutable_spec();
    spec->set_layers(1);
    spec->set_q_heads(kQHeads);
    spec->set_kv_heads(kKvHeads);
    spec->set_head_dim(kHeadDim);
    spec->set_capacity_tokens(length + (int64_t{1} << 26));
    coordinator_.CreateCache(create, {}, MustSucceed<v1::CreateCacheReply>());
    v1::OpenSequenceRequest open;
    open.set_cache_id("m");
    open.set_sequence_id(1);
    coordinator_.OpenSequence(open, {}, MustSucceed<v1::OpenSequenceReply>());
    for (int64_t at = 0; at < length; at += kChunk)
      Append(at, std::min<int64_t>(kChunk, length - at));
    for (int i = 2; i <= batch; ++i) {
      v1::ForkSequenceRequest fork;
      fork.set_cache_id("m");
      fork.set_parent_id(1);
      fork.set_sequence_id(i);
      coordinator_.ForkSequence(fork, {}, MustSucceed<v1::ForkSequenceReply>());
    }
    request_.set_cache_id("m");
    request_.set_mode(v1::ATTEND_MODE_CAUSAL);
    for (int i = 1; i <= batch; ++i) {
      v1::AttendEntry* entry = request_.add_entries();
      entry->set_sequence_id(i);
      entry->set_query_rows(1);
      entry->set_new_tokens(1);
    }
    *request_.mutable_q() = Zeros(batch, kQHeads);
    *request_.mutable_k() = Zeros(batch, kKvHeads);
    *request_.mutable_v() = Zeros(batch, kKvHeads);
    Step();  // forks copy their last page once
  }

  // One token for every sequence.
  void Step() {
    for (v1::AttendEntry& entry : *request_.mutable_entries()) entry.set_first_position(length_);
    ++length_;
    coordinator_.Attend(std::make_shared<const v1::AttendRequest>(request_), {},
                        MustSucceed<v1::AttendReply>());
  }

 private:
  static std::shared_ptr<const telemetry::Logger> Log() {
    return std::make_shared<const telemetry::Logger>(telemetry::LogLevel::kError,
                                                     telemetry::LogFormat::kText);
  }
  static CoordinatorOptions OptionsOf(const test::TemporaryDirectory& directory, bool journal) {
    CoordinatorOptions options;
    if (journal) options.journal = *Journal::Open(directory.File("."), 4, Log());
    return options;
  }
  void Append(int64_t at, int32_t tokens) {
    auto append = std::make_shared<v1::AppendRequest>();
    append->set_cache_id("m");
    v1::AppendEntry* entry = append->add_entries();
    entry->set_sequence_id(1);
    entry->set_first_position(at);
    entry->set_tokens(tokens);
    *append->mutable_k() = Zeros(tokens, kKvHeads);
    *append->mutable_v() = Zeros(tokens, kKvHeads);
    coordinator_.Append(append, {}, MustSucceed<v1::AppendReply>());
  }

  const test::TemporaryDirectory directory_;
  Coordinator coordinator_;
  int64_t length_;
  const int batch_;
  v1::AttendRequest request_;
};

void BM_CoordinatorStep(benchmark::State& state) {
  Subject subject(state.range(0), static_cast<int>(state.range(1)), state.range(2) != 0);
  for (auto _ : state) subject.Step();
  state.counters["per_sequence"] =
      benchmark::Counter(static_cast<double>(state.iterations() * state.range(1)),
                         benchmark::Counter::kIsRate | benchmark::Counter::kInvert);
}
BENCHMARK(BM_CoordinatorStep)
    ->ArgNames({"tokens", "batch", "journal"})
    ->ArgsProduct({{1 << 10, 1 << 20}, {1, 16, 128}, {0, 1}})
    ->Unit(benchmark::kMicrosecond);

}  // namespace
}  // namespace tributary::service
