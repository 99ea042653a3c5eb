// Tokens of a cache in plain order, as they leave a GPU and come back: for one token of one layer
// [kv_heads][key, value], without padding; of NVFP4 each with its block scales behind it, and with
// zeros behind the token, so that all tokens begin at multiples of 8 bytes. One kernel quantises
// new tokens so, others bring tokens from pages to plain order and back.
//
// Plain tokens lie in pinned host memory, as a rule: kernels read and write it over the bus, a
// token's bytes side by side. Launches take part of the GPU only, so that steps go on beside them.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "kernels/cuda/append/append.h"
#include "kernels/kv_geometry.h"
#include "kernels/status.h"

namespace tributary::cuda {

constexpr size_t PlainTokenBytes(const KvGeometry& g) {
  return (static_cast<size_t>(g.kv_heads) * static_cast<size_t>(BytesPerTokenOfHead(g)) + 7) / 8 *
         8;
}

// Pages of one layer whose tokens are in plain order: the token of slot s of a page lies
// s * PlainTokenBytes behind the page's begin.
struct PlainPages {
  std::byte* base = nullptr;  // of page 0, aligned to 16 bytes
  size_t page_bytes = 0;      // from a page to the next; a multiple of 16
};

// Writes the tokens of an append into plain pages, with the bits that LaunchAppend gives. Of `args`
// the cache, the gate and begins_early do not count.
Status LaunchAppendPlain(const AppendArgs& args, const PlainPages& to, cudaStream_t stream);

// Runs of slots of layers that follow each other and have the same geometry. All pointers are
// device pointers.
struct PlainRunsArgs {
  std::byte* cache = nullptr;  // page 0 of the first layer; see page_layout.h
  size_t layer_bytes = 0;      // from a page to the same page of the next layer
  KvGeometry geometry;
  int32_t page_size = 0;
  int32_t layers = 0;
  const int64_t* first = nullptr;  // [runs]: the slots that they begin at
  int32_t runs = 0;
  int32_t slots = 0;           // of a run, which lies in one page
  std::byte* plain = nullptr;  // [runs] of run_bytes: [layers][slots][PlainTokenBytes]
  size_t run_bytes = 0;        // a multiple of 8
};

// From pages to plain order.
Status LaunchReadRuns(const PlainRunsArgs& args, cudaStream_t stream);
// From plain order to pages. Zeros go into the padding of keys.
Status LaunchWriteRuns(const PlainRunsArgs& args, cudaStream_t stream);

}  // namespace tributary::cuda
