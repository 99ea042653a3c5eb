// DFlash against attention that PyTorch computed with dense masks (make_dflash_golden.py), over one
// to four ranks.

#include <gtest/gtest.h>

#include <chrono>
#include <cstdint>
#include <fstream>
#include <map>
#include <string>
#include <vector>

#include "tests/support/compare.h"
#include "tests/worker/ranks.h"

namespace tributary::worker::testing {
namespace {

constexpr int32_t kQHeads = 2;
constexpr int32_t kKvHeads = 1;
constexpr int32_t kHeadDim = 64;

// As the file has it.
struct CaseHeader {
  int32_t kv_dtype, context, rows, window_left, window_right, base, causal, sinks, soft_cap, seed;
  float k_scale, v_scale;
};
static_assert(sizeof(CaseHeader) == 48);

struct Case {
  CaseHeader header;
  std::vector<float> o, lse;
};

std::vector<float> ReadFloats(std::ifstream& file, size_t count) {
  std::vector<float> values(count);
  file.read(reinterpret_cast<char*>(values.data()),
            static_cast<std::streamsize>(count * sizeof(float)));
  return values;
}

std::vector<Case> ReadCases() {
  std::ifstream file(std::string(TRIBUTARY_TEST_DATA) + "/dflash_golden.bin", std::ios::binary);
  std::vector<Case> cases;
  Case one;
  while (file.read(reinterpret_cast<char*>(&one.header), sizeof(CaseHeader))) {
    const size_t row_heads = static_cast<size_t>(one.header.rows * kQHeads);
    one.o = ReadFloats(file, row_heads * kHeadDim);
    one.lse = ReadFloats(file, row_heads);
    EXPECT_TRUE(file) << "the file ends in a case";
    cases.push_back(one);
  }
  return cases;
}

uint64_t Mixed(uint64_t x) {  // SplitMix64
  x += 0x9E3779B97F4A7C15;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EB;
  return x ^ (x >> 31);
}

std::vector<float> Values(int32_t seed, uint64_t tensor, int32_t rows, int32_t heads) {
  const uint64_t base = Mixed(static_cast<uint64_t>(seed) * 16 + tensor);
  std::vector<float> values(static_cast<size_t>(rows * heads * kHeadDim));
  for (size_t i = 0; i < values.size(); ++i) {
    const auto byte = static_cast<int>(Mixed(base + i) >> 40 & 0xff);
    values[i] = static_cast<float>(byte - 128) / 32.0f;
  }
  return values;
}

TensorView View(const std::vector<float>& values) {
  if (values.empty()) return {};
  return {reinterpret_cast<const std::byte*>(values.data()), DType::kF32,
          values.size() * sizeof(float)};
}

CacheSpec SpecOf(const CaseHeader& c, int32_t interleave) {
  const std::map<int32_t, DType> dtypes = {
      {2, DType::kBf16}, {3, DType::kF16}, {4, DType::kFp8E4M3}, {5, DType::kFp8E5M2}};
  CacheSpec spec;
  spec.q_heads = kQHeads;
  spec.kv_heads = kKvHeads;
  spec.head_dim = kHeadDim;
  spec.interleave = interleave;
  spec.kv_dtype = dtypes.at(c.kv_dtype);
  spec.sm_scale = 0.0625f;
  spec.num_pages = 16;
  LayerSpec layer;
  layer.window = {c.window_left, c.window_right};
  layer.window_base = c.base == 1 ? WindowBase::kAnchor : WindowBase::kQuery;
  layer.causal_block = c.causal == 1;
  if (c.sinks == 1) layer.sinks = {0.5f, -1.25f};
  layer.soft_cap = static_cast<float>(c.soft_cap) / 4.0f;
  layer.k_scale = {c.k_scale};
  layer.v_scale = {c.v_scale};
  spec.layers = {layer};
  return spec;
}

// The context appended, then the block; what rank 0 says.
class Group {
 public:
  Group(int size, const CacheSpec& spec) : ranks_(size, Poisoned()) {
    Execute(CreateCacheCommand{spec});
    PageUpdate table{1, 0, {}};
    for (int32_t page = 15; page >= 0; --page) table.pages.push_back(page);
    Execute(SetTablesCommand{{table}});
  }

  Reply Execute(decltype(Command::body) body) {
    std::map<int, Reply> replies =
        ranks_.Execute(CommandOf(ranks_.epoch(), ++number_, 1, std::move(body)));
    for (const auto& [rank, reply] : replies) {
      EXPECT_TRUE(reply.status.ok()) << "rank " << rank << ": " << reply.status;
    }
    return replies.at(0);
  }

 private:
  ThreadRanks ranks_;
  uint64_t number_ = 0;
};

TEST(DflashGolden, DenseMasksOfPyTorchAgree) {
  const std::vector<Case> cases = ReadCases();
  ASSERT_EQ(cases.size(), 25u);
  for (const Case& c : cases) {
    const CaseHeader& h = c.header;
    const std::vector<float> q = Values(h.seed, 0, h.rows, kQHeads);
    const std::vector<float> context_k = Values(h.seed, 1, h.context, kKvHeads);
    const std::vector<float> context_v = Values(h.seed, 2, h.context, kKvHeads);
    const std::vector<float> block_k = Values(h.seed, 3, h.rows, kKvHeads);
    const std::vector<float> block_v = Values(h.seed, 4, h.rows, kKvHeads);
    for (const int size : {1, 2, 3, 4}) {
      Group group(size, SpecOf(h, h.seed % 2 == 0 ? 16 : 4));
      if (h.context > 0) {
        group.Execute(StepCommand{.kind = StepKind::kAppend,
                                  .entries = {{.sequence = 1, .new_tokens = h.context}},
                                  .k = View(context_k),
                                  .v = View(context_v)});
      }
      const Reply reply = group.Execute(StepCommand{.kind = StepKind::kDflash,
                                                    .entries = {{.sequence = 1,
                                                                 .first_position = h.context,
                                                                 .query_rows = h.rows,
                                                                 .new_tokens = h.rows}},
                                                    .q = View(q),
                                                    .k = View(block_k),
                                                    .v = View(block_v)});
      ASSERT_TRUE(
          test::AllClose(reply.o, c.o, test::kAttentionTolerance, {h.rows, kQHeads, kHeadDim}))
          << "o of case " << h.seed << " over " << size << " ranks";
      ASSERT_TRUE(test::AllClose(reply.lse, c.lse, test::kAttentionTolerance, {h.rows, kQHeads}))
          << "lse of case " << h.seed << " over " << size << " ranks";
    }
  }
}

}  // namespace
}  // namespace tributary::worker::testing
