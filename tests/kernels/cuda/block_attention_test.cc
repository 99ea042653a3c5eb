// A draft's block, attended to and merged in place, against the float64 reference of both.
#include "kernels/cuda/decode/block_attention.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <vector>

#include "kernels/lse.h"
#include "kernels/reference.h"
#include "tests/kernels/cuda/gpu_cache.h"

namespace tributary::cuda {
namespace {

struct Case {
  std::vector<int32_t> blocks = {16};
  int32_t kv_heads = 2;
  int32_t gqa_ratio = 4;
  HeadDims dims{.key_dim = 128, .value_dim = 128};
  DType q = DType::kBf16;
  DType kv = DType::kBf16;
  int32_t head_begin = 0;
  int32_t head_count = 0;  // 0: all
  bool causal = false;
  int32_t window = 0;  // keys either side; 0: no window
  float soft_cap = 0;
  bool sinks = false;
  bool begins_early = true;
  // Rows of each block that are in the call, from `skipped` on; 0: all.
  int32_t skipped = 0;
  // Makes one dimension of some tokens' values NaN or infinite, of the first KV head, and of their
  // keys, of the last.
  bool poisoned = false;
  bool tokenless = false;  // the last block has rows and no tokens
};

std::vector<std::byte> Random(size_t count, DType type, std::mt19937& random) {
  std::normal_distribution<float> normal;
  std::vector<std::byte> bytes(count * SizeOf(type));
  for (size_t i = 0; i < count; ++i) StoreElement(type, bytes.data(), i, normal(random));
  return bytes;
}

// A block's rows as the kernel takes them, and as the reference does.
struct Blocks {
  std::vector<BlockEntry> entries;
  std::vector<NewTokensEntry> reference;
  std::vector<KeyRange> keys;
  int32_t rows = 0;
  int32_t most_rows = 0;

  explicit Blocks(const Case& c) {
    for (const int32_t block : c.blocks) {
      entries.push_back({.row_begin = rows + c.skipped,
                         .row_count = block - c.skipped,
                         .token_begin = rows,
                         .token_count = block});
      reference.push_back({.row_begin = rows, .row_count = block});
      most_rows = std::max(most_rows, block - c.skipped);
      for (int32_t row = 0; row < block; ++row) {
        const int32_t lo = c.window > 0 ? std::max(0, row - c.window) : 0;
        const int32_t hi = c.window > 0 ? std::min(block, row + c.window) : block;
        keys.push_back({lo, c.causal ? row + 1 : hi});
      }
      rows += block;
    }
    if (!c.tokenless) return;
    entries.back().token_count = 0;
    for (int32_t row = reference.back().row_begin; row < rows; ++row) keys[row] = {0, 0};
  }
};

// The inputs of a case.
struct Problem {
  explicit Problem(const Case& of)
      : c(of),
        blocks(of),
        q_heads(of.kv_heads * of.gqa_ratio),
        heads(of.head_count > 0 ? of.head_count : q_heads - of.head_begin),
        dim(static_cast<size_t>(of.dims.value_dim)),
        scale(1.0f / std::sqrt(static_cast<float>(of.dims.key_dim))) {
    std::mt19937 random(5);
    const auto rows = static_cast<size_t>(blocks.rows);
    const auto key_dim = static_cast<size_t>(c.dims.key_dim);
    const size_t pairs = rows * static_cast<size_t>(q_heads);
    q = Random(pairs * key_dim, c.q, random);
    k = Random(rows * c.kv_heads * key_dim, c.kv, random);
    v = Random(rows * c.kv_heads * dim, c.kv, random);
    for (size_t row = 2; c.poisoned && row < rows; row += 5) {
      const float value = row % 2 == 0 ? NAN : INFINITY;
      StoreElement(c.kv, v.data(), row * c.kv_heads * dim + row % dim, value);
      StoreElement(c.kv, k.data(), (row + 1) * c.kv_heads * key_dim - 1, value);
    }
    std::normal_distribution<float> normal;
    sinks.resize(static_cast<size_t>(heads));
    for (float& x : sinks) x = normal(random);
    o.resize(pairs * dim);
    lse.resize(pairs);
    for (size_t pair = 0; pair < pairs; ++pair) {
      // Rows that see nothing of the context, whose output is not to be looked at.
      const bool empty = pair % 5 == 0;
      lse[pair] = empty ? EmptyLse<float>() : 1.0f + normal(random);
      for (size_t d = 0; d < dim; ++d) o[pair * dim + d] = empty ? NAN : normal(random);
    }
  }

  // Attention to the blocks alone, by the reference.
  ReferenceResult OfBlocks() const {
    return ReferenceNewTokens({.q = q.data(),
                               .k = k.data(),
                               .v = v.data(),
                               .q_dtype = c.q,
                               .kv_dtype = c.kv,
                               .rows = blocks.rows,
                               .q_heads = q_heads,
                               .kv_heads = c.kv_heads,
                               .key_dim = c.dims.key_dim,
                               .value_dim = c.dims.value_dim,
                               .head_begin = c.head_begin,
                               .head_count = heads,
                               .entries = blocks.reference,
                               .keys = blocks.keys.data(),
                               .sm_scale = scale,
                               .soft_cap = c.soft_cap});
  }

  const Case& c;
  const Blocks blocks;
  const int32_t q_heads;
  const int32_t heads;  // of the slice
  const size_t dim;     // of a value
  const float scale;
  std::vector<std::byte> q, k, v;
  std::vector<float> o, lse;  // the context's partial
  std::vector<float> sinks;   // of the slice's heads
};

// What the kernel makes of the context's partial.
struct Merged {
  std::vector<float> o, lse;
};

void Launch(const Problem& p, Merged* merged) {
  std::vector<RowKeys> keys;
  for (const BlockEntry& entry : p.blocks.entries) {
    const int32_t first = entry.token_begin;
    for (int32_t row = first; row < first + entry.token_count; ++row) {
      const KeyRange& range = p.blocks.keys[static_cast<size_t>(row)];
      keys.push_back(
          {first + static_cast<int32_t>(range.lo), first + static_cast<int32_t>(range.hi)});
    }
  }
  const DeviceArray<BlockEntry> device_entries(p.blocks.entries);
  const DeviceArray<RowKeys> device_keys(keys);
  const DeviceArray<std::byte> device_q(p.q), device_k(p.k), device_v(p.v);
  const DeviceArray<float> device_sinks(p.sinks), device_o(p.o), device_lse(p.lse);
  const BlockArgs args{.entries = device_entries.data(),
                       .entry_count = static_cast<int32_t>(p.blocks.entries.size()),
                       .most_rows = p.blocks.most_rows,
                       .keys = device_keys.data(),
                       .q = device_q.data(),
                       .q_dtype = p.c.q,
                       .k = device_k.data(),
                       .v = device_v.data(),
                       .kv_dtype = p.c.kv,
                       .q_heads = p.q_heads,
                       .kv_heads = p.c.kv_heads,
                       .key_dim = p.c.dims.key_dim,
                       .value_dim = p.c.dims.value_dim,
                       .head_begin = p.c.head_begin,
                       .head_count = p.heads,
                       .sm_scale = p.scale,
                       .soft_cap = p.c.soft_cap,
                       .sinks = p.c.sinks ? device_sinks.data() : nullptr,
                       .o = device_o.data(),
                       .lse = device_lse.data(),
                       .begins_early = p.c.begins_early};
  const Status launched = LaunchBlockAttention(args, nullptr);
  ASSERT_TRUE(launched.ok()) << launched.message();
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  *merged = {device_o.Get(), device_lse.Get()};
}

// Whether the two differ by no more than the tolerance; NaN and infinities must meet.
bool Close(float got, double want, double tolerance) {
  if (!std::isfinite(want) || !std::isfinite(got)) {
    return std::isfinite(want) == std::isfinite(got);
  }
  return std::abs(got - want) <= tolerance;
}

// One row of one head, which is in the slice, against the merge of the context's partial with
// index `at` of the block's.
void ExpectMerged(const Problem& p, const Merged& got, const ReferenceResult& block, size_t pair,
                  size_t at) {
  const MergeWeights<double> weights = Merge<double>(p.lse[pair], block.lse[at]);
  ASSERT_TRUE(Close(got.lse[pair], weights.lse, 2e-2))
      << got.lse[pair] << ", expected " << weights.lse;
  const double logit = p.sinks[at % static_cast<size_t>(p.heads)];
  const double sink = p.c.sinks ? SinkScale<double>(weights.lse, logit) : 1.0;
  for (size_t d = 0; d < p.dim; ++d) {
    const double context = weights.a == 0 ? 0 : weights.a * p.o[pair * p.dim + d];
    const double want = sink * (context + weights.b * block.o[at * p.dim + d]);
    ASSERT_TRUE(Close(got.o[pair * p.dim + d], want, 3e-2))
        << "dimension " << d << ": " << got.o[pair * p.dim + d] << ", expected " << want;
  }
}

void ExpectMatchesReference(const Case& c) {
  const Problem p(c);
  Merged got;
  ASSERT_NO_FATAL_FAILURE(Launch(p, &got));
  const ReferenceResult block = p.OfBlocks();
  size_t row = 0;
  for (const int32_t in_block : c.blocks) {
    for (int32_t r = 0; r < in_block; ++r, ++row) {
      for (int32_t head = 0; head < p.q_heads; ++head) {
        SCOPED_TRACE(::testing::Message() << "row " << row << ", head " << head);
        const size_t pair = row * p.q_heads + head;
        const int32_t own = head - c.head_begin;
        if (own < 0 || own >= p.heads || r < c.skipped) {
          EXPECT_EQ(got.lse[pair], p.lse[pair]);
          continue;
        }
        const size_t at = row * p.heads + static_cast<size_t>(own);
        ASSERT_NO_FATAL_FAILURE(ExpectMerged(p, got, block, pair, at));
      }
    }
  }
}

TEST(BlockAttention, EveryLengthAndMask) {
  TRIBUTARY_SKIP_WITHOUT_GPU();
  for (const std::vector<int32_t>& blocks :
       {std::vector<int32_t>{1}, {2}, {8}, {15}, {16}, {17}, {33}, {64}, {1, 16, 7, 70, 3}}) {
    for (const bool causal : {false, true}) {
      for (const int32_t window : {0, 3}) {
        SCOPED_TRACE(::testing::Message() << blocks.size() << " blocks, the first of " << blocks[0]
                                          << (causal ? ", causal" : "") << ", window " << window);
        ExpectMatchesReference({.blocks = blocks, .causal = causal, .window = window});
      }
    }
  }
}

TEST(BlockAttention, EveryTypeAndHeadDim) {
  TRIBUTARY_SKIP_WITHOUT_GPU();
  for (const DType q : {DType::kF32, DType::kBf16, DType::kF16}) {
    for (const DType kv : {DType::kF32, DType::kBf16, DType::kF16}) {
      for (const HeadDims& dims : DimsOf(&HeadDims::draft_block)) {
        SCOPED_TRACE(::testing::Message() << Name(q) << " x " << Name(kv) << ", " << NameOf(dims));
        ExpectMatchesReference({.blocks = {16, 5}, .dims = dims, .q = q, .kv = kv, .sinks = true});
      }
    }
  }
}

TEST(BlockAttention, GqaRatiosAndSlicesOfHeads) {
  TRIBUTARY_SKIP_WITHOUT_GPU();
  for (const int32_t ratio : {1, 3, 4, 16}) {
    ExpectMatchesReference({.blocks = {16, 9}, .gqa_ratio = ratio, .sinks = true});
    if (ratio < 3) continue;
    for (const auto& [begin, count] : {std::pair{1, 1}, {2, ratio}, {ratio - 1, ratio + 1}}) {
      SCOPED_TRACE(::testing::Message()
                   << count << " heads from " << begin << ", GQA ratio " << ratio);
      ExpectMatchesReference({.blocks = {16, 9},
                              .gqa_ratio = ratio,
                              .head_begin = begin,
                              .head_count = count,
                              .sinks = true});
    }
  }
}

TEST(BlockAttention, SoftCapAndPartsOfBlocks) {
  TRIBUTARY_SKIP_WITHOUT_GPU();
  for (const float soft_cap : {2.0f, 1e-40f, 65.0f, 1e6f, 1e8f, 3e38f}) {
    ExpectMatchesReference({.blocks = {16, 32}, .soft_cap = soft_cap, .sinks = true});
  }
  ExpectMatchesReference({.blocks = {16, 32}, .skipped = 6});
  ExpectMatchesReference({.blocks = {16, 32}, .begins_early = false});
}

TEST(BlockAttention, WhatIsNotFiniteStaysWithTheRowsThatSeeIt) {
  TRIBUTARY_SKIP_WITHOUT_GPU();
  for (const DType kv : {DType::kF32, DType::kBf16, DType::kF16}) {
    for (const HeadDims& dims : DimsOf(&HeadDims::draft_block)) {
      for (const bool causal : {false, true}) {
        for (const int32_t window : {0, 3}) {
          SCOPED_TRACE(::testing::Message() << Name(kv) << ", " << NameOf(dims)
                                            << (causal ? ", causal" : "") << ", window " << window);
          ExpectMatchesReference({.blocks = {8, 16, 40},
                                  .dims = dims,
                                  .q = kv,
                                  .kv = kv,
                                  .causal = causal,
                                  .window = window,
                                  .poisoned = true});
        }
      }
    }
  }
}

TEST(BlockAttention, RowsWithoutTokensKeepTheirContext) {
  TRIBUTARY_SKIP_WITHOUT_GPU();
  for (const bool sinks : {false, true}) {
    for (const bool begins_early : {false, true}) {
      SCOPED_TRACE(::testing::Message() << (sinks ? "with sinks" : "without") << begins_early);
      ExpectMatchesReference(
          {.blocks = {16, 5, 9}, .sinks = sinks, .begins_early = begins_early, .tokenless = true});
    }
  }
}

TEST(BlockAttention, RefusalsNameTheField) {
  const BlockArgs args{.entry_count = 1,
                       .most_rows = 1,
                       .q_heads = 4,
                       .kv_heads = 2,
                       .key_dim = 128,
                       .value_dim = 128,
                       .head_count = 4};
  const auto refusal = [&](auto change) {
    BlockArgs changed = args;
    change(changed);
    const Status status = LaunchBlockAttention(changed, nullptr);
    EXPECT_FALSE(status.ok());
    return status.message().substr(0, status.message().find(':'));
  };
  EXPECT_EQ(refusal([](BlockArgs& a) { a.q_dtype = DType::kFp8E4M3; }), "q_dtype");
  EXPECT_EQ(refusal([](BlockArgs& a) { a.kv_dtype = DType::kFp8E5M2; }), "kv_dtype");
  EXPECT_EQ(refusal([](BlockArgs& a) { a.kv_heads = 3; }), "q_heads");
  EXPECT_EQ(refusal([](BlockArgs& a) { a.head_begin = 1; }), "head_count");
  EXPECT_EQ(refusal([](BlockArgs& a) { a.entry_count = -1; }), "entry_count");
  EXPECT_EQ(refusal([](BlockArgs& a) { a.key_dim = 112; }), "kv.key_dim");
}

}  // namespace
}  // namespace tributary::cuda
