// What a decode plan is made of, as the kernels read it.
#pragma once

#include <cstdint>

namespace tributary::cuda {

// The keys that one query row may see, as the device takes them: local slots [begin, end).
struct alignas(8) RowKeys {
  int32_t begin = 0;
  int32_t end = 0;
};

// One split of one job: a query tile and some of the keys of one KV head. Slots are local slots of
// the sequence.
struct alignas(16) WorkItem {
  // What a warp needs to ask for keys comes first, in 16 bytes.
  int32_t page_table = 0;  // where the sequence's first page is in the device's page table array
  int32_t kv_head = 0;
  int32_t strip_begin = 0;  // the split: strips [strip_begin, strip_end) of 16 slots
  int32_t strip_end = 0;
  int32_t row_begin = 0;     // the sequence's first query row
  int32_t packed_begin = 0;  // the tile's first packed row; packed row p is row p / GQA ratio of
                             // the sequence and query head p % GQA ratio of those of the KV head
  int32_t packed_count = 0;  // packed rows of the tile; 0: nothing to do
  int32_t key_begin = 0;     // the slots that some row of the tile may see
  int32_t key_end = 0;
  int32_t dense_begin = 0;  // the slots that every row of the tile may see: no mask is needed
  int32_t dense_end = 0;
  int32_t partial_begin = 0;  // where the results of the job's splits begin in the workspace
  int32_t split_index = 0;    // this split among the job's
  int32_t split_count = 1;
  int32_t arrivals = 0;  // the job's first arrival counter; used if split_count > 1
  int32_t next = -1;     // the next item of the same thread block, -1 for none
};
static_assert(sizeof(WorkItem) == 64);

}  // namespace tributary::cuda
