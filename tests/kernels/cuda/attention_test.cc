// Attention on the GPU against the float64 reference: every cache type, head dims, GQA ratio,
// number of rows and kind of range, with NaN in dead slots and wild ids in dead page table entries.
#include "kernels/cuda/decode/attention.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <numeric>
#include <string>

#include "kernels/cuda/decode/sm90/wgmma_fp8_attention.h"
#include "kernels/fp8_queries.h"
#include "kernels/lse.h"
#include "kernels/reference.h"
#include "tests/kernels/cuda/gpu_cache.h"
#include "tests/kernels/cuda/sequence.h"
#include "tests/kernels/cuda/slow_copy.h"
#include "tests/support/compare.h"

namespace tributary::cuda {
namespace {

constexpr int32_t kWildPage = 2147480000;

struct Case {
  DType kv = DType::kFp8E4M3;
  HeadDims dims{.key_dim = 128, .value_dim = 128};
  int32_t gqa_ratio = 8;
  int32_t kv_heads = 2;
  int32_t page_size = 16;
  std::vector<Sequence> sequences;
  DType q = DType::kBf16;
  float soft_cap = 0.0f;
  bool scaled = false;
  bool portable = false;
  bool many_sequences = false;  // chooses the kernels for large batches
  bool batch_invariant = false;
  float q_magnitude = 1.0f;
  float sm_scale = -1.0f;    // below 0: that of the head dim
  int32_t cluster_size = 0;  // 0: as chosen
  int32_t blocks = 0;        // 0: as many as the GPU has multiprocessors
  bool draft = false;        // a new token to each row, seen by the rows of its sequence
  bool draft_causal = false;
  bool fp8_queries = false;
};

std::string Describe(const Case& c) {
  return std::string(Name(c.kv)) + " " + NameOf(c.dims) + " GQA ratio " +
         std::to_string(c.gqa_ratio) + " kv_heads " + std::to_string(c.kv_heads) + " page " +
         std::to_string(c.page_size) + " q " + Name(c.q) + " cap " + std::to_string(c.soft_cap) +
         (c.portable ? " portable" : "") + (c.batch_invariant ? " invariant" : "") +
         (c.fp8_queries ? " fp8 queries" : "") +
         (c.draft ? c.draft_causal ? " causal draft" : " draft" : "") + Describe(c.sequences);
}

// One call, set up on the host and on the GPU.
class Call {
 public:
  explicit Call(const Case& c, uint32_t seed = 1) : case_(c), random_(seed) {
    int64_t pages = 1;
    for (const Sequence& s : c.sequences) pages += (s.length + c.page_size - 1) / c.page_size;
    cache_ = std::make_unique<HostCache>(
        CacheShape{GeometryOf(c.kv_heads, c.dims, c.kv), c.page_size, static_cast<int32_t>(pages)},
        c.scaled);
    DealPages(static_cast<int32_t>(pages));
    MakeRows();
  }

  AttentionParams HostParams() {
    AttentionParams p;
    p.kv = cache_->kv();
    p.q = case_.fp8_queries ? static_cast<const void*>(rounded_q_.data()) : q_.data();
    p.q_dtype = case_.fp8_queries ? DType::kF32 : case_.q;
    p.rows = rows_;
    p.q_heads = case_.gqa_ratio * case_.kv_heads;
    p.entries = entries_;
    p.keys = keys_.data();
    p.sm_scale = case_.sm_scale >= 0.0f
                     ? case_.sm_scale
                     : 1.0f / std::sqrt(static_cast<float>(case_.dims.key_dim)) / case_.q_magnitude;
    p.soft_cap = case_.soft_cap;
    return p;
  }

  // Of the new tokens of a draft.
  NewTokensParams HostBlock() {
    NewTokensParams p;
    p.q = q_.data();
    p.q_dtype = case_.q;
    p.k = block_k_.data();
    p.v = block_v_.data();
    p.kv_dtype = DType::kBf16;
    p.rows = rows_;
    p.q_heads = case_.gqa_ratio * case_.kv_heads;
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

  // Makes the other call's only sequence the same as this one's first: keys, values and queries.
  void CopyFirstSequenceTo(Call* other) {
    for (size_t i = 0; i < other->tables_[0].size(); ++i) {
      const int32_t from = tables_[0][i];
      const int32_t to = other->tables_[0][i];
      if (from == kWildPage) break;
      std::memcpy(&other->cache_->bytes()[size_t(to) * PageBytes(cache_->kv())],
                  &cache_->bytes()[size_t(from) * PageBytes(cache_->kv())],
                  PageBytes(cache_->kv()));
    }
    std::copy_n(q_.begin(), other->q_.size(), other->q_.begin());
    other->RoundQueries();
  }

  void SetQuery(size_t element, float value) {
    StoreElement(case_.q, q_.data(), element, value);
    RoundQueries();
  }

  // Makes all of a key's elements the same.
  void FillKey(size_t sequence, int64_t slot, int32_t head, float value) {
    const PagedKv& kv = cache_->kv();
    const int32_t page = tables_[sequence][slot / kv.page_size];
    cache_->FillKey(page, head, static_cast<int32_t>(slot % kv.page_size), value);
  }

  void PoisonKey(size_t sequence, int64_t slot, int32_t head) {
    const PagedKv& kv = cache_->kv();
    const int32_t page = tables_[sequence][slot / kv.page_size];
    cache_->PoisonKey(page, head, static_cast<int32_t>(slot % kv.page_size), 0, std::nanf(""));
  }
  // One dimension, another one for each slot.
  void PoisonValue(size_t sequence, int64_t slot, int32_t head, float value) {
    const PagedKv& kv = cache_->kv();
    const int32_t page = tables_[sequence][slot / kv.page_size];
    cache_->PoisonValue(page, head, static_cast<int32_t>(slot % kv.page_size),
                        static_cast<size_t>(slot % kv.geometry.value_dim), value);
  }
  // The same of a draft's new token: the value of one KV head, the key of another one.
  void PoisonToken(int32_t token, float value) {
    const auto row_of = [&](int32_t head, int32_t dim) {
      return (size_t(token) * case_.kv_heads + head) * dim;
    };
    StoreElement(DType::kBf16, block_v_.data(),
                 row_of(0, case_.dims.value_dim) + size_t(token % case_.dims.value_dim), value);
    StoreElement(DType::kBf16, block_k_.data(), row_of(case_.kv_heads - 1, case_.dims.key_dim) + 3,
                 value);
  }

  // Buffers of a captured graph: as large as any call of `room`'s sizes and shape needs.
  struct Device {
    Device(const Call& room, const KernelChoice& chosen, const DecodePlanShape& planned,
           const AttentionShape& shaped)
        : choice(chosen),
          plan_shape(planned),
          shape(shaped),
          bounds(BoundPlan(plan_shape, static_cast<int64_t>(room.entries_.size()), room.rows_,
                           room.TotalKeys())),
          items(bounds.items),
          keys(room.keys_.size()),
          tables(room.page_tables_.size()),
          cache(room.cache_->bytes().size()),
          q(room.q_.size()),
          k_scale(room.cache_->k_scale().size()),
          v_scale(room.cache_->v_scale().size()),
          o(size_t(room.rows_) * shape.q_heads * shape.geometry.value_dim),
          lse(size_t(room.rows_) * shape.q_heads),
          partial_o(size_t(bounds.partials) * choice.tile_rows * shape.geometry.value_dim),
          partial_lse(size_t(bounds.partials) * choice.tile_rows),
          arrivals(bounds.arrivals),
          block_keys(room.block_row_keys_),
          block_k(room.block_k_),
          block_v(room.block_v_) {
      arrivals.Fill(0);
    }

    KernelChoice choice;
    DecodePlanShape plan_shape;
    AttentionShape shape;
    PlanBounds bounds;
    DeviceArray<WorkItem> items;
    DeviceArray<RowKeys> keys;
    DeviceArray<int32_t> tables;
    DeviceArray<std::byte> cache;
    DeviceArray<std::byte> q;
    DeviceArray<float> k_scale;
    DeviceArray<float> v_scale;
    DeviceArray<float> o;
    DeviceArray<float> lse;
    DeviceArray<float> partial_o;
    DeviceArray<float> partial_lse;
    DeviceArray<uint64_t> arrivals;
    DeviceArray<RowKeys> block_keys;
    DeviceArray<std::byte> block_k;
    DeviceArray<std::byte> block_v;
  };

  std::unique_ptr<Device> MakeDevice() {
    DeviceProperties device;
    EXPECT_TRUE(QueryDevice(0, &device).ok());
    if (case_.blocks > 0) device = {device.compute_capability, case_.blocks};
    AttentionShape shape{GeometryOf(case_.kv_heads, case_.dims, case_.kv),
                         case_.gqa_ratio * case_.kv_heads,
                         case_.page_size,
                         1,
                         static_cast<int32_t>(case_.sequences.size()),
                         TotalKeys()};
    for (const Sequence& s : case_.sequences) shape.max_rows = std::max(shape.max_rows, s.rows);
    if (case_.many_sequences) shape.sequences = 1000;
    KernelChoice choice = ChooseKernel(device, shape,
                                       {.portable = case_.portable,
                                        .batch_invariant = case_.batch_invariant,
                                        .fp8_queries = case_.fp8_queries});
    if (case_.cluster_size > 0 && choice.begins_early) choice.cluster_size = case_.cluster_size;
    return std::make_unique<Device>(*this, choice, DecodePlanShapeFor(choice, shape, device),
                                    shape);
  }

  // Brings this call to buffers that another of the same shape may have used, and clears the
  // outputs.
  void Upload(Device* d) {
    Plan plan;
    PlanAttention(d->plan_shape, plan_entries_, keys_, &plan);
    ASSERT_LE(static_cast<int64_t>(plan.items.size()), d->bounds.items);
    ASSERT_LE(plan.partials, d->bounds.partials);
    ASSERT_LE(plan.arrivals, d->bounds.arrivals);
    d->items.Set(plan.items);
    d->keys.Set(plan.keys);
    d->tables.Set(page_tables_);
    d->cache.Set(Reorder(cache_->kv(), cache_->bytes(), Direction::kToGpu));
    d->q.Set(q_);
    d->k_scale.Set(cache_->k_scale());
    d->v_scale.Set(cache_->v_scale());
    d->o.Fill(0xff);
    d->lse.Fill(0xff);
    d->partial_o.Fill(0xff);
    d->partial_lse.Fill(0xff);
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  }

  // Makes what the strips with the last `tokens` slots of every sequence hold in the buffers NaN.
  void PoisonEnds(int32_t tokens, Device* d) {
    const PagedKv& kv = cache_->kv();
    const KvGeometry& g = kv.geometry;
    std::vector<std::byte> bytes = d->cache.Get();
    const auto poison = [&](size_t at, size_t count) {
      std::fill_n(bytes.begin() + static_cast<ptrdiff_t>(at), count, std::byte{0xff});
    };
    for (size_t i = 0; i < case_.sequences.size(); ++i) {
      const int64_t length = case_.sequences[i].length;
      for (int64_t slot = std::max<int64_t>(0, length - tokens); slot < length; ++slot) {
        const size_t page = size_t(tables_[i][slot / kv.page_size]) * PageBytes(kv);
        const size_t strip = static_cast<size_t>(slot % kv.page_size) / kStripSlots;
        const size_t key_bytes = KeyPlaneBytes(g, kStripSlots);
        const size_t value_bytes = ValuePlaneBytes(g, kStripSlots);
        for (int32_t head = 0; head < g.kv_heads; ++head) {
          poison(page + KeyPlaneOffset(g, kv.page_size, head) + strip * key_bytes, key_bytes);
          poison(page + ValuePlaneOffset(g, kv.page_size, head) + strip * value_bytes, value_bytes);
        }
      }
    }
    d->cache.Set(bytes);
  }

  Status Launch(const Device& d, cudaStream_t stream, int32_t late_strips = 0) {
    AttentionArgs args;
    args.items = d.items.data();
    args.keys = d.keys.data();
    args.page_tables = d.tables.data();
    args.cache = d.cache.data();
    args.k_scale = case_.scaled ? d.k_scale.data() : nullptr;
    args.v_scale = case_.scaled ? d.v_scale.data() : nullptr;
    args.q = d.q.data();
    args.q_dtype = case_.q;
    args.q_heads = d.shape.q_heads;
    args.kv_heads = case_.kv_heads;
    args.page_shift = std::countr_zero(static_cast<uint32_t>(case_.page_size));
    const AttentionParams p = HostParams();
    args.sm_scale = p.sm_scale;
    args.soft_cap = p.soft_cap;
    args.o = d.o.data();
    args.lse = d.lse.data();
    args.partial_o = d.partial_o.data();
    args.partial_lse = d.partial_lse.data();
    args.arrivals = d.arrivals.data();
    args.late_strips = late_strips;
    if (case_.draft) {
      EXPECT_TRUE(MayAttendBlock(d.choice, case_.q, DType::kBf16, case_.soft_cap));
      args.block = {d.block_keys.data(), d.block_k.data(), d.block_v.data(), 0, case_.kv_heads};
    }
    return LaunchAttention(d.choice, d.shape, args, d.plan_shape.blocks, stream);
  }

  void Run(std::vector<float>* o, std::vector<float>* lse, int launches = 1) {
    const std::unique_ptr<Device> device = MakeDevice();
    ASSERT_NO_FATAL_FAILURE(Upload(device.get()));
    for (int i = 0; i < launches; ++i) {
      const Status status = Launch(*device, nullptr);
      ASSERT_TRUE(status.ok()) << status.message();
    }
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    *o = device->o.Get();
    *lse = device->lse.Get();
    EXPECT_THAT(device->arrivals.Get(), ::testing::Each(0u));
  }

 private:
  int64_t TotalKeys() const {
    int64_t keys = 0;
    for (const Sequence& s : case_.sequences) keys += s.length;
    return keys;
  }

  void DealPages(int32_t pages) {
    std::vector<int32_t> free(pages);
    std::iota(free.begin(), free.end(), 0);
    std::shuffle(free.begin(), free.end(), random_);
    for (const Sequence& s : case_.sequences) {
      std::vector<int32_t> table;
      for (int64_t slot = 0; slot < s.length; slot += case_.page_size) {
        table.push_back(free.back());
        free.pop_back();
      }
      cache_->Fill(table, s.length, random_);
      // Entries past the last key are never read.
      table.insert(table.end(), 5, kWildPage);
      tables_.push_back(table);
    }
  }

  void MakeRows() {
    for (size_t i = 0; i < case_.sequences.size(); ++i) {
      const Sequence& s = case_.sequences[i];
      entries_.push_back({rows_, s.rows, tables_[i]});
      plan_entries_.push_back({rows_, s.rows, static_cast<int32_t>(page_tables_.size())});
      page_tables_.insert(page_tables_.end(), tables_[i].begin(), tables_[i].end());
      for (int32_t row = 0; row < s.rows; ++row) keys_.push_back(RangeOfRow(s, row));
      if (case_.draft) AddBlock(s);
      rows_ += s.rows;
    }
    const size_t elements = size_t(rows_) * case_.gqa_ratio * case_.kv_heads * case_.dims.key_dim;
    q_.resize(elements * SizeOf(case_.q));
    FillNormal(case_.q, case_.q_magnitude, &q_);
    RoundQueries();
    if (!case_.draft) return;
    const auto fill = [&](int32_t dim, std::vector<std::byte>* tokens) {
      tokens->resize(size_t(rows_) * case_.kv_heads * dim * SizeOf(DType::kBf16));
      FillNormal(DType::kBf16, 1.0f, tokens);
    };
    fill(case_.dims.key_dim, &block_k_);
    fill(case_.dims.value_dim, &block_v_);
  }

  // For the context; a draft's block meets queries as they are.
  void RoundQueries() {
    if (!case_.fp8_queries) return;
    rounded_q_.resize(q_.size() / SizeOf(case_.q));
    RoundQueriesToFp8(case_.q, case_.dims.key_dim, q_, rounded_q_.data());
  }

  void AddBlock(const Sequence& s) {
    block_entries_.push_back({.row_begin = rows_, .row_count = s.rows});
    for (int32_t row = 0; row < s.rows; ++row) {
      const int32_t end = case_.draft_causal ? row + 1 : s.rows;
      block_keys_.push_back({0, end});
      block_row_keys_.push_back({rows_, rows_ + end});
    }
  }

  void FillNormal(DType type, float deviation, std::vector<std::byte>* bytes) {
    std::normal_distribution<float> normal(0.0f, deviation);
    for (size_t i = 0; i < bytes->size() / SizeOf(type); ++i) {
      StoreElement(type, bytes->data(), i, normal(random_));
    }
  }

  Case case_;
  std::mt19937 random_;
  std::unique_ptr<HostCache> cache_;
  std::vector<std::vector<int32_t>> tables_;
  std::vector<int32_t> page_tables_;
  std::vector<AttentionEntry> entries_;
  std::vector<PlanEntry> plan_entries_;
  std::vector<KeyRange> keys_;
  std::vector<std::byte> q_;
  std::vector<float> rounded_q_;
  std::vector<NewTokensEntry> block_entries_;
  std::vector<KeyRange> block_keys_;     // as the reference takes them, from the entry's first on
  std::vector<RowKeys> block_row_keys_;  // and as the kernel does
  std::vector<std::byte> block_k_;
  std::vector<std::byte> block_v_;
  int32_t rows_ = 0;
};

// Values are about 1 in size and averaged, so an absolute bound is the meaningful one. What f16
// products lose is the rounding of the weights; bf16 products lose eight times as much, and round a
// query that came as f16 or f32.
double Tolerance(const Case& c) {
  if (c.draft) return 1e-2;  // products of the block are of bf16
  if (c.kv != DType::kBf16) return 2e-3;
  return c.q == DType::kBf16 ? 1e-2 : 2e-2;
}

void ExpectClose(const std::vector<float>& actual, const std::vector<double>& expected,
                 double tolerance, const char* what) {
  const auto count = static_cast<int64_t>(expected.size());
  EXPECT_TRUE(test::AllClose(actual, expected, {.absolute = tolerance}, {count})) << what;
}

// The same of what is finite, which must be what is expected to be finite.
void ExpectCloseWhereFinite(const std::vector<float>& actual, const std::vector<double>& expected,
                            double tolerance, const char* what) {
  ASSERT_EQ(actual.size(), expected.size());
  for (size_t i = 0; i < actual.size(); ++i) {
    ASSERT_EQ(std::isfinite(actual[i]), std::isfinite(expected[i]))
        << what << "[" << i << "] is " << actual[i] << ", expected " << expected[i];
    if (!std::isfinite(expected[i])) continue;
    ASSERT_NEAR(actual[i], expected[i], tolerance) << what << "[" << i << "]";
  }
}

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

void ExpectMatchesReference(const Case& c, Call& call) {
  SCOPED_TRACE(Describe(c));
  std::vector<float> o, lse;
  ASSERT_NO_FATAL_FAILURE(call.Run(&o, &lse));
  const ReferenceResult expected = ExpectedOf(c, call);
  ExpectClose(o, expected.o, Tolerance(c), "o");
  ExpectClose(lse, expected.lse, Tolerance(c), "lse");
}
void ExpectMatchesReference(const Case& c) {
  Call call(c);
  ExpectMatchesReference(c, call);
}

void ExpectMatchesWhereFinite(const Case& c, Call& call) {
  SCOPED_TRACE(Describe(c));
  std::vector<float> o, lse;
  ASSERT_NO_FATAL_FAILURE(call.Run(&o, &lse));
  const ReferenceResult expected = ExpectedOf(c, call);
  ExpectCloseWhereFinite(o, expected.o, Tolerance(c), "o");
  ExpectCloseWhereFinite(lse, expected.lse, Tolerance(c), "lse");
}

class EveryCacheType : public ::testing::TestWithParam<std::tuple<DType, HeadDims, bool>> {
 protected:
  Case Base() const {
    Case c;
    c.kv = std::get<0>(GetParam());
    c.dims = std::get<1>(GetParam());
    c.portable = std::get<2>(GetParam());
    return c;
  }
};

TEST_P(EveryCacheType, LengthsAroundEveryEdge) {
  TRIBUTARY_SKIP_WITHOUT_GPU();
  Case c = Base();
  c.many_sequences = true;
  for (int64_t length : {0, 1, 3, 15, 16, 17, 31, 63, 64, 65, 255, 256, 257, 600}) {
    c.sequences.push_back({length});
  }
  ExpectMatchesReference(c);
}

TEST_P(EveryCacheType, GqaRatiosAndRows) {
  TRIBUTARY_SKIP_WITHOUT_GPU();
  for (int32_t gqa_ratio : {1, 3, 4, 8, 16}) {
    for (int32_t rows : {1, 2, 4, 16, 40}) {
      Case c = Base();
      c.gqa_ratio = gqa_ratio;
      c.sequences = {{rows + 70, rows}, {rows / 2, rows}, {300, rows}};
      ExpectMatchesReference(c);
    }
  }
}

TEST_P(EveryCacheType, PageSizesScalesSoftCapAndQueryTypes) {
  TRIBUTARY_SKIP_WITHOUT_GPU();
  for (int32_t page_size : {16, 32, 64, 128}) {
    for (DType q : {DType::kBf16, DType::kF16, DType::kF32}) {
      for (int32_t rows : {1, 12}) {
        Case c = Base();
        c.page_size = page_size;
        c.q = q;
        c.scaled = true;
        c.soft_cap = page_size == 32 ? 2.0f : 0.0f;
        c.sequences = {{200, rows}, {1000, rows}};
        ExpectMatchesReference(c);
      }
    }
  }
}

// Logits far below the cap keep their precision.
TEST_P(EveryCacheType, SoftCapsOfAnySize) {
  TRIBUTARY_SKIP_WITHOUT_GPU();
  for (const float soft_cap : {1e-40f, 1e-30f, 65.0f, 1e6f, 1e8f, 1e30f, 3e38f}) {
    for (const int32_t rows : {1, 12}) {
      Case c = Base();
      c.soft_cap = soft_cap;
      c.sequences = {{200, rows}, {1000, rows}};
      ExpectMatchesReference(c);
    }
  }
}

TEST_P(EveryCacheType, WindowsAndBlocksThatSeeEachOther) {
  TRIBUTARY_SKIP_WITHOUT_GPU();
  for (int64_t window : {0, 5, 16, 100}) {
    for (int32_t rows : {1, 7, 16}) {
      Case c = Base();
      c.gqa_ratio = 4;
      c.sequences = {{500, rows, window}, {90, rows, window, false}, {333, rows, -1, false}};
      ExpectMatchesReference(c);
    }
  }
}

// Keys and values that are not finite, where some rows see them and others do not: the new tokens
// of a causal call, and both edges of its windows. Each poisons one KV head.
TEST_P(EveryCacheType, WhatIsNotFiniteStaysWithTheRowsThatSeeIt) {
  TRIBUTARY_SKIP_WITHOUT_GPU();
  for (const int32_t gqa_ratio : {4, 16}) {
    for (const int32_t rows : {3, 8}) {
      for (const float value : {std::nanf(""), -INFINITY}) {
        Case c = Base();
        // What is quantised stores its largest number instead.
        if (!IsUnscaled(c.kv) && std::isinf(value)) continue;
        c.gqa_ratio = gqa_ratio;
        c.scaled = true;
        c.sequences = {{220, rows}, {300, rows, 100}, {192, rows, 30, false}};
        Call call(c);
        for (size_t i = 0; i < c.sequences.size(); ++i) {
          const Sequence& s = c.sequences[i];
          const int64_t first = s.length - s.rows;
          for (const int64_t slot :
               {s.length - 1, first + 1, first - std::max<int64_t>(s.window, 0)}) {
            call.PoisonValue(i, slot, /*head=*/0, value);
            call.PoisonKey(i, slot, /*head=*/1);
          }
        }
        ExpectMatchesWhereFinite(c, call);
      }
    }
  }
}

TEST_P(EveryCacheType, LongRowsAreSplitAndMerged) {
  TRIBUTARY_SKIP_WITHOUT_GPU();
  for (bool batch_invariant : {false, true}) {
    for (int32_t rows : {1, 8, 40}) {
      Case c = Base();
      c.batch_invariant = batch_invariant;
      c.many_sequences = rows == 8;
      c.gqa_ratio = 2;
      c.kv_heads = 1;
      c.sequences = {{5000, rows}, {40, rows}, {0, rows}, {2100, rows, 1500}};
      c.blocks = 7;
      ExpectMatchesReference(c);
    }
  }
}

// The reference sees queries that are rounded alike, so that the bound stays what it is.
TEST_P(EveryCacheType, QueriesInFp8OnRequest) {
  Case c = Base();
  c.fp8_queries = true;
  if (!IsFp8(c.kv)) {
    const AttentionShape shape{GeometryOf(2, c.dims, c.kv), 8, 16, 1};
    const KernelChoice choice = ChooseKernel({90, 132}, shape, {.fp8_queries = true});
    const Status status = LaunchAttention(choice, shape, {.q_heads = 8, .kv_heads = 2}, 1, nullptr);
    EXPECT_EQ(status.code(), StatusCode::kFailedPrecondition);
    EXPECT_THAT(status.message(), ::testing::StartsWith("fp8_queries:"));
    return;
  }
  TRIBUTARY_SKIP_WITHOUT_GPU();
  c.scaled = true;
  c.gqa_ratio = 4;
  c.blocks = 7;
  for (const int32_t rows : {1, 3, 7, 16}) {
    for (const DType q : {DType::kBf16, DType::kF16, DType::kF32}) {
      for (const float soft_cap : {0.0f, 2.0f}) {
        c.q = q;
        c.soft_cap = soft_cap;
        c.q_magnitude = q == DType::kF32 ? 1e9f : 1.0f;
        c.sequences = {{300, rows}, {17, rows}, {0, rows}, {2000, rows, 1500}};
        ExpectMatchesReference(c);
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    Attention, EveryCacheType,
    ::testing::Combine(::testing::Values(DType::kFp8E4M3, DType::kFp8E5M2, DType::kBf16,
                                         DType::kF16, DType::kNvfp4),
                       ::testing::ValuesIn(DimsOf(&HeadDims::decode_sm80)), ::testing::Bool()),
    [](const auto& param) {
      return std::string(Name(std::get<0>(param.param))) + "_" + NameOf(std::get<1>(param.param)) +
             (std::get<2>(param.param) ? "_portable" : "");
    });

// A type of cache and head dims that kWgmmaFp8 is built for.
struct OfWgmmaFp8 {
  DType kv;
  HeadDims dims;
};
std::vector<OfWgmmaFp8> AllOfWgmmaFp8() {
  std::vector<OfWgmmaFp8> all;
  for (const DType kv : {DType::kFp8E4M3, DType::kFp8E5M2, DType::kNvfp4}) {
    for (const HeadDims& dims : kHeadDims) {
      if (HasWgmmaFp8(kv, dims.key_dim, dims.value_dim)) all.push_back({kv, dims});
    }
  }
  return all;
}

TEST(AttentionTest, QueriesOfAnySizeNeitherOverflowNorVanish) {
  TRIBUTARY_SKIP_WITHOUT_GPU();
  for (float magnitude : {1e-20f, 1e-6f, 1e6f, 1e20f}) {
    for (bool fp8_queries : {false, true}) {
      Case c;
      c.q_magnitude = magnitude;
      c.fp8_queries = fp8_queries;
      c.sequences = {{100}, {50, 5}};
      ExpectMatchesReference(c);
    }
  }
}

// FP8 has no infinity: rounding must not make a number of it.
TEST(AttentionTest, QueriesThatAreNotFiniteStaySoInFp8) {
  TRIBUTARY_SKIP_WITHOUT_GPU();
  for (const float value : {std::nanf(""), INFINITY, -INFINITY}) {
    for (const int32_t rows : {1, 4, 16}) {
      Case c{.gqa_ratio = 4, .fp8_queries = true};
      c.sequences = {{100, rows}, {300, rows}};
      Call call(c);
      // Of the first row of the second sequence, the second head.
      const int32_t heads = c.gqa_ratio * c.kv_heads;
      call.SetQuery((size_t(rows) * heads + 1) * c.dims.key_dim + 7, value);
      SCOPED_TRACE(value);
      ExpectMatchesReference(c, call);
    }
  }
}

// Weights are taken against a reference, which is raised when a logit outgrows it: here again and
// again along a row, by little, by much, and so that weights against the old one overflow.
TEST(AttentionTest, LogitsThatGrowAlongTheRow) {
  TRIBUTARY_SKIP_WITHOUT_GPU();
  for (DType kv : {DType::kFp8E4M3, DType::kBf16, DType::kNvfp4}) {
    for (const HeadDims& dims : DimsOf(&HeadDims::decode_sm80)) {
      for (int32_t rows : {1, 8, 16}) {
        Case c;
        c.kv = kv;
        c.dims = dims;
        c.gqa_ratio = 4;
        c.sequences = {{3000, rows, -1, false}};
        Call call(c);
        for (int32_t head = 0; head < c.kv_heads; ++head) {
          call.FillKey(0, 301, head, 4.0f);
          call.FillKey(0, 777, head, -16.0f);
          call.FillKey(0, 1400, head, 64.0f);
          call.FillKey(0, 2222, head, -256.0f);
        }
        ExpectMatchesReference(c, call);
      }
    }
  }
}

// From the second tile on all logits of a row are one and the same: small, large, or so far below
// the first ones that they hardly count, each of either sign, as queries have it.
TEST(AttentionTest, LogitsThatStayLarge) {
  TRIBUTARY_SKIP_WITHOUT_GPU();
  std::vector<OfWgmmaFp8> caches = AllOfWgmmaFp8();
  caches.push_back({DType::kBf16, {.key_dim = 128, .value_dim = 128}});
  for (const auto& [kv, dims] : caches) {
    for (const float value : {4.0f, -8.0f, 12.0f, -16.0f, 24.0f}) {
      for (const bool fp8_queries : {false, true}) {
        if (fp8_queries && !IsFp8(kv)) continue;
        Case c;
        c.kv = kv;
        c.dims = dims;
        c.gqa_ratio = 4;
        c.fp8_queries = fp8_queries;
        c.sequences = {{1000, 16, -1, false}};
        Call call(c);
        for (int32_t head = 0; head < c.kv_heads; ++head) {
          for (int64_t slot = 64; slot < 1000; ++slot) call.FillKey(0, slot, head, value);
        }
        SCOPED_TRACE(value);
        ExpectMatchesReference(c, call);
      }
    }
  }
}

// Jobs of 16, 26, 66 and 132 splits: as many as a thread block collects while it waits, as are
// known one by one, and more.
TEST(AttentionTest, JobsOfManySplits) {
  TRIBUTARY_SKIP_WITHOUT_GPU();
  for (const int32_t kv_heads : {8, 5, 2, 1}) {
    for (const auto& [kv, dims] : AllOfWgmmaFp8()) {
      if (kv == DType::kFp8E5M2) continue;
      for (const int32_t rows : {16, 13}) {  // 13: 52 packed rows of a tile of 64
        Case c{.kv = kv, .dims = dims, .gqa_ratio = 4, .kv_heads = kv_heads, .cluster_size = 1};
        c.blocks = 132;
        c.sequences = {{20000, rows, -1, false}};
        ExpectMatchesReference(c);
      }
    }
  }
}

TEST(AttentionTest, LongRowsAreAsAccurateAsShortOnes) {
  TRIBUTARY_SKIP_WITHOUT_GPU();
  for (int64_t length : {1024, 131072}) {
    for (const auto& [kv, rows] : {std::pair{DType::kFp8E4M3, 1},
                                   {DType::kFp8E4M3, 9},
                                   {DType::kNvfp4, 1},
                                   {DType::kNvfp4, 9}}) {
      Case c;
      c.kv = kv;
      c.gqa_ratio = 4;
      c.kv_heads = 1;
      c.sequences = {{length, rows}};
      ExpectMatchesReference(c);
      if (!IsFp8(kv)) continue;
      c.dims = {.key_dim = 64, .value_dim = 64};
      ExpectMatchesReference(c);
    }
  }
}

// Few enough thread blocks make them long: on sm_90 a kernel with query tiles of 32 then takes
// them.
TEST(AttentionTest, SixteenPackedRowsOfFp8InLongCalls) {
  TRIBUTARY_SKIP_WITHOUT_GPU();
  DeviceProperties device;
  ASSERT_TRUE(QueryDevice(0, &device).ok());
  const KernelKind expected =
      device.compute_capability == 90 ? KernelKind::kWgmma : KernelKind::kMma;
  for (const DType kv : {DType::kFp8E4M3, DType::kFp8E5M2}) {
    for (const int32_t head_dim : {128, 256}) {
      for (const int32_t rows : {3, 4}) {
        for (const bool fp8_queries : {false, true}) {
          Case c{.kv = kv,
                 .dims = {head_dim, head_dim},
                 .gqa_ratio = 4,
                 .kv_heads = 1,
                 .scaled = true};
          c.blocks = 2;
          c.fp8_queries = fp8_queries;
          c.sequences = {{9000, rows}, {1, rows}, {1000, rows}};
          Call call(c);
          EXPECT_EQ(call.MakeDevice()->choice.kind, expected);
          ExpectMatchesReference(c, call);
        }
      }
    }
  }
}

TEST(AttentionTest, RepeatedLaunchesGiveTheSameBits) {
  TRIBUTARY_SKIP_WITHOUT_GPU();
  std::vector<std::pair<OfWgmmaFp8, int32_t>> calls;
  for (const OfWgmmaFp8& cache : AllOfWgmmaFp8()) {
    for (const int32_t rows : {1, 16}) calls.emplace_back(cache, rows);
  }
  for (const auto& [cache, rows] : calls) {
    Case c;
    c.kv = cache.kv;
    c.dims = cache.dims;
    c.sequences = {{9000, rows}, {17, rows}, {3000, rows}};
    Call call(c);
    std::vector<float> o, lse, o_again, lse_again;
    ASSERT_NO_FATAL_FAILURE(call.Run(&o, &lse));
    ASSERT_NO_FATAL_FAILURE(call.Run(&o_again, &lse_again, 20));
    EXPECT_EQ(o, o_again);
    EXPECT_EQ(lse, lse_again);
  }
}

TEST(AttentionTest, ClustersOfEverySizeSplitAndMerge) {
  TRIBUTARY_SKIP_WITHOUT_GPU();
  for (int32_t cluster_size : {1, 2, 4, 8}) {
    for (int32_t rows : {1, 2, 3, 16}) {
      for (int32_t blocks : {16, 132}) {
        for (const auto& [kv, dims] : AllOfWgmmaFp8()) {
          Case c;
          c.kv = kv;
          c.dims = dims;
          c.cluster_size = cluster_size;
          c.blocks = blocks;
          c.sequences = {{9000, rows}, {17, rows}, {0, rows}, {3000, rows, 700}};
          ExpectMatchesReference(c);
        }
      }
    }
  }
}

// What a model host does step after step: the graph stays, the plan, the tables and the data change
// in place. The batch is padded: sequences without keys keep their place.
TEST(AttentionTest, AReplayedGraphRunsTheNewPlan) {
  TRIBUTARY_SKIP_WITHOUT_GPU();
  for (int32_t rows : {1, 16}) {
    Case large;
    large.sequences = {{5000, rows}, {4000, rows}, {3000, rows}, {2000, rows}};
    Call room(large);
    const auto device = room.MakeDevice();
    ASSERT_NO_FATAL_FAILURE(room.Upload(device.get()));
    cudaStream_t stream = nullptr;
    ASSERT_EQ(cudaStreamCreate(&stream), cudaSuccess);
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t exec = nullptr;
    ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), cudaSuccess);
    // Several layers of the step: each begins before the one ahead has ended.
    for (int layer = 0; layer < 3; ++layer) ASSERT_TRUE(room.Launch(*device, stream).ok());
    ASSERT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
    ASSERT_EQ(cudaGraphInstantiate(&exec, graph, 0), cudaSuccess);
    for (const std::vector<int64_t>& lengths : {std::vector<int64_t>{5000, 4000, 3000, 2000},
                                                {17, 4000, 0, 0},
                                                {0, 0, 0, 0},
                                                {1, 2, 2999, 1000}}) {
      Case c = large;
      for (size_t i = 0; i < lengths.size(); ++i) c.sequences[i].length = lengths[i];
      SCOPED_TRACE(Describe(c));
      Call call(c, /*seed=*/static_cast<uint32_t>(7 + lengths[0]));
      ASSERT_NO_FATAL_FAILURE(call.Upload(device.get()));
      ASSERT_EQ(cudaGraphLaunch(exec, stream), cudaSuccess);
      ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
      const ReferenceResult expected = ReferenceAttention(call.HostParams());
      ExpectClose(device->o.Get(), expected.o, Tolerance(c), "o");
      ExpectClose(device->lse.Get(), expected.lse, Tolerance(c), "lse");
      EXPECT_THAT(device->arrivals.Get(), ::testing::Each(0u));
    }
    cudaGraphExecDestroy(exec);
    cudaGraphDestroy(graph);
    cudaStreamDestroy(stream);
  }
}

// Every key has the same weight, those that are masked none.
TEST_P(EveryCacheType, AScaleOfNothingWeighsKeysAlike) {
  TRIBUTARY_SKIP_WITHOUT_GPU();
  for (const float sm_scale : {0.0f, 1e-38f, 1e-30f}) {
    for (const int32_t rows : {1, 12}) {
      for (const bool fp8_queries : {false, true}) {
        Case c = Base();
        if (fp8_queries && !IsFp8(c.kv)) continue;
        c.sm_scale = sm_scale;
        c.fp8_queries = fp8_queries;
        c.sequences = {{70, rows}, {300, rows, 100}, {0, rows}, {1500, rows}};
        c.blocks = 7;
        ExpectMatchesReference(c);
      }
    }
  }
}

// A launch without items lets nothing behind it overtake the launch ahead.
TEST(AttentionTest, NothingToDoStillWaitsForTheLaunchAhead) {
  TRIBUTARY_SKIP_WITHOUT_GPU();
  constexpr size_t kBytes = 4096;
  const DeviceArray<std::byte> written(std::vector<std::byte>(kBytes, std::byte{1}));
  DeviceArray<std::byte> seen(kBytes);
  DeviceArray<std::byte> copied(kBytes);
  cudaStream_t stream = nullptr;
  ASSERT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
  for (const DType kv : {DType::kFp8E4M3, DType::kBf16}) {
    for (const int32_t rows : {1, 16}) {
      for (const bool portable : {false, true}) {
        Case c{.kv = kv, .sequences = {{40, rows}}, .portable = portable};
        SCOPED_TRACE(Describe(c));
        Call call(c);
        const auto device = call.MakeDevice();
        ASSERT_NO_FATAL_FAILURE(call.Upload(device.get()));
        Plan idle;
        PlanAttention(device->plan_shape, {}, {}, &idle);
        device->items.Set(idle.items);
        for (int launch = 0; launch < 3; ++launch) {
          seen.Fill(0);
          copied.Fill(0);
          ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
          ASSERT_EQ(
              LaunchSlowCopy(written.data(), seen.data(), kBytes, /*microseconds=*/2000, stream),
              cudaSuccess);
          const Status status = call.Launch(*device, stream);
          ASSERT_TRUE(status.ok()) << status.message();
          ASSERT_EQ(LaunchSlowCopy(seen.data(), copied.data(), kBytes, /*microseconds=*/0, stream),
                    cudaSuccess);
          ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
          EXPECT_THAT(copied.Get(), ::testing::Each(std::byte{1}));
        }
      }
    }
  }
  cudaStreamDestroy(stream);
}

// Attention begins while the launch ahead still writes the end of every sequence.
TEST(AttentionTest, WaitsForWhatTheLaunchAheadAppends) {
  TRIBUTARY_SKIP_WITHOUT_GPU();
  for (const int32_t tokens : {1, 2, 17}) {
    for (const auto& [kv, many_sequences] : {std::pair{DType::kFp8E4M3, false},
                                             {DType::kFp8E4M3, true},
                                             {DType::kNvfp4, false},
                                             {DType::kNvfp4, true}}) {
      Case c{.kv = kv, .kv_heads = 1, .page_size = 32, .many_sequences = many_sequences};
      for (const int64_t length : {1, 15, 16, 17, 31, 64, 300, 5000}) {
        c.sequences.push_back({.length = length});
      }
      SCOPED_TRACE(Describe(c) + ", appended " + std::to_string(tokens));
      Call call(c);
      const auto device = call.MakeDevice();
      ASSERT_NO_FATAL_FAILURE(call.Upload(device.get()));
      const DeviceArray<std::byte> appended(device->cache.Get());
      const ReferenceResult expected = ReferenceAttention(call.HostParams());
      for (int launch = 0; launch < 3; ++launch) {
        call.PoisonEnds(tokens, device.get());
        ASSERT_EQ(LaunchSlowCopy(appended.data(), device->cache.data(), appended.size(),
                                 /*microseconds=*/100, nullptr),
                  cudaSuccess);
        const Status status = call.Launch(*device, nullptr, LateStripsOf(tokens));
        ASSERT_TRUE(status.ok()) << status.message();
        ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
        ExpectClose(device->o.Get(), expected.o, Tolerance(c), "o");
        ExpectClose(device->lse.Get(), expected.lse, Tolerance(c), "lse");
      }
    }
  }
}

// A draft's block beside its context, in one launch: of every length, in every cluster, cut or not,
// with several items to a block of the grid, and with rows that see nothing of the context.
TEST(AttentionTest, DraftsBringTheirBlocks) {
  TRIBUTARY_SKIP_WITHOUT_GPU();
  for (const auto& [kv, dims] : AllOfWgmmaFp8()) {
    for (const int32_t cluster_size : {1, 2, 4, 8}) {
      for (const int32_t rows : {9, 16, 17, 33}) {
        for (const int32_t blocks : {8, 132}) {
          Case c{
              .kv = kv, .dims = dims, .gqa_ratio = 4, .scaled = true, .cluster_size = cluster_size};
          c.blocks = blocks;
          c.draft = true;
          c.draft_causal = rows == 17;
          c.sequences = {{9000, rows, -1, false},
                         {17, rows, -1, false},
                         {0, rows, -1, false},
                         {3000, 1, 700, false},
                         {500, rows, -1, false}};
          ExpectMatchesReference(c);
        }
      }
    }
  }
  for (const auto& [kv, dims] : AllOfWgmmaFp8()) {
    Case invariant{.kv = kv, .dims = dims, .gqa_ratio = 4, .batch_invariant = true};
    invariant.draft = true;
    invariant.sequences = {{5000, 16, -1, false}, {100, 16, 30, false}};
    ExpectMatchesReference(invariant);
  }
}

// Tokens that are not finite, the last one and one in the middle, are seen by few rows of a causal
// draft and by all rows of another.
TEST(AttentionTest, DraftTokensThatAreNotFiniteStayWithTheRowsThatSeeThem) {
  TRIBUTARY_SKIP_WITHOUT_GPU();
  for (const auto& [kv, dims] : AllOfWgmmaFp8()) {
    for (const int32_t rows : {9, 17, 33}) {
      for (const bool causal : {false, true}) {
        for (const bool fp8_queries : {false, true}) {
          if (fp8_queries && !IsFp8(kv)) continue;
          for (const int32_t blocks : {4, 132}) {
            Case c{.kv = kv,
                   .dims = dims,
                   .gqa_ratio = 4,
                   .scaled = true,
                   .blocks = blocks,
                   .draft = true};
            c.draft_causal = causal;
            c.fp8_queries = fp8_queries;
            c.sequences = {{300, rows, -1, false}, {0, rows, -1, false}, {900, rows, -1, false}};
            Call call(c);
            // The second sequence's tokens are as they should be.
            for (const int32_t first : {0, 2 * rows}) {
              call.PoisonToken(first + rows / 2, INFINITY);
              call.PoisonToken(first + rows - 1, std::nanf(""));
            }
            ExpectMatchesWhereFinite(c, call);
          }
        }
      }
    }
  }
}

// The block's weights are taken against a reference of its own, which the first keys of the context
// outgrow here, by little and by much.
TEST(AttentionTest, DraftsWhoseContextOutgrowsTheirBlocks) {
  TRIBUTARY_SKIP_WITHOUT_GPU();
  for (const float value : {2.0f, 8.0f, -32.0f}) {
    for (const auto& [kv, dims] : AllOfWgmmaFp8()) {
      for (const bool fp8_queries : {false, true}) {
        if (fp8_queries && !IsFp8(kv)) continue;
        Case c{.kv = kv, .dims = dims, .gqa_ratio = 4, .draft = true, .fp8_queries = fp8_queries};
        c.sequences = {{300, 16, -1, false}, {40, 16, -1, false}};
        Call call(c);
        for (int32_t head = 0; head < c.kv_heads; ++head) {
          for (const size_t sequence : {0, 1}) call.FillKey(sequence, 5, head, value);
        }
        SCOPED_TRACE(value);
        ExpectMatchesReference(c, call);
      }
    }
  }
}

// More new tokens than are found at once, with and without context, one draft behind another.
TEST(AttentionTest, DraftsOfManyTokens) {
  TRIBUTARY_SKIP_WITHOUT_GPU();
  for (const int32_t rows : {32, 33, 64}) {
    for (const bool causal : {false, true}) {
      for (const int32_t blocks : {4, 132}) {
        for (const auto& [kv, dims] : AllOfWgmmaFp8()) {
          if (kv == DType::kFp8E5M2) continue;
          Case c{.kv = kv,
                 .dims = dims,
                 .gqa_ratio = 4,
                 .scaled = true,
                 .blocks = blocks,
                 .draft = true,
                 .draft_causal = causal};
          c.sequences = {{2000, rows, -1, false},
                         {0, rows, -1, false},
                         {100, rows, -1, false},
                         {300, 16, -1, false},
                         {0, rows, -1, false}};
          ExpectMatchesReference(c);
        }
      }
    }
  }
}

// Items without a tile of context, of which a block has many one behind another, and now and then
// one with some.
TEST(AttentionTest, ManySequencesWithoutContext) {
  TRIBUTARY_SKIP_WITHOUT_GPU();
  for (const int32_t cluster_size : {1, 2}) {
    for (const bool draft : {false, true}) {
      Case c{
          .gqa_ratio = 4, .cluster_size = cluster_size, .blocks = 2 * cluster_size, .draft = draft};
      for (int i = 0; i < 60; ++i) {
        c.sequences.push_back({i % 7 == 3 ? 30 * i : 0, 16, -1, false});
      }
      ExpectMatchesReference(c);
      for (const auto& [kv, dims] : AllOfWgmmaFp8()) {
        c.kv = kv;
        c.dims = dims;
        c.fp8_queries = IsFp8(kv);
        ExpectMatchesReference(c);
      }
    }
  }
}

// Every kernel of these heads with one block, or one cluster, and with a few of them: little enough
// for compute-sanitizer's racecheck to take seconds.
TEST(AttentionTest, FewBlocksOfEveryKernel) {
  TRIBUTARY_SKIP_WITHOUT_GPU();
  std::vector<OfWgmmaFp8> caches = AllOfWgmmaFp8();
  caches.push_back({DType::kBf16, {.key_dim = 128, .value_dim = 128}});
  for (const auto& [kv, dims] : caches) {
    for (const int32_t rows : {1, 8, 16}) {
      for (const bool draft : {false, true}) {
        if (draft && (IsUnscaled(kv) || rows != 16)) continue;
        for (const int32_t cluster_size : {1, 2}) {
          for (const int32_t blocks : {1, 3}) {
            Case c{.kv = kv,
                   .dims = dims,
                   .gqa_ratio = 4,
                   .kv_heads = 1,
                   .cluster_size = cluster_size};
            c.blocks = blocks * cluster_size;
            c.draft = draft;
            c.sequences = {{3000, rows, -1, false}, {1000, rows, -1, false}};
            ExpectMatchesReference(c);
          }
        }
      }
    }
  }
}

TEST(AttentionTest, RefusesHeadsThatAreNotThoseOfTheShape) {
  const AttentionShape shape{SquareGeometry(2, 128, DType::kBf16), 8, 16, 16};
  const KernelChoice choice = ChooseKernel({90, 132}, shape);
  for (const auto& [q_heads, kv_heads] : {std::pair{8, 0}, {8, 4}, {0, 2}, {16, 2}}) {
    const Status status =
        LaunchAttention(choice, shape, {.q_heads = q_heads, .kv_heads = kv_heads}, 1, nullptr);
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
    EXPECT_THAT(status.message(), ::testing::StartsWith("q_heads, kv_heads:"));
  }
}

TEST(AttentionTest, ABlockIsRefusedByKernelsThatDoNotTakeIt) {
  const AttentionShape shape{SquareGeometry(2, 128, DType::kBf16), 8, 16, 16};
  const KernelChoice choice = ChooseKernel({90, 132}, shape);
  EXPECT_FALSE(MayAttendBlock(choice, DType::kBf16, DType::kBf16, 0.0f));
  const int block = 0;
  AttentionArgs args;
  args.q_heads = 8;
  args.kv_heads = 2;
  args.block.k = &block;
  const Status status = LaunchAttention(choice, shape, args, 1, nullptr);
  EXPECT_EQ(status.code(), StatusCode::kFailedPrecondition);
  EXPECT_THAT(status.message(), ::testing::StartsWith("block:"));

  AttentionShape fp8 = shape;
  fp8.geometry.dtype = DType::kFp8E4M3;
  const KernelChoice wide = ChooseKernel({90, 132}, fp8);
  EXPECT_TRUE(MayAttendBlock(wide, DType::kBf16, DType::kBf16, 0.0f));
  EXPECT_FALSE(MayAttendBlock(wide, DType::kF16, DType::kBf16, 0.0f));
  EXPECT_FALSE(MayAttendBlock(wide, DType::kBf16, DType::kF32, 0.0f));
  EXPECT_FALSE(MayAttendBlock(wide, DType::kBf16, DType::kBf16, 30.0f));
  EXPECT_FALSE(MayAttendBlock(ChooseKernel({80, 108}, fp8), DType::kBf16, DType::kBf16, 0.0f));
  fp8.geometry.dtype = DType::kNvfp4;
  EXPECT_TRUE(MayAttendBlock(ChooseKernel({90, 132}, fp8), DType::kBf16, DType::kBf16, 0.0f));
}

TEST(AttentionTest, BatchInvariantResultsDoNotDependOnTheBatch) {
  TRIBUTARY_SKIP_WITHOUT_GPU();
  for (int32_t rows : {1, 16}) {
    Case alone;
    alone.batch_invariant = true;
    alone.sequences = {{7000, rows}};
    Case among = alone;
    // The first sequence is made from the same random numbers in both calls only if its pages are:
    // so it stays first, and its queries lead too.
    among.sequences.push_back({3000, rows});
    among.sequences.push_back({100, rows});
    std::vector<float> o, lse, o_among, lse_among;
    Call a(alone), b(among);
    b.CopyFirstSequenceTo(&a);
    ASSERT_NO_FATAL_FAILURE(a.Run(&o, &lse));
    ASSERT_NO_FATAL_FAILURE(b.Run(&o_among, &lse_among));
    o_among.resize(o.size());
    lse_among.resize(lse.size());
    EXPECT_EQ(o, o_among);
    EXPECT_EQ(lse, lse_among);
  }
}

TEST(AttentionTest, NanStaysInItsSequenceAndHead) {
  TRIBUTARY_SKIP_WITHOUT_GPU();
  for (DType kv : {DType::kFp8E4M3, DType::kFp8E5M2, DType::kBf16, DType::kF16, DType::kNvfp4}) {
    for (bool portable : {false, true}) {
      Case c;
      c.kv = kv;
      c.portable = portable;
      c.sequences = {{100}, {100}};
      Call call(c);
      call.PoisonKey(/*sequence=*/1, /*slot=*/20, /*head=*/1);
      std::vector<float> o, lse;
      ASSERT_NO_FATAL_FAILURE(call.Run(&o, &lse));
      const ReferenceResult expected = ReferenceAttention(call.HostParams());
      ExpectClose(o, expected.o, 2e-2, "o");
      EXPECT_TRUE(std::isnan(o.back()));
      EXPECT_FALSE(std::isnan(o.front()));
    }
  }
}

TEST(AttentionTest, RefusesWhatNoKernelSupports) {
  AttentionShape shape{SquareGeometry(2, 128, DType::kFp8E4M3), 8, 16, 1};
  EXPECT_TRUE(Validate(shape).ok());
  const auto message = [](AttentionShape s) { return Validate(s).message(); };
  EXPECT_THAT(message({SquareGeometry(2, 112, DType::kFp8E4M3), 8, 16, 1}),
              ::testing::HasSubstr("key_dim: 112"));
  EXPECT_THAT(message({SquareGeometry(2, 128, DType::kF32), 8, 16, 1}),
              ::testing::HasSubstr("dtype"));
  EXPECT_THAT(message({SquareGeometry(2, 128, DType::kBf16), 34, 16, 1}),
              ::testing::HasSubstr("q_heads"));
  EXPECT_THAT(message({SquareGeometry(2, 128, DType::kBf16), 7, 16, 1}),
              ::testing::HasSubstr("q_heads: 7"));
  EXPECT_THAT(message({SquareGeometry(2, 128, DType::kBf16), 8, 24, 1}),
              ::testing::HasSubstr("page_size: 24"));

  const KernelOptions options{.fp8_queries = true};
  EXPECT_TRUE(Validate(shape, options).ok());
  shape.geometry.dtype = DType::kBf16;
  EXPECT_EQ(Validate(shape, options).code(), StatusCode::kFailedPrecondition);
  EXPECT_THAT(Validate(shape, options).message(), ::testing::StartsWith("fp8_queries: the cache"));
}

}  // namespace
}  // namespace tributary::cuda
