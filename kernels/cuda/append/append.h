// Quantises the K/V of new tokens and writes them into pages, in one launch.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "base/mailbox/gate.h"
#include "kernels/dtype.h"
#include "kernels/kv_geometry.h"
#include "kernels/status.h"

namespace tributary::cuda {

// All pointers are device pointers.
struct AppendArgs {
  std::byte* cache = nullptr;        // [num_pages, PageBytes]; see page_layout.h
  KvGeometry geometry;               // of the cache; any type but f32
  int32_t page_size = 0;             // 16, 32, 64 or 128
  const float* k_scale = nullptr;    // [kv_heads] or nullptr for ones; stored = real / scale
  const float* v_scale = nullptr;    // [kv_heads] or nullptr for ones
  const void* k = nullptr;           // [tokens, kv_heads, key_dim] of input_dtype
  const void* v = nullptr;           // [tokens, kv_heads, value_dim] of input_dtype
  DType input_dtype = DType::kBf16;  // f32, bf16 or f16
  int32_t tokens = 0;
  // Where each token goes: page * page_size + slot in page, or kPadSlot (params.h) for tokens that
  // are not ours. Whole quads of slots (4i .. 4i + 3, as four neighbours of the call) are fastest.
  // This and `listed` are read before the launches ahead have ended, so no kernel may write them.
  const int64_t* slots = nullptr;  // [tokens]
  // Null: the i-th slot is of the i-th token. Otherwise `tokens` counts the places of a list
  // (append_list.h), and this holds the token of each, which is any token where the slot is
  // kPadSlot. LaunchAppend alone takes lists, and none with a gate.
  const int32_t* listed = nullptr;  // [tokens]
  // Where the tokens are a layer of a session: passed before anything else. The launch is to have
  // few blocks (kMostGatedBlocks), because all of them wait, and the host computes meanwhile.
  mailbox::Gate gate;
  // On sm_90 and later: the launch begins while the one ahead of it ends.
  bool begins_early = false;
};

// Blocks of two warps that the launch has.
int32_t AppendBlocks(const KvGeometry& geometry, int32_t tokens);
inline constexpr int32_t kMostGatedBlocks = 32;

Status LaunchAppend(const AppendArgs& args, cudaStream_t stream);

}  // namespace tributary::cuda
