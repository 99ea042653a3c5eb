// The host work of a step as sequences grow: planning, finding a plan, adding a page, and a whole
// step of a windowed layer on one rank. Batches and rows are the same at every length, so the time
// should be too.

#include <benchmark/benchmark.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "collective/in_process.h"
#include "worker/executor.h"
#include "worker/page_tables.h"
#include "worker/plan.h"
#include "worker/plan_cache.h"

namespace tributary::worker {
namespace {

constexpr int32_t kPageSize = 16;
constexpr int32_t kRanks = 4;
constexpr DcpLayout kLayout{.rank = 0, .size = kRanks, .interleave = kPageSize};
constexpr PlanShape kDecode{
    .kind = StepKind::kDecode, .page_size = kPageSize, .rows_per_pass = 1024};

constexpr auto kUnitPages = static_cast<int32_t>(kSharedSlots / kPageSize);

// `batch` sequences of `length` tokens, each about to decode one. They begin with `shared` units of
// the same pages, as forks do.
struct Batch {
  Batch(int64_t batch, int64_t length, int64_t shared = 0) : tables(1 << 30, kUnitPages) {
    const auto pages = static_cast<size_t>(length / (kPageSize * kRanks) + 1);
    const auto same = std::min(pages, static_cast<size_t>(shared * kUnitPages));
    for (int64_t i = 0; i < batch; ++i) {
      const auto sequence = static_cast<SequenceId>(i);
      std::vector<int32_t> of_sequence(pages, static_cast<int32_t>(i + 1));
      std::fill_n(of_sequence.begin(), same, 0);
      tables.Update({sequence, 0, std::move(of_sequence)});
      entries.push_back(
          {.sequence = sequence, .first_position = length, .query_rows = 1, .new_tokens = 1});
    }
    for (const StepEntry& entry : entries) found.push_back(tables.Find(entry.sequence));
  }

  PageTables tables;
  std::vector<StepEntry> entries;
  std::vector<const PageTable*> found;
};

void Sizes(benchmark::internal::Benchmark* b) {
  b->ArgNames({"batch", "tokens"});
  for (const int64_t batch : {1, 64}) {
    for (const int64_t tokens : {1 << 10, 1 << 16, 1 << 20}) b->Args({batch, tokens});
  }
}

void PlanADecodeStep(benchmark::State& state) {
  const Batch batch(state.range(0), state.range(1));
  StepPlan plan;
  for (auto _ : state) {
    PlanStep(kDecode, kLayout, batch.entries, batch.found, &plan);
    benchmark::DoNotOptimize(plan.context_keys.data());
  }
  state.counters["table_lookups"] = static_cast<double>(plan.table_lookups);
}
BENCHMARK(PlanADecodeStep)->Apply(Sizes);

// The same of forks of one sequence, half of whose tokens are shared.
void PlanADecodeStepOfForks(benchmark::State& state) {
  const int64_t units = state.range(1) / (kSharedSlots * kRanks);
  const Batch batch(state.range(0), state.range(1), units / 2);
  StepPlan plan;
  for (auto _ : state) {
    PlanStep(kDecode, kLayout, batch.entries, batch.found, &plan);
    benchmark::DoNotOptimize(plan.context_keys.data());
  }
  state.counters["shared_runs"] = static_cast<double>(plan.passes.front().shared.size());
}
BENCHMARK(PlanADecodeStepOfForks)
    ->ArgNames({"batch", "tokens"})
    ->Args({64, 1 << 16})
    ->Args({64, 1 << 20});

void FindThePlanForTheNextLayer(benchmark::State& state) {
  const Batch batch(state.range(0), state.range(1));
  PlanCache cache;
  cache.Get(kDecode, kLayout, batch.entries, batch.found);
  for (auto _ : state) {
    benchmark::DoNotOptimize(&cache.Get(kDecode, kLayout, batch.entries, batch.found));
  }
  if (cache.made() != 1) state.SkipWithError("planned again");
}
BENCHMARK(FindThePlanForTheNextLayer)->Apply(Sizes);

// The amortised cost of the page a sequence needs every page_size * N tokens.
void AddAPage(benchmark::State& state) {
  Batch batch(1, state.range(0));
  PageUpdate update{0, batch.tables.Find(0)->size(), {5}};
  for (auto _ : state) {
    batch.tables.Update(update);
    ++update.first_index;
  }
}
// 1024 pages: with their share of the copies that doubling makes, while short tables stay short.
BENCHMARK(AddAPage)->ArgName("tokens")->Arg(1 << 10)->Arg(1 << 16)->Arg(1 << 20)->Iterations(1024);

// Everything an executor does for one row of one layer that sees 128 keys: check, plan, append,
// attend, merge. Each step is a repeat of the last token, so the sequence keeps its length.
void StepOfAWindowedLayer(benchmark::State& state) {
  const int64_t length = state.range(0);
  CacheSpec spec;
  spec.q_heads = spec.kv_heads = 1;
  spec.head_dim = 64;
  spec.page_size = spec.interleave = kPageSize;
  spec.kv_dtype = DType::kFp8E4M3;
  spec.sm_scale = 0.125f;
  spec.num_pages = static_cast<int32_t>(length / kPageSize + 1);
  spec.layers.resize(1);
  spec.layers[0].window.left = 127;

  Executor executor({}, std::make_shared<cpu::ThreadPool>(1));
  executor.Join(std::move(collective::CreateInProcessGroup(1, 1)[0]));
  Command command;
  command.epoch = 1;
  command.deadline = std::chrono::steady_clock::time_point::max();
  command.body = CreateCacheCommand{spec};
  if (!executor.Execute(command).status.ok()) return state.SkipWithError("no memory");
  PageUpdate table{1, 0, {}};
  for (int32_t page = 0; page < spec.num_pages; ++page) table.pages.push_back(page);
  command.body = SetTablesCommand{{table}};
  if (!executor.Execute(command).status.ok()) return state.SkipWithError("no table");

  const std::vector<float> ones(64, 1.0f);
  const TensorView view{reinterpret_cast<const std::byte*>(ones.data()), DType::kF32,
                        ones.size() * sizeof(float)};
  StepCommand step;
  step.q = step.k = step.v = view;
  step.kind = StepKind::kAppend;
  for (int64_t t = length - 127; t <= length; ++t) {
    step.entries = {{.sequence = 1, .first_position = t, .new_tokens = 1}};
    command.body = step;
    if (!executor.Execute(command).status.ok()) return state.SkipWithError("append failed");
  }
  step.kind = StepKind::kDecode;
  step.entries = {{.sequence = 1, .first_position = length, .query_rows = 1, .new_tokens = 1}};
  command.body = step;
  Reply reply;
  for (auto _ : state) reply = executor.Execute(command);
  if (!reply.status.ok() || reply.o[0] != 1.0f) state.SkipWithError("wrong result");
}
BENCHMARK(StepOfAWindowedLayer)->ArgName("tokens")->Arg(1 << 10)->Arg(1 << 16)->Arg(1 << 20);

}  // namespace
}  // namespace tributary::worker
