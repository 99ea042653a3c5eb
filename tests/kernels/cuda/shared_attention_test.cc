// Attention over pages that sequences share, on the GPU against the float64 reference.
#include "kernels/cuda/decode/shared_attention.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <memory>
#include <numeric>
#include <string>
#include <tuple>

#include "kernels/cuda/decode/side_by_side.h"
#include "kernels/fp8_queries.h"
#include "kernels/lse.h"
#include "kernels/reference.h"
#include "tests/kernels/cuda/gpu_cache.h"
#include "tests/kernels/cuda/sequence.h"
#include "tests/support/compare.h"

namespace tributary::cuda {
namespace {

constexpr int32_t kWildPage = 2147480000;

// Runs of shared slots, in units of kSharedSlots.
struct SharedRun {
  int64_t begin, end;
  std::vector<int32_t> entries;
};

struct Case {
  DType kv = DType::kFp8E4M3;
  HeadDims dims{.key_dim = 128, .value_dim = 128};
  int32_t gqa_ratio = 4;
  int32_t kv_heads = 2;
  int32_t page_size = 16;
  std::vector<Sequence> sequences;
  std::vector<SharedRun> runs;
  DType q = DType::kBf16;
  float soft_cap = 0.0f;
  bool scaled = false;
  bool portable = false;
  bool draft = false;  // a new token to each row, seen by all rows of its sequence
  bool fp8_queries = false;
  int32_t late_strips = 0;
};

std::string Describe(const Case& c) {
  return std::string(Name(c.kv)) + " " + NameOf(c.dims) + " GQA ratio " +
         std::to_string(c.gqa_ratio) + " page " + std::to_string(c.page_size) + " q " + Name(c.q) +
         " cap " + std::to_string(c.soft_cap) + (c.portable ? " portable" : "") +
         (c.draft ? " draft" : "") + (c.fp8_queries ? " fp8 queries" : "") + Describe(c.sequences);
}

// One call, set up on the host and on the GPU.
class Call {
 public:
  explicit Call(const Case& c) : case_(c), random_(1) {
    int64_t pages = 1;
    for (const Sequence& s : c.sequences) pages += (s.length + c.page_size - 1) / c.page_size;
    cache_ = std::make_unique<HostCache>(
        CacheShape{GeometryOf(c.kv_heads, c.dims, c.kv), c.page_size, static_cast<int32_t>(pages)},
        c.scaled);
    for (const SharedRun& run : c.runs) {
      shared_.push_back({{run.begin * kSharedSlots, run.end * kSharedSlots}, run.entries});
    }
    DealPages(static_cast<int32_t>(pages));
    MakeRows();
  }

  AttentionParams HostParams() {
    AttentionParams p;
    p.kv = cache_->kv();
    p.q = case_.fp8_queries ? static_cast<const void*>(rounded_q_.data()) : q_.data();
    p.q_dtype = case_.fp8_queries ? DType::kF32 : case_.q;
    p.rows = rows_;
    p.q_heads = q_heads();
    p.entries = entries_;
    p.keys = keys_.data();
    p.sm_scale = 1.0f / std::sqrt(static_cast<float>(case_.dims.key_dim));
    p.soft_cap = case_.soft_cap;
    return p;
  }

  NewTokensParams HostBlock() {
    NewTokensParams p;
    p.q = q_.data();
    p.q_dtype = case_.q;
    p.k = block_k_.data();
    p.v = block_v_.data();
    p.kv_dtype = DType::kBf16;
    p.rows = rows_;
    p.q_heads = q_heads();
    p.kv_heads = case_.kv_heads;
    p.key_dim = case_.dims.key_dim;
    p.value_dim = case_.dims.value_dim;
    p.head_begin = 0;
    p.head_count = p.q_heads;
    p.entries = block_entries_;
    p.keys = block_keys_.data();
    p.sm_scale = HostParams().sm_scale;
    return p;
  }

  // The attention of two layers, one behind the other. `side_by_side`: what is shared and the rest
  // of each; *ran tells whether their kernels do so.
  void Run(bool side_by_side, bool* ran, std::vector<float>* o, std::vector<float>* lse) {
    DeviceProperties device;
    ASSERT_TRUE(QueryDevice(0, &device).ok());
    DeviceProperties of_shared = device;
    DeviceProperties of_rest = device;
    if (side_by_side) {
      of_shared = PartOf(device, device.multiprocessors / 4 * 2);
      of_rest = PartOf(device, device.multiprocessors - of_shared.multiprocessors);
    }
    // Everything is worth sharing here.
    const SharingCosts costs{.gqa_ratio = case_.gqa_ratio,
                             .widest_tile = 1 << 20,
                             .kv_heads = case_.kv_heads,
                             .bytes_per_token = 1 << 20,
                             .multiprocessors = 0};
    SharedPlan shared;
    PlanShared(costs, entries_, table_begins_, keys_, shared_, &shared);
    ASSERT_EQ(shared.entries.size(), shared_.size());
    const Launched own = Choose(of_rest, 0, plan_entries_, shared.rest);
    const Launched gathered = Choose(of_shared, shared.most_rows, shared.entries, shared.keys);
    *ran = !side_by_side || MayRunSideBySide(gathered.choice, own.choice);
    if (!*ran) return;

    const DeviceArray<WorkItem> items(own.plan.items), gathered_items(gathered.plan.items);
    const DeviceArray<RowKeys> keys(own.plan.keys), gathered_keys(gathered.plan.keys);
    const DeviceArray<int32_t> tables(device_tables_), rows(shared.rows),
        part_rows(shared.part_rows);
    const DeviceArray<RowParts> parts(shared.parts);
    const DeviceArray<std::byte> cache(Reorder(cache_->kv(), cache_->bytes(), Direction::kToGpu));
    const DeviceArray<std::byte> q(q_);
    const DeviceArray<float> k_scale(cache_->k_scale()), v_scale(cache_->v_scale());
    // Enough for both launches at once.
    const size_t own_partials = size_t(own.plan.partials) * own.choice.tile_rows;
    const size_t partials =
        own_partials + size_t(gathered.plan.partials) * gathered.choice.tile_rows;
    const auto dim = static_cast<size_t>(case_.dims.value_dim);
    DeviceArray<float> partial_o(partials * dim), partial_lse(partials);
    DeviceArray<uint64_t> arrivals(own.plan.arrivals + gathered.plan.arrivals);
    arrivals.Fill(0);
    const size_t row_heads = size_t(rows_) * q_heads();
    const size_t gathered_heads = shared.rows.size() * q_heads();
    DeviceArray<float> out_o(row_heads * dim), out_lse(row_heads);
    DeviceArray<float> gathered_o(gathered_heads * dim), gathered_lse(gathered_heads);
    DeviceArray<std::byte> gathered_q(gathered_heads * case_.dims.key_dim * SizeOf(case_.q));
    for (DeviceArray<float>* array : {&out_o, &out_lse, &gathered_o, &gathered_lse}) {
      array->Fill(0xff);
    }
    const DeviceArray<RowKeys> block_keys(block_row_keys_);
    const DeviceArray<std::byte> block_k(block_k_), block_v(block_v_);

    const AttentionParams p = HostParams();
    AttentionArgs args;
    args.items = items.data();
    args.keys = keys.data();
    args.page_tables = tables.data();
    args.cache = cache.data();
    args.k_scale = case_.scaled ? k_scale.data() : nullptr;
    args.v_scale = case_.scaled ? v_scale.data() : nullptr;
    args.q = q.data();
    args.q_dtype = case_.q;
    args.q_heads = q_heads();
    args.kv_heads = case_.kv_heads;
    args.page_shift = std::countr_zero(static_cast<uint32_t>(case_.page_size));
    args.sm_scale = p.sm_scale;
    args.soft_cap = p.soft_cap;
    args.o = out_o.data();
    args.lse = out_lse.data();
    args.partial_o = partial_o.data();
    args.partial_lse = partial_lse.data();
    args.arrivals = arrivals.data();
    args.late_strips = case_.late_strips;
    if (case_.draft) {
      ASSERT_TRUE(MayAttendBlock(own.choice, case_.q, DType::kBf16, case_.soft_cap));
      args.block = {block_keys.data(), block_k.data(), block_v.data(), 0, case_.kv_heads};
    }
    const GatheredLaunch launch{.choice = gathered.choice,
                                .shape = gathered.shape,
                                .blocks = gathered.blocks,
                                .items = gathered_items.data(),
                                .keys = gathered_keys.data(),
                                .gathered_rows = static_cast<int32_t>(shared.rows.size()),
                                .rows = shared.InOrder() ? nullptr : rows.data(),
                                .first_row = shared.rows.front(),
                                .q = gathered_q.data(),
                                .o = gathered_o.data(),
                                .lse = gathered_lse.data(),
                                .call_rows = rows_,
                                .parts = parts.data(),
                                .part_rows = part_rows.data(),
                                .side_by_side = side_by_side,
                                .first_partial_row = static_cast<int64_t>(own_partials),
                                .first_arrival = own.plan.arrivals};
    for (int i = 0; i < 2; ++i) {
      const Status status =
          LaunchSharedAttention(own.choice, own.shape, args, own.blocks, launch, nullptr);
      ASSERT_TRUE(status.ok()) << status.message();
    }
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    *o = out_o.Get();
    *lse = out_lse.Get();
    EXPECT_THAT(arrivals.Get(), ::testing::Each(0u));
  }

 private:
  // One of the two launches.
  struct Launched {
    AttentionShape shape;
    KernelChoice choice;
    int32_t blocks = 0;
    Plan plan;
  };

  int32_t q_heads() const { return case_.gqa_ratio * case_.kv_heads; }

  // most_rows: 0 for those of the longest sequence.
  Launched Choose(const DeviceProperties& device, int32_t most_rows,
                  const std::vector<PlanEntry>& entries, const std::vector<KeyRange>& keys) const {
    Launched launched;
    launched.shape = {.geometry = GeometryOf(case_.kv_heads, case_.dims, case_.kv),
                      .q_heads = q_heads(),
                      .page_size = case_.page_size,
                      .max_rows = std::max(1, most_rows),
                      .sequences = static_cast<int32_t>(entries.size())};
    for (const PlanEntry& entry : entries) {
      launched.shape.total_keys += Length(keys[entry.row_begin + entry.row_count - 1]);
      launched.shape.max_rows = std::max(launched.shape.max_rows, entry.row_count);
    }
    launched.choice = ChooseKernel(device, launched.shape,
                                   {.portable = case_.portable, .fp8_queries = case_.fp8_queries});
    const DecodePlanShape shape = DecodePlanShapeFor(launched.choice, launched.shape, device);
    launched.blocks = shape.blocks;
    PlanAttention(shape, entries, keys, &launched.plan);
    return launched;
  }

  const SharedPages* RunAt(int32_t sequence, int64_t slot) const {
    for (const SharedPages& run : shared_) {
      if (slot >= run.slots.lo && slot < run.slots.hi &&
          std::find(run.entries.begin(), run.entries.end(), sequence) != run.entries.end()) {
        return &run;
      }
    }
    return nullptr;
  }

  // The first of a run's sequences lends its pages to the others. On the GPU they stand in the
  // longest table alone, so that it shows when another one's are read.
  void DealPages(int32_t pages) {
    std::vector<int32_t> free(pages);
    std::iota(free.begin(), free.end(), 0);
    std::shuffle(free.begin(), free.end(), random_);
    for (int32_t i = 0; i < std::ssize(case_.sequences); ++i) {
      const int64_t length = case_.sequences[i].length;
      std::vector<int32_t>& table = tables_.emplace_back();
      std::vector<int32_t>& on_device = apart_.emplace_back();
      for (int64_t slot = 0; slot < length; slot += case_.page_size) {
        const SharedPages* run = RunAt(i, slot);
        if (run != nullptr && run->entries.front() != i) {
          table.push_back(tables_[run->entries.front()][slot / case_.page_size]);
        } else {
          table.push_back(free.back());
          free.pop_back();
        }
        on_device.push_back(run == nullptr || KeeperOf(*run) == i ? table.back() : kWildPage);
      }
      cache_->Fill(table, length, random_);
    }
  }
  int32_t KeeperOf(const SharedPages& run) const {
    const auto pages = [&](int32_t i) {
      return (case_.sequences[i].length + case_.page_size - 1) / case_.page_size;
    };
    return *std::max_element(run.entries.begin(), run.entries.end(),
                             [&](int32_t a, int32_t b) { return pages(a) < pages(b); });
  }

  void MakeRows() {
    for (size_t i = 0; i < case_.sequences.size(); ++i) {
      const Sequence& s = case_.sequences[i];
      entries_.push_back({rows_, s.rows, tables_[i]});
      table_begins_.push_back(static_cast<int32_t>(device_tables_.size()));
      plan_entries_.push_back({rows_, s.rows, table_begins_.back()});
      device_tables_.insert(device_tables_.end(), apart_[i].begin(), apart_[i].end());
      block_entries_.push_back({.row_begin = rows_, .row_count = s.rows});
      for (int32_t row = 0; row < s.rows; ++row) {
        keys_.push_back(RangeOfRow(s, row));
        block_keys_.push_back({0, s.rows});
        block_row_keys_.push_back({rows_, rows_ + s.rows});
      }
      rows_ += s.rows;
    }
    const auto fill = [&](DType type, int64_t elements, std::vector<std::byte>* bytes) {
      std::normal_distribution<float> normal;
      bytes->resize(BytesOf(type, elements));
      for (int64_t i = 0; i < elements; ++i) StoreElement(type, bytes->data(), i, normal(random_));
    };
    const int64_t elements = int64_t{rows_} * q_heads() * case_.dims.key_dim;
    fill(case_.q, elements, &q_);
    fill(DType::kBf16, int64_t{rows_} * case_.kv_heads * case_.dims.key_dim, &block_k_);
    fill(DType::kBf16, int64_t{rows_} * case_.kv_heads * case_.dims.value_dim, &block_v_);
    if (!case_.fp8_queries) return;
    rounded_q_.resize(static_cast<size_t>(elements));
    RoundQueriesToFp8(case_.q, case_.dims.key_dim, q_, rounded_q_.data());
  }

  const Case case_;
  std::mt19937 random_;
  std::unique_ptr<HostCache> cache_;
  std::vector<SharedPages> shared_;
  std::vector<std::vector<int32_t>> tables_, apart_;
  std::vector<int32_t> device_tables_, table_begins_;
  std::vector<AttentionEntry> entries_;
  std::vector<PlanEntry> plan_entries_;
  std::vector<KeyRange> keys_;
  std::vector<std::byte> q_, block_k_, block_v_;
  std::vector<float> rounded_q_;
  std::vector<NewTokensEntry> block_entries_;
  std::vector<KeyRange> block_keys_;
  std::vector<RowKeys> block_row_keys_;
  int32_t rows_ = 0;
};

ReferenceResult ExpectedOf(const Case& c, Call& call) {
  ReferenceResult context = ReferenceAttention(call.HostParams());
  if (!c.draft) return context;
  const ReferenceResult block = ReferenceNewTokens(call.HostBlock());
  const auto dim = static_cast<size_t>(c.dims.value_dim);
  for (size_t pair = 0; pair < context.lse.size(); ++pair) {
    const MergeWeights<double> weights = Merge<double>(context.lse[pair], block.lse[pair]);
    context.lse[pair] = weights.lse;
    for (size_t i = pair * dim; i < (pair + 1) * dim; ++i) {
      context.o[i] = weights.a * context.o[i] + weights.b * block.o[i];
    }
  }
  return context;
}

// As in attention_test.cc.
double Tolerance(const Case& c) {
  if (c.draft) return 1e-2;
  if (c.kv != DType::kBf16) return 2e-3;
  return c.q == DType::kBf16 ? 1e-2 : 2e-2;
}

void ExpectMatchesReference(const Case& c, bool side_by_side) {
  SCOPED_TRACE(Describe(c) + (side_by_side ? " side by side" : " one after the other"));
  Call call(c);
  std::vector<float> o, lse;
  bool ran = false;
  ASSERT_NO_FATAL_FAILURE(call.Run(side_by_side, &ran, &o, &lse));
  if (!ran) return;
  const ReferenceResult expected = ExpectedOf(c, call);
  const auto close = [&](const std::vector<float>& actual, const std::vector<double>& wanted,
                         const char* what) {
    const auto count = static_cast<int64_t>(wanted.size());
    EXPECT_TRUE(test::AllClose(actual, wanted, {.absolute = Tolerance(c)}, {count})) << what;
  };
  close(o, expected.o, "o");
  close(lse, expected.lse, "lse");
}

void ExpectMatchesReference(const Case& c) {
  ExpectMatchesReference(c, false);
  ExpectMatchesReference(c, true);
}

class SharedPagesOnGpu : public ::testing::TestWithParam<std::tuple<DType, HeadDims, bool>> {
 protected:
  Case Base() const {
    Case c;
    c.kv = std::get<0>(GetParam());
    c.dims = std::get<1>(GetParam());
    c.portable = std::get<2>(GetParam());
    return c;
  }
};

// Gathered rows that fill tiles of every kernel, in the order of the call.
TEST_P(SharedPagesOnGpu, GqaRatiosAndRows) {
  TRIBUTARY_SKIP_WITHOUT_GPU();
  for (const int32_t gqa_ratio : {1, 4, 16}) {
    for (const int32_t rows : {1, 3}) {
      Case c = Base();
      c.gqa_ratio = gqa_ratio;
      c.late_strips = rows == 1 ? 1 : 0;
      c.sequences = {{1100, rows}, {1024 + rows, rows}, {1300, rows}};
      c.runs = {{0, 1, {0, 1, 2}}};
      ExpectMatchesReference(c);
    }
  }
}

// Every sequence has rows of its own in a run, and strangers stand between.
TEST_P(SharedPagesOnGpu, ATreeOfThreeLevels) {
  TRIBUTARY_SKIP_WITHOUT_GPU();
  Case c = Base();
  c.sequences = {{4200}, {3100}, {70}, {4100, 2}, {3080}, {2049}, {1500}};
  c.runs = {{0, 2, {0, 1, 3, 4, 5}}, {2, 3, {0, 3}}, {2, 3, {1, 4}}, {3, 4, {0, 3}}};
  ExpectMatchesReference(c);
}

TEST_P(SharedPagesOnGpu, PageSizesScalesSoftCapAndQueryTypes) {
  TRIBUTARY_SKIP_WITHOUT_GPU();
  for (const int32_t page_size : {32, 128}) {
    for (const DType q : {DType::kBf16, DType::kF16, DType::kF32}) {
      Case c = Base();
      c.page_size = page_size;
      c.q = q;
      c.scaled = true;
      c.soft_cap = page_size == 32 ? 2.0f : 0.0f;
      c.sequences = {{1500, 2}, {300}, {1100, 5}};
      c.runs = {{0, 1, {0, 2}}};
      ExpectMatchesReference(c);
    }
  }
}

TEST_P(SharedPagesOnGpu, RowsThatSeePartsOfARunOrNothing) {
  TRIBUTARY_SKIP_WITHOUT_GPU();
  Case c = Base();
  c.sequences = {{2500}, {1026, 4}, {2060, 2, 300}, {2100, 3, 40}};
  c.runs = {{0, 1, {0, 1, 2, 3}}, {1, 2, {0, 2, 3}}};
  ExpectMatchesReference(c);
}

std::vector<std::tuple<DType, HeadDims, bool>> EveryKernel() {
  std::vector<std::tuple<DType, HeadDims, bool>> all;
  for (const DType kv :
       {DType::kFp8E4M3, DType::kFp8E5M2, DType::kBf16, DType::kF16, DType::kNvfp4}) {
    for (const HeadDims& dims : DimsOf(&HeadDims::decode_sm80)) {
      for (const bool portable : {false, true}) all.push_back({kv, dims, portable});
    }
  }
  return all;
}
INSTANTIATE_TEST_SUITE_P(Kernels, SharedPagesOnGpu, ::testing::ValuesIn(EveryKernel()),
                         [](const auto& param) {
                           return std::string(Name(std::get<0>(param.param))) + "_" +
                                  NameOf(std::get<1>(param.param)) +
                                  (std::get<2>(param.param) ? "_portable" : "");
                         });

// Many forks: several query tiles of 64 packed rows, whole and in part.
TEST(SharedAttentionTest, ManyForks) {
  TRIBUTARY_SKIP_WITHOUT_GPU();
  for (const DType kv : {DType::kFp8E4M3, DType::kBf16}) {
    for (const bool fp8_queries : {false, true}) {
      if (fp8_queries && !IsFp8(kv)) continue;
      Case c;
      c.kv = kv;
      c.fp8_queries = fp8_queries;
      c.late_strips = 1;
      c.runs = {{0, 3, {}}};
      for (int32_t i = 0; i < 37; ++i) {
        c.sequences.push_back({3 * kSharedSlots + 1 + 5 * i});
        c.runs[0].entries.push_back(i);
      }
      ExpectMatchesReference(c);
    }
  }
}

// A draft's block is attended to in the launch over the rest.
TEST(SharedAttentionTest, Drafts) {
  TRIBUTARY_SKIP_WITHOUT_GPU();
  DeviceProperties device;
  ASSERT_TRUE(QueryDevice(0, &device).ok());
  if (!FeaturesOf(device.compute_capability).wgmma) GTEST_SKIP() << "needs wgmma";
  Case c;
  c.draft = true;
  c.gqa_ratio = 4;
  for (const int64_t length : {1100, 2048, 1030, 1024}) {
    c.sequences.push_back({.length = length, .rows = 16, .causal = false});
  }
  c.runs = {{0, 1, {0, 1, 2, 3}}};
  ExpectMatchesReference(c);
  c.runs = {{0, 1, {0, 2}}};
  ExpectMatchesReference(c);
}

}  // namespace
}  // namespace tributary::cuda
