// The one table of head dims: which dimensions of keys and values the kernels are built for.
//
// Validation, the backends' capabilities and the dispatch to kernels read it; nothing else lists
// head dims. A new one is a row here, plus the instantiations of every family whose column says
// true.
#pragma once

#include <array>
#include <cstdint>
#include <string>

#include "kernels/kv_geometry.h"

namespace tributary {

struct HeadDims {
  int32_t key_dim = 0;
  int32_t value_dim = 0;
  // One column per family of kernels: whether the family is instantiated for these dimensions.
  bool cpu = false;
  bool append = false;             // kernels/cuda/append: write, compare
  bool decode_sm80 = false;        // kernels/cuda/decode/sm80
  bool decode_sm90 = false;        // kernels/cuda/decode/sm90, any type of cache
  bool decode_sm90_fp8 = false;    // kernels/cuda/decode/sm90, wide tiles over FP8
  bool decode_sm90_nvfp4 = false;  // the same over NVFP4
  bool decode_sm100 = false;       // kernels/cuda/decode/sm100, any type of cache
  bool draft_block = false;        // kernels/cuda/decode/block_attention.cu
  bool prefill_sm80 = false;       // kernels/cuda/prefill/sm80
  bool prefill_sm90 = false;       // kernels/cuda/prefill/sm90
  bool prefill_sm100 = false;      // kernels/cuda/prefill/sm100

  // Whether a cache of these dimensions can be served by a GPU at all: the portable kernels are
  // there. The special ones of an architecture are faster, not more able.
  constexpr bool cuda() const { return append && decode_sm80 && draft_block && prefill_sm80; }
};

// clang-format off
inline constexpr std::array kHeadDims = {
    //          key_dim          value_dim         cpu          append          decode_sm80          decode_sm90          decode_sm90_fp8          decode_sm90_nvfp4          decode_sm100          draft_block          prefill_sm80          prefill_sm90          prefill_sm100
    HeadDims{.key_dim =  64, .value_dim =  64, .cpu = true,  .append = true,  .decode_sm80 = true,  .decode_sm90 = true,  .decode_sm90_fp8 = true,  .decode_sm90_nvfp4 = false, .decode_sm100 = false, .draft_block = true,  .prefill_sm80 = true,  .prefill_sm90 = true},
    HeadDims{.key_dim =  80, .value_dim =  80, .cpu = true,  .append = true,  .decode_sm80 = true,  .decode_sm90 = true,  .decode_sm90_fp8 = false, .decode_sm90_nvfp4 = false, .decode_sm100 = false, .draft_block = true,  .prefill_sm80 = true,  .prefill_sm90 = true},
    HeadDims{.key_dim =  96, .value_dim =  96, .cpu = true,  .append = true,  .decode_sm80 = true,  .decode_sm90 = true,  .decode_sm90_fp8 = false, .decode_sm90_nvfp4 = false, .decode_sm100 = false, .draft_block = true,  .prefill_sm80 = true,  .prefill_sm90 = true},
    HeadDims{.key_dim = 128, .value_dim = 128, .cpu = true,  .append = true,  .decode_sm80 = true,  .decode_sm90 = true,  .decode_sm90_fp8 = true,  .decode_sm90_nvfp4 = true,  .decode_sm100 = true,  .draft_block = true,  .prefill_sm80 = true,  .prefill_sm90 = true, .prefill_sm100 = true},
    HeadDims{.key_dim = 192, .value_dim = 128, .cpu = true,  .append = true,  .decode_sm80 = true,  .decode_sm90 = true,  .decode_sm90_fp8 = false, .decode_sm90_nvfp4 = false, .decode_sm100 = false, .draft_block = true,  .prefill_sm80 = true,  .prefill_sm90 = true},
    HeadDims{.key_dim = 192, .value_dim = 192, .cpu = true,  .append = true,  .decode_sm80 = true,  .decode_sm90 = true,  .decode_sm90_fp8 = false, .decode_sm90_nvfp4 = false, .decode_sm100 = false, .draft_block = true,  .prefill_sm80 = true,  .prefill_sm90 = true},
    HeadDims{.key_dim = 256, .value_dim = 256, .cpu = true,  .append = true,  .decode_sm80 = true,  .decode_sm90 = true,  .decode_sm90_fp8 = false, .decode_sm90_nvfp4 = false, .decode_sm100 = false, .draft_block = true,  .prefill_sm80 = true,  .prefill_sm90 = true},
};
// clang-format on

// Query heads that may share one KV head.
inline constexpr int32_t kMaxGqaRatio = 16;

// The row of these dimensions, or nullptr when the table has none.
constexpr const HeadDims* FindHeadDims(int32_t key_dim, int32_t value_dim) {
  for (const HeadDims& row : kHeadDims) {
    if (row.key_dim == key_dim && row.value_dim == value_dim) return &row;
  }
  return nullptr;
}

// Whether one family is instantiated for these dimensions: HasKernel<&HeadDims::decode_sm90>(g).
template <bool HeadDims::*kFamily>
constexpr bool HasKernel(int32_t key_dim, int32_t value_dim) {
  const HeadDims* row = FindHeadDims(key_dim, value_dim);
  return row != nullptr && row->*kFamily;
}
template <bool HeadDims::*kFamily>
constexpr bool HasKernel(const KvGeometry& g) {
  return HasKernel<kFamily>(g.key_dim, g.value_dim);
}

// Whether any backend serves caches of these dimensions.
constexpr bool IsServed(const HeadDims& row) { return row.cpu || row.cuda(); }

// "128", or "192 with values of 128".
inline std::string HeadDimsName(int32_t key_dim, int32_t value_dim) {
  std::string name = std::to_string(key_dim);
  return key_dim == value_dim ? name : name + " with values of " + std::to_string(value_dim);
}

// The names of the rows that `serves` accepts, for refusals: "64, 128 or 256".
template <typename Serves>
std::string HeadDimsList(Serves serves) {
  std::string list;
  std::string last;
  for (const HeadDims& row : kHeadDims) {
    if (!serves(row)) continue;
    if (!last.empty()) list += list.empty() ? last : ", " + last;
    last = HeadDimsName(row.key_dim, row.value_dim);
  }
  return list.empty() ? last : list + " or " + last;
}

}  // namespace tributary
