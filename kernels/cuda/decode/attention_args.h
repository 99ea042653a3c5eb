// What the attention kernels take, as one plain struct of device pointers and sizes.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/mailbox/gate.h"
#include "kernels/cuda/plan/work_item.h"
#include "kernels/dtype.h"

namespace tributary::cuda {

// The new tokens of a draft block, which its rows attend to in full precision in the same launch as
// the context (MayAttendBlock). The launch merges both results.
struct BlockPart {
  const RowKeys* keys = nullptr;  // [rows], tokens of k and v
  const void* k = nullptr;        // [tokens, kv_heads, key_dim] in bf16; nullptr: no such part
  const void* v = nullptr;        // [tokens, kv_heads, value_dim] in bf16
  int32_t kv_head_begin = 0;      // the KV heads that have it
  int32_t kv_head_count = 0;
};

// A launch that runs side by side with another one of the same stream: neither reads what the other
// writes, and together they have few enough thread blocks that all of them run at once.
enum class Beside : uint8_t {
  kNothing,
  // With the one behind it, which is let begin only when all that is ahead of both has ended.
  kNextLaunch,
  // With the one ahead of it, which it waits for only before it ends, so that who waits for this
  // launch waits for both. Only mma_attention does so (side_by_side.h).
  kLastLaunch,
};

// AttentionArgs::late_strips beside the last launch: none is waited for.
inline constexpr int32_t kNoLateStrips = -(1 << 30);

// All pointers are device pointers.
struct AttentionArgs {
  const WorkItem* items = nullptr;       // the plan's; the first `blocks` start the grid's blocks
  const RowKeys* keys = nullptr;         // [rows]
  const int32_t* page_tables = nullptr;  // pages of the sequences, each where its items say
  const std::byte* cache = nullptr;      // [num_pages, PageBytes]; see page_layout.h
  const float* k_scale = nullptr;        // [kv_heads] or nullptr for ones
  const float* v_scale = nullptr;        // [kv_heads] or nullptr for ones
  const void* q = nullptr;               // [rows, q_heads, key_dim] of q_dtype
  DType q_dtype = DType::kBf16;          // f32, bf16 or f16
  bool fp8_queries = false;              // as the kernel was chosen: LaunchAttention sets it
  int32_t q_heads = 0;
  int32_t kv_heads = 0;
  int32_t gqa_ratio = 0;  // q_heads / kv_heads, and its inverse: LaunchAttention sets both
  float inverse_gqa_ratio = 0.0f;
  int32_t page_shift = 0;  // log2(page_size)
  float sm_scale = 1.0f;
  float soft_cap = 0.0f;         // > 0: logits = soft_cap * tanh(logits / soft_cap)
  float* o = nullptr;            // [rows, q_heads, value_dim]
  float* lse = nullptr;          // [rows, q_heads], natural log
  float* partial_o = nullptr;    // [partials, tile_rows, value_dim]
  float* partial_lse = nullptr;  // [partials, tile_rows]
  uint64_t* arrivals = nullptr;  // [plan.arrivals], zero before and after every launch
  // How many strips at the end of a sequence the launch just ahead may still be writing when this
  // one begins (LateStripsOf). Everything else that is read must be there when that launch lets
  // this one begin. 0: nothing is known of it, and the kernels wait for the launches ahead.
  int32_t late_strips = 0;
  // Where the launch ahead lets this one begin before a gate has been passed: nothing is read until
  // it has. Where late_strips is 0 all of that launch is waited for anyway.
  mailbox::GatePassage passage;
  Beside beside = Beside::kNothing;
  BlockPart block;
};

}  // namespace tributary::cuda
