#include "bench/kernels/cuda/attention_cases.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <random>
#include <utility>

#include "kernels/head_dims.h"

namespace tributary::cuda {
namespace {

std::string Tokens(int64_t n) {
  return n % 1024 == 0 ? std::to_string(n / 1024) + "K" : std::to_string(n);
}

Case Uniform(int32_t batch, int64_t length, DType kv) {
  Case c;
  c.kv.dtype = kv;
  c.lengths.assign(batch, length);
  c.name = std::string(Name(kv)) + " " + std::to_string(batch) + " x " + Tokens(length);
  return c;
}

// The call of a draft's block of `rows`.
Case WithBlock(Case c, int32_t rows) {
  c.kv.kv_heads = 8;
  c.rows = rows;
  c.causal = false;
  c.name += ", block " + std::to_string(rows) + ", 32/8";
  return c;
}

Case Block(int32_t batch, int64_t length, DType kv, int32_t rows) {
  return WithBlock(Uniform(batch, length, kv), rows);
}

// The same of 64/8 heads, which gpt-oss has with a head dim of 64.
Case WithBlockOf64Heads(Case c, int32_t rows, int32_t head_dim) {
  c.q_heads = 64;
  c.kv.kv_heads = 8;
  c.kv.key_dim = c.kv.value_dim = head_dim;
  c.rows = rows;
  c.causal = false;
  c.name += ", block " + std::to_string(rows) + ", 64/8, d " + std::to_string(head_dim);
  return c;
}

Case WithHeads(Case c, int32_t gqa_ratio, int32_t head_dim) {
  c.q_heads = gqa_ratio * c.kv.kv_heads;
  c.kv.key_dim = c.kv.value_dim = head_dim;
  c.name += ", group " + std::to_string(gqa_ratio) + ", d " + std::to_string(head_dim);
  return c;
}

// Lengths as far apart as those of a service's sequences.
Case LogNormal(int32_t batch, DType kv) {
  Case c = Uniform(batch, 0, kv);
  std::mt19937 random(5);
  std::lognormal_distribution<double> lengths(8.0, 1.0);
  for (int64_t& length : c.lengths) length = 1 + static_cast<int64_t>(lengths(random));
  c.name = std::string(Name(kv)) + " " + std::to_string(batch) + " x log-normal (median 3K)";
  return c;
}

// Lengths in tokens, `least` to `most` of them, whose logarithms are uniform.
Case LogUniform(int32_t batch, int64_t least, int64_t most, uint32_t seed) {
  Case c = Uniform(batch, 0, DType::kFp8E4M3);
  std::mt19937 random(seed);
  std::uniform_real_distribution<double> of_range(std::log2(least), std::log2(most));
  for (int64_t& length : c.lengths) length = std::lround(std::exp2(of_range(random)));
  c.name = std::string(Name(c.kv.dtype)) + " " + std::to_string(batch) + " x log-uniform (" +
           Tokens(least) + " to " + Tokens(most) + ")";
  return c;
}

// The table of the kernels' targets (docs/kernels.md).
std::vector<Case> FieldCases() {
  std::vector<Case> cases;
  for (DType kv : {DType::kFp8E4M3, DType::kBf16}) {
    const auto uniform = [&](int32_t batch, std::vector<int64_t> lengths) {
      for (int64_t length : lengths) cases.push_back(Uniform(batch, length * 1024, kv));
    };
    uniform(1, {1, 4, 16, 64, 256});
    uniform(8, {1, 4, 16});
    uniform(32, {4, 16});
    uniform(128, {1, 4});
    Case uneven = Uniform(31, 4096, kv);
    uneven.lengths.insert(uneven.lengths.begin(), 131072);
    uneven.q_heads = 64;
    uneven.kv.kv_heads = 8;
    uneven.page_size = 64;
    uneven.name = std::string(Name(kv)) + " 1 x 128K + 31 x 4K, 64/8, page 64";
    cases.push_back(uneven);
    for (auto [batch, length] : {std::pair{1, 4}, {1, 32}, {8, 4}, {8, 32}, {32, 4}}) {
      cases.push_back(Block(batch, length * 1024, kv, 16));
    }
    Case window = Block(8, 32768, kv, 16);
    window.window = 2047;
    window.name += ", window 2047";
    cases.push_back(window);
    for (int32_t rows : {1, 2, 4, 8}) {
      Case verify = Uniform(32, 16384, kv);
      verify.rows = rows;
      verify.name += ", verify " + std::to_string(rows);
      cases.push_back(verify);
    }
  }
  return cases;
}

// NVFP4 beside FP8: decode, verify, and drafts' blocks, and every head dim.
std::vector<Case> Nvfp4Cases() {
  std::vector<Case> cases;
  for (DType kv : {DType::kFp8E4M3, DType::kNvfp4}) {
    for (auto [batch, length] :
         {std::pair{1, 1}, {1, 4}, {1, 64}, {8, 4}, {8, 16}, {32, 16}, {128, 1}, {128, 4}}) {
      cases.push_back(Uniform(batch, length * 1024, kv));
    }
    for (auto [batch, length] : {std::pair{1, 4}, {1, 32}, {8, 4}, {8, 32}, {32, 4}}) {
      cases.push_back(Block(batch, length * 1024, kv, 16));
    }
    for (int32_t rows : {2, 3, 4, 8}) {
      Case verify = Uniform(32, 16384, kv);
      verify.rows = rows;
      verify.name += ", verify " + std::to_string(rows);
      cases.push_back(verify);
    }
    for (int32_t head_dim : {64, 80, 96, 192, 256}) {
      for (int32_t gqa_ratio : {8, 16}) {
        cases.push_back(WithHeads(Uniform(32, 2097152 / head_dim, kv), gqa_ratio, head_dim));
      }
    }
  }
  return cases;
}

// Neighbouring shapes around 512 MB: no cliff between them.
std::vector<Case> ShapeCases() {
  std::vector<Case> cases;
  for (DType kv : {DType::kFp8E4M3, DType::kFp8E5M2, DType::kBf16, DType::kF16}) {
    for (int32_t head_dim : {64, 128, 256}) {
      for (int32_t gqa_ratio : {1, 2, 4, 8, 16}) {
        const int64_t length = 65536 / head_dim * 128 / 4 / int64_t(SizeOf(kv));
        cases.push_back(WithHeads(Uniform(32, length, kv), gqa_ratio, head_dim));
      }
    }
  }
  cases.push_back(LogNormal(128, DType::kFp8E4M3));
  return cases;
}

// Every row of the table of head dims, with as many bytes in all: 32 sequences, 512 MB.
std::vector<Case> DimsCases() {
  std::vector<Case> cases;
  for (DType kv : {DType::kFp8E4M3, DType::kBf16}) {
    for (const HeadDims& dims : kHeadDims) {
      if (!dims.cuda()) continue;
      for (int32_t gqa_ratio : {8, 16}) {
        Case c = Uniform(32, 0, kv);
        c.kv.key_dim = dims.key_dim;
        c.kv.value_dim = dims.value_dim;
        c.q_heads = gqa_ratio * c.kv.kv_heads;
        // (A multiple of 16, so that no strip is read in part.)
        constexpr int64_t kSequenceBytes = int64_t{16} << 20;
        const int64_t length =
            kSequenceBytes / (c.kv.kv_heads * BytesPerTokenOfHead(c.kv)) / 16 * 16;
        c.lengths.assign(c.lengths.size(), length);
        c.name = std::string(Name(kv)) + " d " + HeadDimsName(dims.key_dim, dims.value_dim) +
                 ", GQA ratio " + std::to_string(gqa_ratio) + ", 32 x " + Tokens(length);
        cases.push_back(c);
      }
    }
  }
  return cases;
}

// Lengths far apart, in batches, types, head dims and rows of all sizes.
std::vector<Case> SpreadCases() {
  std::vector<Case> cases;
  for (DType kv : {DType::kFp8E4M3, DType::kBf16}) {
    for (int32_t batch : {8, 32, 128, 256}) cases.push_back(LogNormal(batch, kv));
    for (int32_t head_dim : {64, 256}) {
      for (int32_t gqa_ratio : {8, 16}) {
        cases.push_back(WithHeads(LogNormal(128, kv), gqa_ratio, head_dim));
      }
    }
    for (int32_t batch : {8, 32, 128}) cases.push_back(WithBlock(LogNormal(batch, kv), 16));
  }
  return cases;
}

// Wide rows over uneven contexts, and over heads of 64.
std::vector<Case> WideCases() {
  std::vector<Case> cases;
  for (const int32_t head_dim : {64, 128}) {
    const Case lengths = LogUniform(6, 1024, 102400, /*seed=*/43);
    cases.push_back(WithBlockOf64Heads(lengths, 16, head_dim));
  }
  for (const auto& [rows, causal] : {std::pair{5, true}, {8, false}}) {
    Case uneven = LogUniform(24, 1024, 40960, /*seed=*/6);
    uneven.rows = rows;
    uneven.causal = causal;
    uneven.name += (causal ? ", verify " : ", block ") + std::to_string(rows);
    cases.push_back(uneven);
  }
  // So many rows that multiplying takes longer than reading.
  for (const int32_t head_dim : {64, 128}) {
    cases.push_back(WithBlockOf64Heads(Uniform(1, 65536, DType::kFp8E4M3), 64, head_dim));
  }
  return cases;
}

// Batches of one length whose jobs do not divide the multiprocessors.
std::vector<Case> BatchCases() {
  std::vector<Case> cases;
  for (DType kv : {DType::kFp8E4M3, DType::kBf16}) {
    for (int64_t length : {1024, 8192}) {
      for (int32_t batch : {3, 5, 7, 11, 13, 18, 24, 40, 50, 100, 200}) {
        cases.push_back(Uniform(batch, length, kv));
        if (batch <= 50) cases.push_back(Block(batch, length, kv, 16));
      }
    }
  }
  return cases;
}

// Drafts' blocks of 16 rows over contexts of many lengths.
std::vector<Case> DraftCases() {
  std::vector<Case> cases;
  for (int32_t batch : {1, 2, 4, 8}) {
    for (int64_t length = 2048; length <= 131072; length *= 2) {
      cases.push_back(Block(batch, length, DType::kFp8E4M3, 16));
    }
  }
  return cases;
}

// Sequences that were forked: what they share is in the cache once.
Case Cascade(int32_t batch, std::vector<SharedLevel> shared, int64_t own, DType kv) {
  Case c;
  c.kv.dtype = kv;
  c.kv.kv_heads = 8;
  c.name = std::string(Name(kv)) + " " + std::to_string(batch) + " x (";
  int64_t length = own;
  for (const SharedLevel& level : shared) {
    length += level.tokens;
    c.name += Tokens(level.tokens);
    if (level.groups > 1) c.name += " of " + std::to_string(batch / level.groups);
    c.name += " + ";
  }
  c.name += Tokens(own) + "), 32/8";
  c.lengths.assign(batch, length);
  c.shared = std::move(shared);
  return c;
}

std::vector<Case> CascadeCases() {
  std::vector<Case> cases;
  for (DType kv : {DType::kFp8E4M3, DType::kBf16}) {
    cases.push_back(Cascade(32, {{32768, 1}}, 1024, kv));
    cases.push_back(Cascade(64, {{8192, 1}}, 512, kv));
    cases.push_back(Cascade(64, {{16384, 1}, {4096, 8}}, 512, kv));
    cases.push_back(Cascade(2, {{65536, 1}}, 1024, kv));
    cases.push_back(Cascade(16, {{8192, 4}}, 2048, kv));
    Case verify = Cascade(16, {{16384, 1}}, 1024, kv);
    verify.rows = 4;
    verify.name += ", verify 4";
    cases.push_back(verify);
    Case block = Cascade(8, {{32768, 1}}, 2048, kv);
    block.rows = 16;
    block.causal = false;
    block.name += ", block 16";
    cases.push_back(block);
  }
  cases.push_back(Cascade(32, {{32768, 1}}, 1024, DType::kNvfp4));
  cases.push_back(Cascade(64, {{8192, 1}}, 512, DType::kNvfp4));
  cases.push_back(Cascade(64, {{16384, 1}, {4096, 8}}, 512, DType::kNvfp4));
  return cases;
}

// Batch x length, as decode backends are usually compared.
std::vector<Case> GridCases() {
  std::vector<Case> cases;
  for (DType kv : {DType::kFp8E4M3, DType::kBf16}) {
    for (int32_t batch : {1, 4, 8, 16, 32, 64, 128, 256}) {
      for (int64_t length = 1024; length <= 131072; length *= 2) {
        cases.push_back(Uniform(batch, length, kv));
      }
    }
  }
  return cases;
}

}  // namespace

std::vector<Case> CasesOf(const std::string& set) {
  std::vector<Case> cases;
  const auto add = [&](const char* name, std::vector<Case> more) {
    if (set == name || set == "all") std::move(more.begin(), more.end(), std::back_inserter(cases));
  };
  add("field", FieldCases());
  add("nvfp4", Nvfp4Cases());
  add("shapes", ShapeCases());
  add("dims", DimsCases());
  add("spread", SpreadCases());
  add("wide", WideCases());
  add("batches", BatchCases());
  add("drafts", DraftCases());
  add("cascade", CascadeCases());
  add("grid", GridCases());
  return cases;
}

}  // namespace tributary::cuda
