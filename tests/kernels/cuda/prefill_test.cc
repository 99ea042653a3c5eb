// Prefill on the GPU against the float64 reference: context in pages and new tokens, every type and
// head dimension, both paths, windows, soft cap, scales, queries of any type, several passes, NaN
// in dead slots and in other sequences' tokens, wild ids in dead page table entries. What is chosen
// and planned is checked without a GPU.
#include "kernels/cuda/prefill/prefill.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <memory>
#include <numeric>
#include <string>

#include "kernels/cuda/architectures.h"
#include "kernels/cuda/layout/page_layout.h"
#include "kernels/cuda/prefill/sm80/mma_prefill_config.h"
#include "kernels/cuda/prefill/sm90/wgmma_prefill_config.h"
#include "kernels/fp8_queries.h"
#include "kernels/head_dims.h"
#include "kernels/lse.h"
#include "kernels/reference.h"
#include "tests/kernels/cuda/gpu_cache.h"
#include "tests/kernels/cuda/sequence.h"
#include "tests/support/compare.h"

namespace tributary::cuda {
namespace {

constexpr int32_t kWildPage = 2147480000;
constexpr DType kCacheTypes[] = {DType::kFp8E4M3, DType::kFp8E5M2, DType::kBf16, DType::kF16,
                                 DType::kNvfp4};

struct Case {
  bool context = false;  // else new tokens
  DType q = DType::kBf16;
  DType kv = DType::kBf16;
  HeadDims dims = {.key_dim = 128, .value_dim = 128};
  int32_t gqa_ratio = 2;
  int32_t kv_heads = 2;
  int32_t page_size = 16;
  int32_t head_begin = 0;
  int32_t head_count = 0;  // 0: all
  std::vector<Sequence> sequences;
  float soft_cap = 0.0f;
  bool scaled = false;
  bool portable = false;
  bool fp8_queries = false;
  bool fp8_weights = false;
  bool no_tokens = false;  // rows alone
  float q_magnitude = 1.0f;
  int32_t blocks = 0;              // 0: as many as the GPU has multiprocessors
  int64_t workspace_slots = 4096;  // several passes when it is short
  DType o = DType::kF32;
};

std::string Describe(const Case& c) {
  return std::string(c.context ? "context " : "new tokens ") + Name(c.kv) + " " + NameOf(c.dims) +
         " gqa ratio " + std::to_string(c.gqa_ratio) + " page " + std::to_string(c.page_size) +
         " q " + Name(c.q) + " o " + Name(c.o) + (c.portable ? " portable" : "") +
         (c.fp8_queries ? " fp8 queries" : "") + (c.fp8_weights ? " fp8 weights" : "") +
         Describe(c.sequences);
}

std::vector<float> Widen(DType type, const std::vector<std::byte>& bytes) {
  std::vector<float> x(bytes.size() / SizeOf(type));
  for (size_t i = 0; i < x.size(); ++i) x[i] = LoadElement(type, bytes.data(), i);
  return x;
}

class Call {
 public:
  explicit Call(const Case& c) : case_(c) {
    if (case_.head_count == 0) case_.head_count = heads() - case_.head_begin;
    for (const Sequence& s : c.sequences) {
      for (int32_t row = 0; row < s.rows; ++row) {
        keys_.push_back(c.no_tokens ? KeyRange{0, 0} : RangeOfRow(s, row));
      }
      rows_ += s.rows;
    }
    q_ = Random(case_.q, size_t(rows_) * heads() * c.dims.key_dim, c.q_magnitude);
    if (c.fp8_queries) {
      rounded_q_.resize(q_.size() / SizeOf(case_.q));
      RoundQueriesToFp8(case_.q, c.dims.key_dim, q_, rounded_q_.data());
    }
    c.context ? MakeContext() : MakeNewTokens();
  }

  ReferenceResult Expected() const {
    if (case_.context) {
      AttentionParams p;
      p.kv = cache_->kv();
      p.q = case_.fp8_queries ? static_cast<const void*>(rounded_q_.data()) : q_.data();
      p.q_dtype = case_.fp8_queries ? DType::kF32 : case_.q;
      p.rows = rows_;
      p.q_heads = heads();
      p.entries = reference_entries_;
      p.keys = keys_.data();
      p.sm_scale = sm_scale();
      p.soft_cap = case_.soft_cap;
      return ReferenceAttention(p);
    }
    NewTokensParams p;
    p.q = q_.data();
    p.k = k_.data();
    p.v = v_.data();
    p.q_dtype = case_.q;
    p.kv_dtype = case_.kv;
    p.rows = rows_;
    p.q_heads = heads();
    p.kv_heads = case_.kv_heads;
    p.key_dim = case_.dims.key_dim;
    p.value_dim = case_.dims.value_dim;
    p.head_begin = case_.head_begin;
    p.head_count = case_.head_count;
    p.entries = new_tokens_;
    p.keys = keys_.data();
    p.sm_scale = sm_scale();
    p.soft_cap = case_.soft_cap;
    return ReferenceNewTokens(p);
  }

  // Makes a dimension of a key of the last KV head, and of its value of the first, this.
  void Poison(size_t sequence, int64_t key, float value) {
    const int32_t last = case_.kv_heads - 1;
    const auto d = static_cast<size_t>(key % case_.dims.value_dim);
    if (case_.context) {
      const PagedKv& kv = cache_->kv();
      const int32_t page = tables_[sequence][key / kv.page_size];
      const auto slot = static_cast<int32_t>(key % kv.page_size);
      cache_->PoisonValue(page, 0, slot, d, value);
      cache_->PoisonKey(page, last, slot, 1, value);
      return;
    }
    const size_t token = entries_[sequence].token_begin + key;
    StoreElement(case_.kv, v_.data(), token * case_.kv_heads * case_.dims.value_dim + d, value);
    StoreElement(case_.kv, k_.data(), (token * case_.kv_heads + last) * case_.dims.key_dim + 1,
                 value);
  }

  // With `accumulate`, *o and *lse are what the result is merged with.
  void Run(std::vector<float>* o, std::vector<float>* lse, bool accumulate = false) {
    DeviceProperties device;
    ASSERT_TRUE(QueryDevice(0, &device).ok());
    if (case_.blocks > 0) device.multiprocessors = case_.blocks;
    PrefillShape shape;
    shape.q = case_.q;
    shape.geometry = geometry();
    shape.q_heads = heads();
    shape.page_size = case_.context ? case_.page_size : 0;
    shape.head_begin = case_.head_begin;
    shape.head_count = case_.head_count;
    const PrefillChoice choice = ChoosePrefill(device, shape,
                                               {.portable = case_.portable,
                                                .fp8_queries = case_.fp8_queries,
                                                .fp8_weights = case_.fp8_weights});
    PrefillPlanShape plan_shape = PrefillPlanShapeFor(choice, shape, device, case_.workspace_slots);
    plan_shape.accumulate = accumulate;
    PrefillPlan plan;
    (case_.context ? PlanPrefillContext : PlanPrefillNewTokens)(plan_shape, entries_, keys_, &plan);
    const DeviceArray<PrefillItem> items(plan.items);
    const DeviceArray<PrefillGather> gathers(plan.gathers);
    const DeviceArray<RowKeys> keys(plan.keys);
    const DeviceArray<int32_t> tables(page_tables_);
    const DeviceArray<std::byte> q(q_), k(k_), v(v_);
    const DeviceArray<std::byte> cache(
        case_.context ? Reorder(cache_->kv(), cache_->bytes(), Direction::kToGpu)
                      : std::vector<std::byte>());
    const std::vector<float> none;
    const DeviceArray<float> k_scale(case_.context ? cache_->k_scale() : none);
    const DeviceArray<float> v_scale(case_.context ? cache_->v_scale() : none);
    const size_t results = size_t(rows_) * case_.head_count;
    DeviceArray<std::byte> device_o(results * case_.dims.value_dim * SizeOf(case_.o));
    DeviceArray<float> device_lse(results);
    DeviceArray<std::byte> workspace(
        PrefillWorkspaceBytes(choice, shape, rows_, case_.workspace_slots));
    device_o.Fill(0xff);
    device_lse.Fill(0xff);
    workspace.Fill(0xff);
    if (accumulate) {
      std::vector<std::byte> bytes(o->size() * sizeof(float));
      std::memcpy(bytes.data(), o->data(), bytes.size());
      device_o.Set(bytes);
      device_lse.Set(*lse);
    }
    PrefillArgs args;
    args.items = items.data();
    args.gathers = gathers.data();
    args.keys = keys.data();
    args.rows = rows_;
    args.q = q.data();
    if (!case_.no_tokens) {
      args.k = k.data();
      args.v = v.data();
      args.tokens = tokens_;
    }
    args.page_tables = tables.data();
    args.cache = cache.data();
    args.k_scale = case_.scaled ? k_scale.data() : nullptr;
    args.v_scale = case_.scaled ? v_scale.data() : nullptr;
    args.sm_scale = sm_scale();
    args.soft_cap = case_.soft_cap;
    args.o_dtype = case_.o;
    args.o = device_o.data();
    args.lse = device_lse.data();
    args.workspace = workspace.data();
    args.workspace_slots = case_.workspace_slots;
    const Status status = LaunchPrefill(choice, shape, plan.passes, args, nullptr);
    ASSERT_TRUE(status.ok()) << status.message();
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    *o = Widen(case_.o, device_o.Get());
    *lse = device_lse.Get();
  }

 private:
  int32_t heads() const { return case_.gqa_ratio * case_.kv_heads; }
  KvGeometry geometry() const { return GeometryOf(case_.kv_heads, case_.dims, case_.kv); }
  float sm_scale() const {
    return 1.0f / std::sqrt(static_cast<float>(case_.dims.key_dim)) / case_.q_magnitude;
  }

  std::vector<std::byte> Random(DType type, size_t count, float magnitude) {
    std::vector<std::byte> bytes(count * SizeOf(type));
    std::normal_distribution<float> normal(0.0f, magnitude);
    for (size_t i = 0; i < count; ++i) StoreElement(type, bytes.data(), i, normal(random_));
    return bytes;
  }

  void MakeContext() {
    int64_t pages = 1;
    for (const Sequence& s : case_.sequences) {
      pages += (s.length + case_.page_size - 1) / case_.page_size;
    }
    cache_ = std::make_unique<HostCache>(
        CacheShape{geometry(), case_.page_size, static_cast<int32_t>(pages)}, case_.scaled);
    std::vector<int32_t> free(pages);
    std::iota(free.begin(), free.end(), 0);
    std::shuffle(free.begin(), free.end(), random_);
    int32_t row = 0;
    for (const Sequence& s : case_.sequences) {
      std::vector<int32_t>& table = tables_.emplace_back();
      for (int64_t slot = 0; slot < s.length; slot += case_.page_size) {
        table.push_back(free.back());
        free.pop_back();
      }
      cache_->Fill(table, s.length, random_);
      table.insert(table.end(), 5, kWildPage);
      PrefillEntry entry;
      entry.row_begin = row;
      entry.row_count = s.rows;
      entry.page_table = static_cast<int32_t>(page_tables_.size());
      entries_.push_back(entry);
      page_tables_.insert(page_tables_.end(), table.begin(), table.end());
      row += s.rows;
    }
    for (size_t i = 0; i < entries_.size(); ++i) {
      reference_entries_.push_back({entries_[i].row_begin, entries_[i].row_count, tables_[i]});
    }
  }

  // As many new tokens as rows; the reference numbers both alike.
  void MakeNewTokens() {
    int32_t row = 0;
    for (const Sequence& s : case_.sequences) {
      PrefillEntry entry;
      entry.row_begin = entry.token_begin = row;
      entry.row_count = s.rows;
      entry.token_count = case_.no_tokens ? 0 : s.rows;
      entries_.push_back(entry);
      new_tokens_.push_back({row, s.rows});
      row += s.rows;
    }
    tokens_ = row;
    const size_t key_elements = size_t(case_.kv_heads) * case_.dims.key_dim;
    const size_t value_elements = size_t(case_.kv_heads) * case_.dims.value_dim;
    k_ = Random(case_.kv, key_elements * tokens_, 1.0f);
    v_ = Random(case_.kv, value_elements * tokens_, 1.0f);
    // The last sequence's tokens are NaN where it is not the only one: they must not reach others.
    if (entries_.size() < 2) return;
    const size_t first = entries_.back().token_begin;
    for (size_t i = key_elements * first; i < key_elements * tokens_; ++i) {
      StoreElement(case_.kv, k_.data(), i, std::nanf(""));
    }
    for (size_t i = value_elements * first; i < value_elements * tokens_; ++i) {
      StoreElement(case_.kv, v_.data(), i, std::nanf(""));
    }
  }

  Case case_;
  std::mt19937 random_{1};
  std::unique_ptr<HostCache> cache_;
  std::vector<std::vector<int32_t>> tables_;
  std::vector<int32_t> page_tables_;
  std::vector<PrefillEntry> entries_;
  std::vector<AttentionEntry> reference_entries_;
  std::vector<NewTokensEntry> new_tokens_;
  std::vector<KeyRange> keys_;
  std::vector<std::byte> q_, k_, v_;
  std::vector<float> rounded_q_;
  int32_t rows_ = 0;
  int32_t tokens_ = 0;
};

// Values are about 1 in size and averaged, so an absolute bound is the meaningful one.
double Tolerance(const Case& c) {
  // A weight is off by up to a sixteenth, and what rows see may be few keys with values of up to 4.
  if (c.fp8_weights && !c.portable) return 0.12;
  if (c.fp8_queries) return 1e-2;  // sums of FP8 products keep some 13 bits
  const bool bf16 = c.kv == DType::kBf16 || (!IsUnscaled(c.kv) && c.q == DType::kBf16);
  if (!bf16) return c.o == DType::kBf16 ? 1e-2 : 2e-3;
  return c.q == DType::kBf16 ? 1e-2 : 2e-2;
}

// Beyond 1, what counts is the rounding of the result itself: the tolerance is then relative.
void ExpectClose(std::vector<float> actual, std::vector<double> expected, double tolerance,
                 const char* what) {
  ASSERT_EQ(actual.size(), expected.size());
  for (size_t i = 0; i < actual.size(); ++i) {
    if (!std::isfinite(expected[i])) continue;
    const double size = std::max(1.0, std::abs(expected[i]));
    actual[i] = static_cast<float>(actual[i] / size);
    expected[i] /= size;
  }
  const auto count = static_cast<int64_t>(expected.size());
  EXPECT_TRUE(test::AllClose(actual, expected, {.absolute = tolerance}, {count})) << what;
}

void ExpectMatchesReference(const Case& c) {
  SCOPED_TRACE(Describe(c));
  Call call(c);
  std::vector<float> o, lse;
  ASSERT_NO_FATAL_FAILURE(call.Run(&o, &lse));
  const ReferenceResult expected = call.Expected();
  ExpectClose(o, expected.o, Tolerance(c), "o");
  ExpectClose(lse, expected.lse, c.q == c.kv ? 1e-3 : 2e-2, "lse");
}

// The same of what is finite, which must be what is expected to be finite.
void ExpectMatchesWhereFinite(const Case& c, Call& call) {
  SCOPED_TRACE(Describe(c));
  std::vector<float> o, lse;
  ASSERT_NO_FATAL_FAILURE(call.Run(&o, &lse));
  const ReferenceResult expected = call.Expected();
  const auto expect = [](const std::vector<float>& actual, const std::vector<double>& wanted,
                         double tolerance, const char* what) {
    ASSERT_EQ(actual.size(), wanted.size());
    for (size_t i = 0; i < actual.size(); ++i) {
      ASSERT_EQ(std::isfinite(actual[i]), std::isfinite(wanted[i]))
          << what << "[" << i << "] is " << actual[i] << ", expected " << wanted[i];
      if (!std::isfinite(wanted[i])) continue;
      ASSERT_NEAR(actual[i], wanted[i], tolerance * std::max(1.0, std::abs(wanted[i])))
          << what << "[" << i << "]";
    }
  };
  expect(o, expected.o, Tolerance(c), "o");
  expect(lse, expected.lse, c.q == c.kv ? 1e-3 : 2e-2, "lse");
}

// (head dims, portable)
class Prefill : public ::testing::TestWithParam<std::tuple<HeadDims, bool>> {
 protected:
  Case Base(bool context, DType kv) const {
    Case c;
    c.context = context;
    c.kv = kv;
    c.q = kv == DType::kF16 ? DType::kF16 : DType::kBf16;
    std::tie(c.dims, c.portable) = GetParam();
    return c;
  }
};

TEST_P(Prefill, NewTokensOfAnyNumber) {
  TRIBUTARY_SKIP_WITHOUT_GPU();
  for (DType kv : {DType::kBf16, DType::kF16}) {
    Case c = Base(false, kv);
    c.no_tokens = true;
    c.sequences = {{130, 130}};
    ExpectMatchesReference(c);
    c.no_tokens = false;
    for (int32_t rows : {1, 63, 64, 65, 127, 128, 129, 300}) {
      c.sequences = {{rows, rows}};
      ExpectMatchesReference(c);
    }
    c.sequences = {{100, 100}, {1, 1}, {257, 257}, {40, 40}};
    ExpectMatchesReference(c);
  }
}

TEST_P(Prefill, NewTokensGqaRatiosWindowsAndSlicesOfHeads) {
  TRIBUTARY_SKIP_WITHOUT_GPU();
  for (int32_t gqa_ratio : {1, 4, 16}) {
    for (int64_t window : {0, 70, 200}) {
      Case c = Base(false, DType::kBf16);
      c.gqa_ratio = gqa_ratio;
      c.kv_heads = 16 / gqa_ratio;
      c.head_begin = 3;
      c.head_count = 5;
      c.sequences = {{290, 290, window}, {130, 130, window, false}, {33, 33}};
      ExpectMatchesReference(c);
    }
  }
}

TEST_P(Prefill, NewTokensWithQueriesOfAnyTypeAndSize) {
  TRIBUTARY_SKIP_WITHOUT_GPU();
  for (DType kv : {DType::kBf16, DType::kF16}) {
    for (DType q : {DType::kF32, DType::kBf16, DType::kF16}) {
      Case c = Base(false, kv);
      c.q = q;
      c.sequences = {{150, 150}};
      ExpectMatchesReference(c);
      if (q == DType::kF16) continue;
      c.q_magnitude = 1e12f;
      ExpectMatchesReference(c);
    }
  }
}

TEST_P(Prefill, ResultsInSixteenBitsAndSoftCap) {
  TRIBUTARY_SKIP_WITHOUT_GPU();
  for (DType o : {DType::kBf16, DType::kF16}) {
    for (float soft_cap : {0.0f, 2.0f}) {
      Case c = Base(false, DType::kBf16);
      c.o = o;
      c.soft_cap = soft_cap;
      c.sequences = {{200, 200}};
      ExpectMatchesReference(c);
    }
  }
}

// Logits far below the cap keep their precision.
TEST_P(Prefill, SoftCapsOfAnySize) {
  TRIBUTARY_SKIP_WITHOUT_GPU();
  for (const float soft_cap : {1e-40f, 65.0f, 1e6f, 1e8f, 3e38f}) {
    for (const bool context : {false, true}) {
      Case c = Base(context, DType::kBf16);
      c.soft_cap = soft_cap;
      c.sequences = {{200, 200}};
      ExpectMatchesReference(c);
    }
  }
}

TEST_P(Prefill, ContextOfEveryCacheType) {
  TRIBUTARY_SKIP_WITHOUT_GPU();
  for (DType kv : kCacheTypes) {
    for (DType q : {DType::kBf16, DType::kF16, DType::kF32}) {
      Case c = Base(true, kv);
      c.q = q;
      c.scaled = true;
      c.sequences = {{300, 70}, {0, 3}, {1, 1}, {555, 130}};
      ExpectMatchesReference(c);
    }
  }
}

TEST_P(Prefill, ContextInPagesOfEverySizeWithWindowsAndSoftCap) {
  TRIBUTARY_SKIP_WITHOUT_GPU();
  for (int32_t page_size : {16, 32, 64, 128}) {
    for (DType kv : {DType::kFp8E4M3, DType::kBf16, DType::kNvfp4}) {
      Case c = Base(true, kv);
      c.page_size = page_size;
      c.soft_cap = page_size == 32 ? 3.0f : 0.0f;
      c.sequences = {{700, 90, 150}, {333, 140, 64, false}, {90, 100}};
      ExpectMatchesReference(c);
    }
  }
}

TEST_P(Prefill, ContextInSeveralPasses) {
  TRIBUTARY_SKIP_WITHOUT_GPU();
  for (int64_t workspace_slots : {128, 256, 640}) {
    for (DType kv : {DType::kFp8E4M3, DType::kF16, DType::kNvfp4}) {
      Case c = Base(true, kv);
      c.workspace_slots = workspace_slots;
      c.sequences = {{900, 150, -1, false}, {0, 5}, {700, 80, 300}, {120, 65}};
      ExpectMatchesReference(c);
    }
  }
}

TEST_P(Prefill, FewRowsOverLongContextAreSplit) {
  TRIBUTARY_SKIP_WITHOUT_GPU();
  for (DType kv : {DType::kFp8E4M3, DType::kBf16}) {
    for (DType o : {DType::kF32, DType::kBf16}) {
      Case c = Base(true, kv);
      c.o = o;
      c.sequences = {{1900, 70}, {0, 3}, {130, 90, 50}};
      ExpectMatchesReference(c);
    }
  }
  Case c = Base(true, DType::kF16);
  c.sequences = {{1500, 100}};
  Call call(c);
  const ReferenceResult part = call.Expected();
  std::vector<float> o(part.o.begin(), part.o.end()), lse(part.lse.begin(), part.lse.end());
  std::vector<double> expected_lse = part.lse;
  for (double& x : expected_lse) x += std::log(2.0);
  ASSERT_NO_FATAL_FAILURE(call.Run(&o, &lse, /*accumulate=*/true));
  ExpectClose(o, part.o, Tolerance(c), "o");
  ExpectClose(lse, expected_lse, 1e-3, "lse");
}

TEST_P(Prefill, QueriesInFp8OnRequest) {
  TRIBUTARY_SKIP_WITHOUT_GPU();
  for (DType kv : {DType::kFp8E4M3, DType::kFp8E5M2}) {
    for (DType q : {DType::kBf16, DType::kF16, DType::kF32}) {
      Case c = Base(true, kv);
      c.q = q;
      c.fp8_queries = true;
      c.scaled = true;
      c.q_magnitude = q == DType::kF32 ? 1e9f : 1.0f;
      c.sequences = {{700, 200}, {33, 40, 20}, {1200, 65, -1, false}};
      ExpectMatchesReference(c);
    }
  }
}

// Contexts of one KV tile and of many, whose sums are kept in fp32 in between; windows and masks;
// references that follow logits that grow.
TEST_P(Prefill, WeightsInFp8OnRequest) {
  TRIBUTARY_SKIP_WITHOUT_GPU();
  for (DType kv : {DType::kFp8E4M3, DType::kFp8E5M2}) {
    for (DType q : {DType::kBf16, DType::kF32}) {
      Case c = Base(true, kv);
      c.q = q;
      c.fp8_queries = c.fp8_weights = true;
      c.scaled = true;
      c.q_magnitude = q == DType::kF32 ? 1e9f : 1.0f;
      c.sequences = {{700, 200}, {33, 40, 20}, {1200, 65, -1, false}, {3900, 130}};
      for (const float soft_cap : {0.0f, 20.0f}) {
        c.soft_cap = soft_cap;
        for (const int64_t workspace_slots : {int64_t{256}, int64_t{6144}}) {
          c.workspace_slots = workspace_slots;
          ExpectMatchesReference(c);
        }
      }
    }
  }
}

TEST_P(Prefill, OneBlockTakesAllItems) {
  TRIBUTARY_SKIP_WITHOUT_GPU();
  for (int32_t blocks : {1, 3}) {
    Case c = Base(false, DType::kBf16);
    c.blocks = blocks;
    c.sequences = {{600, 600}, {257, 257}, {31, 31}};
    ExpectMatchesReference(c);
  }
}

// Keys and values that are not finite, where some rows see them and others do not, in the middle of
// a prompt, at its end, and at the edges of windows.
TEST_P(Prefill, WhatIsNotFiniteStaysWithTheRowsThatSeeIt) {
  TRIBUTARY_SKIP_WITHOUT_GPU();
  std::vector<std::pair<DType, bool>> contexts;  // and whether all is multiplied in FP8
  for (const DType kv : kCacheTypes) {
    contexts.emplace_back(kv, false);
    if (IsFp8(kv)) contexts.emplace_back(kv, true);
  }
  for (const float value : {std::nanf(""), INFINITY}) {
    for (const DType kv : {DType::kBf16, DType::kF16}) {
      Case c = Base(false, kv);
      c.sequences = {{400, 400}, {300, 300, 70}, {150, 150, 20, false}, {40, 40}};
      for (const int32_t blocks : {0, 2}) {
        c.blocks = blocks;
        Call call(c);
        for (const size_t sequence : {0, 1, 2}) {
          for (const int64_t key : {5, 77, 130, 149}) call.Poison(sequence, key, value);
        }
        ExpectMatchesWhereFinite(c, call);
      }
    }
    for (const auto& [kv, in_fp8] : contexts) {
      Case c = Base(true, kv);
      c.scaled = true;
      c.fp8_queries = c.fp8_weights = in_fp8;
      c.sequences = {{330, 200}, {300, 130, 70}, {260, 90, 20, false}, {1900, 70}};
      // What is quantised stores its largest number instead.
      if (!IsUnscaled(kv) && std::isinf(value)) continue;
      for (const int64_t workspace_slots : {int64_t{256}, c.workspace_slots}) {
        c.workspace_slots = workspace_slots;
        Call call(c);
        for (size_t sequence = 0; sequence < c.sequences.size(); ++sequence) {
          const Sequence& s = c.sequences[sequence];
          for (const int64_t key : {s.length - 1, s.length - s.rows / 2, s.length - s.rows - 40}) {
            call.Poison(sequence, key, value);
          }
        }
        ExpectMatchesWhereFinite(c, call);
      }
    }
  }
}

TEST_P(Prefill, NewTokensAreMergedWithTheContext) {
  TRIBUTARY_SKIP_WITHOUT_GPU();
  Case c = Base(false, DType::kBf16);
  c.sequences = {{200, 200}};
  Call call(c);
  const ReferenceResult part = call.Expected();
  // Twice the same keys: the output stays, the LSE grows by log 2; a row without anything before
  // keeps what the call gives.
  std::vector<float> o(part.o.begin(), part.o.end()), lse(part.lse.begin(), part.lse.end());
  std::vector<double> expected_lse = part.lse;
  for (size_t i = 0; i < lse.size(); ++i) {
    if (i % 3 == 0) {
      lse[i] = EmptyLse<float>();
      std::fill_n(o.begin() + i * c.dims.value_dim, c.dims.value_dim, 0.0f);
    } else {
      expected_lse[i] += std::log(2.0);
    }
  }
  ASSERT_NO_FATAL_FAILURE(call.Run(&o, &lse, /*accumulate=*/true));
  ExpectClose(o, part.o, Tolerance(c), "o");
  ExpectClose(lse, expected_lse, 1e-3, "lse");
}

TEST_P(Prefill, RepeatedLaunchesGiveTheSameBits) {
  TRIBUTARY_SKIP_WITHOUT_GPU();
  Case c = Base(true, DType::kFp8E4M3);
  c.sequences = {{3000, 500}, {700, 300}};
  Call call(c);
  std::vector<float> o, lse, o_again, lse_again;
  ASSERT_NO_FATAL_FAILURE(call.Run(&o, &lse));
  for (int i = 0; i < 5; ++i) {
    ASSERT_NO_FATAL_FAILURE(call.Run(&o_again, &lse_again));
    ASSERT_EQ(o, o_again);
    ASSERT_EQ(lse, lse_again);
  }
}

// Over a context of one page, values and keys of every dimension have a place of their own: each
// output is checked, so that none can be another's.
TEST_P(Prefill, EveryDimensionOfAPageReachesItsOutput) {
  TRIBUTARY_SKIP_WITHOUT_GPU();
  for (DType kv : kCacheTypes) {
    for (const int in_fp8 : {0, 1, 2}) {
      if (in_fp8 > 0 && !IsFp8(kv)) continue;
      Case c = Base(true, kv);
      c.gqa_ratio = 1;
      c.kv_heads = 3;
      c.fp8_queries = in_fp8 > 0;
      c.fp8_weights = in_fp8 > 1;
      c.sequences = {{16, 16}, {7, 2}};
      ExpectMatchesReference(c);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Paths, Prefill,
                         ::testing::Combine(::testing::ValuesIn(DimsOf(&HeadDims::prefill_sm80)),
                                            ::testing::Bool()),
                         [](const auto& param) {
                           return NameOf(std::get<0>(param.param)) +
                                  (std::get<1>(param.param) ? "_portable" : "");
                         });

// What needs no GPU.

PrefillShape SomeShape() {
  PrefillShape shape;
  shape.geometry = SquareGeometry(2, 128, DType::kBf16);
  shape.q_heads = shape.head_count = 8;
  return shape;
}

TEST(PrefillChoiceTest, FollowsTheCapability) {
  const PrefillShape shape = SomeShape();
  for (int32_t capability : {80, 86, 89, 120}) {
    EXPECT_EQ(ChoosePrefill({capability, 100}, shape).kind, PrefillKind::kMma) << capability;
  }
  EXPECT_EQ(ChoosePrefill({90, 132}, shape).kind, PrefillKind::kWgmma);
  EXPECT_EQ(ChoosePrefill({90, 132}, shape, {.portable = true}).kind, PrefillKind::kMma);
}

// sm_100's kernel is chosen when the table of architectures enables its entry, for the head dims it
// is built for, and is left out where only portable code may run.
TEST(PrefillChoiceTest, TakesTheKernelOfSm100WhereItsEntryIsEnabled) {
  auto table = kArchitectures;
  const auto sm100 = std::find_if(table.begin(), table.end(),
                                  [](const Architecture& a) { return a.features.tcgen05; });
  ASSERT_NE(sm100, table.end());
  PrefillShape shape = SomeShape();
  const auto kind = [&](bool enabled, bool portable) {
    sm100->enabled = enabled;
    return ChoosePrefillWith(FeaturesOf(100, portable, table), shape).kind;
  };
  EXPECT_EQ(kind(true, false), PrefillKind::kTcgen05);
  EXPECT_EQ(kind(true, true), PrefillKind::kMma);
  EXPECT_EQ(kind(false, false), PrefillKind::kMma);
  EXPECT_EQ(ChoosePrefill({100, 148}, shape).kind,
            kHasSm100Kernels ? PrefillKind::kTcgen05 : PrefillKind::kMma);
  shape.geometry = SquareGeometry(2, 96, DType::kBf16);
  ASSERT_FALSE(HasKernel<&HeadDims::prefill_sm100>(shape.geometry));
  EXPECT_EQ(kind(true, false), PrefillKind::kMma);
}

TEST(PrefillChoiceTest, ComputesInTheTypeOfTheCacheOrTheQueries) {
  PrefillShape shape = SomeShape();
  const auto compute = [&](DType kv, DType q) {
    shape.geometry.dtype = kv;
    shape.q = q;
    return ChoosePrefill({90, 132}, shape).compute;
  };
  EXPECT_EQ(compute(DType::kBf16, DType::kF16), DType::kBf16);
  EXPECT_EQ(compute(DType::kF16, DType::kBf16), DType::kF16);
  EXPECT_EQ(compute(DType::kFp8E4M3, DType::kBf16), DType::kBf16);
  EXPECT_EQ(compute(DType::kFp8E5M2, DType::kF32), DType::kF16);
  EXPECT_EQ(compute(DType::kNvfp4, DType::kBf16), DType::kBf16);
  EXPECT_EQ(compute(DType::kNvfp4, DType::kF32), DType::kF16);
}

TEST(PrefillChoiceTest, QueriesInFp8NeedAnFp8Cache) {
  PrefillShape shape = SomeShape();
  shape.page_size = 16;
  const PrefillOptions options{.fp8_queries = true};
  EXPECT_THAT(Validate(shape, options).message(), ::testing::StartsWith("fp8_queries:"));
  const PrefillChoice choice = ChoosePrefill({90, 132}, shape, options);
  EXPECT_EQ(LaunchPrefill(choice, shape, {}, {}, nullptr).message(),
            Validate(shape, options).message());
  shape.geometry.dtype = DType::kFp8E5M2;
  EXPECT_TRUE(Validate(shape, options).ok());
  for (const int32_t capability : {80, 90}) {
    EXPECT_EQ(ChoosePrefill({capability, 132}, shape, options).compute, DType::kF16);
  }
}

TEST(PrefillChoiceTest, WeightsInFp8NeedQueriesInFp8) {
  PrefillShape shape = SomeShape();
  shape.page_size = 16;
  shape.geometry.dtype = DType::kFp8E4M3;
  EXPECT_THAT(Validate(shape, {.fp8_weights = true}).message(),
              ::testing::StartsWith("fp8_weights:"));
  const PrefillOptions options{.fp8_queries = true, .fp8_weights = true};
  EXPECT_TRUE(Validate(shape, options).ok());
  EXPECT_TRUE(ChoosePrefill({90, 132}, shape, options).fp8_weights);
  EXPECT_FALSE(ChoosePrefill({80, 132}, shape, options).fp8_weights);
}

TEST(PrefillChoiceTest, RefusesWhatNoKernelSupports) {
  const auto message = [](auto change) {
    PrefillShape shape = SomeShape();
    change(shape);
    return Validate(shape).message();
  };
  using ::testing::HasSubstr;
  EXPECT_EQ(message([](PrefillShape&) {}), "");
  EXPECT_THAT(message([](PrefillShape& s) { s.geometry.key_dim = 112; }),
              HasSubstr("key_dim: 112"));
  EXPECT_THAT(message([](PrefillShape& s) { s.q = DType::kFp8E4M3; }), HasSubstr("q_dtype"));
  EXPECT_THAT(message([](PrefillShape& s) { s.geometry.dtype = DType::kFp8E4M3; }),
              HasSubstr("kv_dtype"));
  EXPECT_THAT(message([](PrefillShape& s) { s.head_begin = 1; }), HasSubstr("head_count"));
  EXPECT_THAT(message([](PrefillShape& s) { s.page_size = 24; }), HasSubstr("page_size: 24"));
}

// Where the parts of the workspace are follows the dimensions of keys and of values.
TEST(PrefillChoiceTest, WorkspaceHoldsKeysAndValuesOfTheirOwnDimensions) {
  const auto bytes = [](int32_t key_dim, int32_t value_dim) {
    PrefillShape shape = SomeShape();
    shape.page_size = 16;
    shape.geometry.key_dim = key_dim;
    shape.geometry.value_dim = value_dim;
    return PrefillWorkspaceBytes(ChoosePrefill({90, 132}, shape), shape, 0, 1024);
  };
  // One more dimension of two heads' keys: 1024 slots of two bytes each, twice.
  EXPECT_EQ(bytes(192, 128) - bytes(128, 128), size_t{64} * 1024 * 2 * 2);
  // Of values: the same, and the partials of eight heads' rows in f32.
  EXPECT_EQ(bytes(192, 192) - bytes(192, 128),
            size_t{64} * (1024 * 2 * 2 + kMaxSplitRows * 8 * sizeof(float)));
}

// A gather, which begins at a multiple of its own size, must also begin a KV tile.
TEST(PrefillChoiceTest, TilesDivideAGather) {
  for (const HeadDims& dims : DimsOf(&HeadDims::prefill_sm80)) {
    PrefillShape shape = SomeShape();
    shape.geometry = GeometryOf(2, dims, DType::kBf16);
    for (const int32_t capability : {80, 90}) {
      const PrefillChoice choice = ChoosePrefill({capability, 132}, shape);
      EXPECT_EQ(choice.kind,
                capability == 90 && dims.prefill_sm90 ? PrefillKind::kWgmma : PrefillKind::kMma);
      EXPECT_EQ(kGatherSlots % choice.keys_per_tile, 0) << NameOf(dims);
    }
  }
}

// Calls f<key dim, value dim>() for every row of the table whose column says true.
template <bool HeadDims::*kFamily, typename F>
void ForDims(F f) {
  const auto try_row = [&]<size_t kRow>(std::integral_constant<size_t, kRow>) {
    constexpr HeadDims kDims = kHeadDims[kRow];
    if constexpr (kDims.*kFamily) f.template operator()<kDims.key_dim, kDims.value_dim>();
  };
  [&]<size_t... kRows>(std::index_sequence<kRows...>) {
    (try_row(std::integral_constant<size_t, kRows>{}), ...);
  }
  (std::make_index_sequence<kHeadDims.size()>{});
}

// The gather loads eight dimensions at a time: of a key 16 bytes, or 8 of FP8, or twice 8 in the
// tail panel; of values whole vectors. Each must lie side by side, and aligned.
TEST(PrefillConfigTest, WhatTheGatherLoadsTogetherLiesSideBySide) {
  for (const HeadDims& dims : kHeadDims) {
    for (const int bytes : {1, 2}) {
      for (int slot = 0; slot < 32; ++slot) {
        for (int d = 0; d < dims.key_dim; d += 8) {
          const int together = bytes == 2 && InKeyTail(d, dims.key_dim, bytes) ? 4 : 8;
          for (int begin = d; begin < d + 8; begin += together) {
            const size_t first = KeyOffset(slot, begin, dims.key_dim, bytes);
            EXPECT_EQ(first % (together * bytes), 0u);
            for (int i = 1; i < together; ++i) {
              EXPECT_EQ(KeyOffset(slot, begin + i, dims.key_dim, bytes), first + i * bytes)
                  << NameOf(dims) << " slot " << slot << " dimension " << begin + i;
            }
          }
        }
        if (slot % kQuadTokens != 0) continue;
        const int vector_dims = ValueVectorDims(bytes);
        for (int d = 0; d < dims.value_dim; d += vector_dims) {
          const size_t first = ValueOffset(slot, d, dims.value_dim, bytes);
          EXPECT_EQ(first % kVectorBytes, 0u);
          for (int i = 0; i < vector_dims; ++i) {
            for (int token = 0; token < kQuadTokens; ++token) {
              EXPECT_EQ(ValueOffset(slot + token, d + i, dims.value_dim, bytes),
                        first + size_t(i * kQuadTokens + token) * bytes);
            }
          }
        }
      }
    }
  }
}

// In shared memory every chunk of a row has one place within the row, and the same chunk of eight
// neighbouring rows, which one instruction reads, eight different places of 128 bytes.
TEST(PrefillConfigTest, ChunksOfMmaRowsAreExchangedWithinTheRowAndWithoutConflicts) {
  for (const HeadDims& dims : kHeadDims) {
    for (const int dim : {dims.key_dim, dims.value_dim}) {
      const int chunks = dim * 2 / 16;
      for (int first_row = 0; first_row < 128; first_row += 8) {
        for (int chunk = 0; chunk < chunks; ++chunk) {
          std::vector<int> places;
          for (int row = first_row; row < first_row + 8; ++row) {
            const int place = MmaPrefillChunk(row, chunk, chunks);
            EXPECT_GE(place, 0);
            EXPECT_LT(place, chunks);
            places.push_back((row * chunks + place) % 8);
          }
          EXPECT_THAT(places, ::testing::UnorderedElementsAre(0, 1, 2, 3, 4, 5, 6, 7))
              << dim << ": chunk " << chunk << " from row " << first_row;
        }
        for (int row = first_row; row < first_row + 8; ++row) {
          std::vector<int> seen(chunks);
          for (int chunk = 0; chunk < chunks; ++chunk) {
            ++seen.at(MmaPrefillChunk(row, chunk, chunks));
          }
          EXPECT_THAT(seen, ::testing::Each(1)) << dim << ": row " << row;
        }
      }
    }
  }
}

// The tiles fit the shared memory of the smallest GPU, and no accumulator is left without a place.
TEST(PrefillConfigTest, TilesOfEveryHeadDimFit) {
  ForDims<&HeadDims::prefill_sm80>([]<int kKeyDim, int kValueDim>() {
    using Traits = MmaPrefillTraits<DType::kBf16, kKeyDim, kValueDim>;
    EXPECT_LE(sizeof(typename Traits::Shared), 99u * 1024) << kKeyDim << " " << kValueDim;
    // Accumulators of scores and output, and the packed weights, in registers of a thread.
    const int registers = Traits::kTiles * (kValueDim / 2 + Traits::kKeys / 2 + Traits::kKeys / 4);
    EXPECT_LE(registers, 224) << kKeyDim << " " << kValueDim;
  });
  ForDims<&HeadDims::prefill_sm90>([]<int kKeyDim, int kValueDim>() {
    const auto check = [](auto traits) {
      using Traits = decltype(traits);
      constexpr size_t kBytes =
          Traits::kQueryStages * sizeof(typename Traits::Queries) +
          Traits::kStages * (sizeof(typename Traits::Keys) + sizeof(typename Traits::Values));
      EXPECT_LE(kBytes + 1024, size_t{kWgmmaPrefillSharedBytes}) << kKeyDim << " " << kValueDim;
      const int registers = Traits::kPaddedValueDim / 2 + Traits::kKeys / 2 + Traits::kKeys / 4;
      EXPECT_LE(registers, 176) << kKeyDim << " " << kValueDim;
    };
    check(WgmmaPrefillTraits<DType::kBf16, DType::kBf16, kKeyDim, kValueDim>{});
    check(WgmmaPrefillTraits<DType::kFp8E4M3, DType::kF16, kKeyDim, kValueDim>{});
  });
}

// Every row tile and head exactly once, every block's chain ends, heaviest first.
TEST(PrefillPlanTest, DealsEveryItemOnce) {
  PrefillPlanShape shape;
  shape.gqa_ratio = 4;
  shape.head_count = 8;
  shape.blocks = 5;
  const std::vector<PrefillEntry> entries = {{0, 700, 0, 0, 700}, {700, 100, 0, 700, 100}};
  std::vector<KeyRange> keys;
  for (const PrefillEntry& entry : entries) {
    for (int32_t row = 0; row < entry.row_count; ++row) keys.push_back({0, row + 1});
  }
  PrefillPlan plan;
  PlanPrefillNewTokens(shape, entries, keys, &plan);
  ASSERT_EQ(plan.passes.size(), 1u);
  EXPECT_TRUE(plan.gathers.empty());
  ASSERT_EQ(plan.items.size(), (6 + 1) * 8u);
  std::vector<int> seen(plan.items.size());
  std::vector<int64_t> loads;
  for (int32_t block = 0; block < plan.passes[0].blocks; ++block) {
    int64_t& load = loads.emplace_back();
    int32_t previous = 1 << 20;
    for (int32_t index = block; index >= 0; index = plan.items[index].next) {
      ++seen[index];
      load += plan.items[index].key_end;
      EXPECT_LE(plan.items[index].key_end, previous + 127);
      previous = plan.items[index].key_end;
    }
  }
  EXPECT_THAT(seen, ::testing::Each(1));
  EXPECT_LE(*std::max_element(loads.begin(), loads.end()),
            *std::min_element(loads.begin(), loads.end()) * 5 / 4);
}

// The splits of an item follow each other and cover it, and no partial is left out.
TEST(PrefillPlanTest, FewItemsAreSplitOverTheirKeys) {
  PrefillPlanShape shape;
  shape.head_count = 2;
  shape.blocks = 13;
  shape.workspace_slots = 4096;
  const std::vector<PrefillEntry> entries = {{0, 130, 0}};
  std::vector<KeyRange> keys(130, {300, 2000});
  keys[129] = {0, 0};
  PrefillPlan plan;
  PlanPrefillContext(shape, entries, keys, &plan);
  ASSERT_EQ(plan.passes.size(), 1u);
  EXPECT_EQ(plan.passes[0].splits, 3);  // two tiles of rows, two heads
  EXPECT_EQ(plan.passes[0].row_count, 130);
  ASSERT_EQ(plan.items.size(), 12u);
  for (int32_t row_begin : {0, 128}) {
    for (int32_t head : {0, 1}) {
      int32_t end = 256;
      for (int32_t split = 0; split < 3; ++split) {
        const auto piece =
            std::find_if(plan.items.begin(), plan.items.end(), [&](const PrefillItem& item) {
              return item.row_begin == row_begin && item.head == head && item.split == split;
            });
        ASSERT_NE(piece, plan.items.end());
        EXPECT_EQ(piece->key_begin, end);
        end = piece->key_end;
      }
      EXPECT_EQ(end, 2000);
    }
  }
  shape.blocks = 7;
  PlanPrefillContext(shape, entries, keys, &plan);
  EXPECT_EQ(plan.passes[0].splits, 1);
}

// How each row of the entry sees its context: [key begin, key end, accumulate] of every item of one
// head that has the row, in the order of passes.
std::vector<std::array<int32_t, 3>> PartsOfRow(const PrefillPlan& plan, int32_t row) {
  std::vector<std::array<int32_t, 3>> parts;
  for (const PrefillPass& pass : plan.passes) {
    for (int32_t i = 0; i < pass.item_count; ++i) {
      const PrefillItem& item = plan.items[pass.item_begin + i];
      const bool has_row = item.row_begin <= row && row < item.row_begin + item.row_count;
      if (item.head == 0 && has_row)
        parts.push_back({item.key_begin, item.key_end, item.accumulate});
    }
  }
  return parts;
}

TEST(PrefillPlanTest, InvariantPartsDoNotDependOnTheBatch) {
  constexpr int64_t kContext = 2 * kInvariantSlots + 700;
  PrefillPlanShape shape;
  shape.blocks = 132;  // more than there are items
  shape.batch_invariant = true;
  const std::vector<KeyRange> keys(600, {0, kContext});
  const auto parts_of = [&](std::vector<PrefillEntry> entries, int32_t row) {
    PrefillPlan plan;
    PlanPrefillContext(shape, entries, keys, &plan);
    for (const PrefillPass& pass : plan.passes) {
      EXPECT_EQ(pass.splits, 1);
      EXPECT_LE(int64_t{pass.gather_count} * kGatherSlots, shape.workspace_slots);
    }
    return PartsOfRow(plan, row);
  };
  shape.workspace_slots = kInvariantSlots;
  const auto alone = parts_of({{.row_begin = 0, .row_count = 200}}, 130);
  EXPECT_THAT(alone, ::testing::ElementsAre(
                         std::array<int32_t, 3>{0, kInvariantSlots, 0},
                         std::array<int32_t, 3>{kInvariantSlots, 2 * kInvariantSlots, 1},
                         std::array<int32_t, 3>{2 * kInvariantSlots, int32_t{kContext}, 1}));
  // Others leave little room in the workspace, and the entry ends where a pass of rows does.
  EXPECT_EQ(parts_of({{0, 100, 0}, {100, 40, 50}, {140, 200, 90}, {340, 9, 9}}, 140 + 130), alone);
  EXPECT_EQ(parts_of({{0, 77, 0}, {77, 140, 90}}, 77 + 130), alone);
  // Where all context fits, nothing is cut but at the same places.
  shape.workspace_slots = 10 * kInvariantSlots;
  EXPECT_EQ(parts_of({{0, 100, 0}, {100, 200, 90}}, 100 + 130), alone);
}

// A workspace that holds no gather makes a plan that no launch takes.
TEST(PrefillPlanTest, AWorkspaceOfNothingEndsAllTheSame) {
  const std::vector<PrefillEntry> entries = {{.row_begin = 0, .row_count = 2}};
  const std::vector<KeyRange> keys = {{0, 300}, {0, 301}};
  for (const int64_t slots : {0, 1, 127}) {
    PrefillPlanShape shape;
    shape.workspace_slots = slots;
    PrefillPlan plan;
    PlanPrefillContext(shape, entries, keys, &plan);
    EXPECT_EQ(plan.passes.size(), 3u);
    PrefillShape of_call;
    of_call.geometry = SquareGeometry(1, 128, DType::kBf16);
    of_call.q_heads = of_call.head_count = 1;
    of_call.page_size = 16;
    PrefillArgs args;
    args.workspace_slots = slots;
    const Status status =
        LaunchPrefill(ChoosePrefillWith({}, of_call), of_call, plan.passes, args, nullptr);
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
    EXPECT_THAT(status.message(), ::testing::StartsWith("workspace_slots:"));
  }
}

TEST(PrefillPlanTest, ContextIsGatheredWithinTheWorkspace) {
  PrefillPlanShape shape;
  shape.blocks = 4;
  shape.workspace_slots = 300;  // two gathers
  const std::vector<PrefillEntry> entries = {{0, 2, 10}, {2, 1, 20}, {3, 1, 30}};
  const std::vector<KeyRange> keys = {{200, 700}, {250, 650}, {0, 0}, {5, 90}};
  PrefillPlan plan;
  PlanPrefillContext(shape, entries, keys, &plan);
  std::vector<int32_t> first_slots;
  for (const PrefillPass& pass : plan.passes) {
    EXPECT_LE(pass.gather_count, 2);
    for (int32_t i = 0; i < pass.item_count; ++i) {
      const PrefillItem& item = plan.items[pass.item_begin + i];
      EXPECT_GE(item.key_row + item.key_begin, 0);
      EXPECT_LE(item.key_row + item.key_limit, pass.gather_count * kGatherSlots);
    }
  }
  for (const PrefillGather& gather : plan.gathers) {
    if (gather.page_table != 10) continue;
    first_slots.push_back(gather.first_slot);
    EXPECT_EQ(gather.slot_begin, 200);
    EXPECT_EQ(gather.slot_end, 700);
  }
  EXPECT_THAT(first_slots, ::testing::ElementsAre(128, 256, 384, 512, 640));
  // Only the first item of a row writes; the row without keys has one, too.
  std::vector<int> writes(4);
  for (const PrefillItem& item : plan.items) {
    for (int32_t i = 0; i < item.row_count; ++i) {
      writes[item.row_begin + i] += item.accumulate == 0;
    }
  }
  EXPECT_THAT(writes, ::testing::Each(1));
}

}  // namespace
}  // namespace tributary::cuda
