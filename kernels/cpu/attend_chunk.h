// The inner kernel: attention of a block of query vectors over one chunk of the keys of one head,
// or of several that lie side by side.
#pragma once

#include <cstddef>
#include <cstdint>

#include "hwy/aligned_allocator.h"
#include "kernels/dtype.h"
#include "kernels/key_range.h"

namespace tributary::cpu {

// Where the keys and values of consecutive heads of one sequence lie: in pages (page_layout.h), or
// dense, with one row per token.
struct KeyValueSource {
  const std::byte* k = nullptr;  // first head; in pages: its keys in the first block of page 0
  const std::byte* v = nullptr;
  // In pages: from one head to the next. Dense: from one token to the next.
  size_t key_head_bytes = 0;
  size_t value_head_bytes = 0;
  size_t key_row_bytes = 0;
  size_t value_row_bytes = 0;
  // Page of slots [i << page_shift, (i + 1) << page_shift); nullptr for dense rows.
  const int32_t* pages = nullptr;
  size_t page_bytes = 0;
  int page_shift = 0;
  int block_shift = 0;     // log2 of the tokens of a block
  size_t block_bytes = 0;  // from one block of a page to the next

  // In pages: from `k` (or `v`) to the block that holds the slot.
  size_t BlockOffset(int64_t slot) const {
    const int64_t in_page = slot & ((int64_t{1} << page_shift) - 1);
    return static_cast<size_t>(pages[slot >> page_shift]) * page_bytes +
           static_cast<size_t>(in_page >> block_shift) * block_bytes;
  }
};

// The query vectors of a block, for each kv head: `rows` rows of the `heads` heads that share it.
// Vector r * heads + h of a kv head sees keys[r].
struct QueryBlock {
  const std::byte* q =
      nullptr;  // first head of the first row; heads of all kv heads are contiguous
  size_t row_bytes = 0;
  DType dtype = DType::kBf16;
  int32_t rows = 0;
  int32_t heads = 0;
  const KeyRange* keys = nullptr;  // [rows]
};

struct ChunkParams {
  KeyValueSource kv;
  DType kv_dtype = DType::kBf16;
  int32_t kv_heads = 1;
  int32_t key_dim = 0;
  int32_t value_dim = 0;
  QueryBlock queries;
  KeyRange chunk;  // slots; begins at a multiple of kChunkKeys
  float sm_scale = 1.0f;
  float soft_cap = 0.0f;
  const float* k_scale = nullptr;  // [kv_heads]; null: 1
  const float* v_scale = nullptr;  // [kv_heads]; null: 1
};

// Scratch memory of one thread, made once per call: for so many query vectors of all KV heads.
class Workspace {
 public:
  Workspace(int32_t query_vectors, int32_t key_dim, int32_t value_dim);
  std::byte* data() const { return data_.get(); }

 private:
  hwy::AlignedFreeUniquePtr<std::byte[]> data_;
};

// The partial of the block over the chunk: o [kv_heads, rows * heads, value_dim], lse
// [kv_heads, rows * heads]. No slot that a row does not see has a part in its result, whatever it
// holds, and no page is touched of which no row sees a slot. Heads are taken together only for the
// sake of memory: each comes out as it would alone.
void AttendChunk(const ChunkParams& p, const Workspace& workspace, float* o, float* lse);

}  // namespace tributary::cpu
