// What the kernels take: plain structs, one per operation, shared by every backend and the
// reference. Pointers are borrowed for the call. All sizes are in elements unless the name says
// bytes.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kernels/dtype.h"
#include "kernels/key_range.h"
#include "kernels/paged_kv.h"

namespace tributary {

// A slot that is not ours to write (token of another rank, padding).
inline constexpr int64_t kPadSlot = -1;

// Quantises the K/V of new tokens and writes them by slot mapping.
struct AppendParams {
  PagedKv kv;
  const void* k = nullptr;           // [tokens, kv_heads, key_dim] of input_dtype
  const void* v = nullptr;           // [tokens, kv_heads, value_dim] of input_dtype
  DType input_dtype = DType::kBf16;  // f32, bf16 or f16
  int32_t tokens = 0;
  // Where each token goes: page * page_size + slot in page, or kPadSlot.
  const int64_t* slots = nullptr;  // [tokens]
};

// The query rows of one sequence in a call. Rows of a call are numbered entry by entry.
struct AttentionEntry {
  int32_t row_begin = 0;
  int32_t row_count = 0;
  // Page of local slots [i * page_size, (i + 1) * page_size). Entries past the last key any row may
  // see are never read and may hold anything.
  std::span<const int32_t> pages;
};

// Runs of pages that entries share begin and end at multiples of so many slots.
inline constexpr int64_t kSharedSlots = 1024;

// Slots whose pages several entries of a call have alike, because their sequences were forked.
struct SharedPages {
  KeyRange slots;                // multiples of kSharedSlots
  std::vector<int32_t> entries;  // two or more, rising
};

// Attention of query rows over the paged cache of one rank. Every row has its own range of local
// slots; row r of query head h uses kv head h / (q_heads / kv_heads).
struct AttentionParams {
  PagedKv kv;
  const void* q = nullptr;       // [rows, q_heads, key_dim] of q_dtype
  DType q_dtype = DType::kBf16;  // f32, bf16 or f16
  int32_t rows = 0;
  int32_t q_heads = 0;
  std::span<const AttentionEntry> entries;
  const KeyRange* keys = nullptr;  // [rows], local slots
  // What entries share, those nearer to slot 0 first: the runs that name an entry follow one
  // another from slot 0 on. A backend may read these pages once for all rows; the result is the
  // same.
  std::span<const SharedPages> shared = {};
  float sm_scale = 1.0f;  // logits = sm_scale * q.k
  float soft_cap = 0.0f;  // > 0: logits = soft_cap * tanh(logits / soft_cap)
  float* o = nullptr;     // [rows, q_heads, value_dim]; 0 for a row without keys
  float* lse = nullptr;   // [rows, q_heads]; natural log; -inf for a row without keys
};

// One sequence of a NewTokensParams call. Row i of the entry is at position i relative to the first
// new token, and so is key i.
struct NewTokensEntry {
  int32_t row_begin = 0;  // rows and keys of the call are numbered alike
  int32_t row_count = 0;
  // Keys that it has beyond row_count, where other rows of it are computed in other calls. Such an
  // entry is alone in its call, and row i is at any position. On CPUs only.
  int32_t more_keys = 0;
};

// Attention of the new tokens over each other, from un-cached K/V in full precision. Used for a
// slice of query heads: [head_begin, head_begin + head_count) of q_heads.
struct NewTokensParams {
  const void* q = nullptr;        // [rows, q_heads, key_dim] of q_dtype
  const void* k = nullptr;        // [rows, kv_heads, key_dim] of kv_dtype
  const void* v = nullptr;        // [rows, kv_heads, value_dim] of kv_dtype
  DType q_dtype = DType::kBf16;   // f32, bf16 or f16
  DType kv_dtype = DType::kBf16;  // f32, bf16 or f16
  int32_t rows = 0;
  int32_t q_heads = 0;
  int32_t kv_heads = 0;
  int32_t key_dim = 0;
  int32_t value_dim = 0;
  int32_t head_begin = 0;
  int32_t head_count = 0;
  std::span<const NewTokensEntry> entries;
  const KeyRange* keys = nullptr;  // [rows]; keys relative to the entry's first key
  float sm_scale = 1.0f;
  float soft_cap = 0.0f;
  float* o = nullptr;    // [rows, head_count, value_dim]
  float* lse = nullptr;  // [rows, head_count]
};

// Merges the partials of `sources` disjoint key sets, row by row, and applies sinks once.
struct MergeParams {
  std::span<const float* const> o;    // sources x [rows, heads, value_dim]
  std::span<const float* const> lse;  // sources x [rows, heads]
  int32_t rows = 0;
  int32_t heads = 0;
  int32_t value_dim = 0;
  const float* sinks = nullptr;  // [heads] or nullptr for none
  float* out = nullptr;          // [rows, heads, value_dim]; may alias a source
  float* lse_out = nullptr;  // [rows, heads] or nullptr; LSE without the sink; may alias a source
};

}  // namespace tributary
