// What a plan is made of, as the kernels read it.
#pragma once

#include <cstdint>

namespace tributary::cuda {

// The keys a query row may see, as the device takes them.
struct alignas(8) RowKeys {
  int32_t begin = 0;
  int32_t end = 0;
};

// One piece of one job. Slots are local slots of the sequence.
struct alignas(16) WorkItem {
  // What a warp needs to ask for keys comes first, in 16 bytes.
  int32_t page_table = 0;  // where the sequence's first page is in the device's page table array
  int32_t kv_head = 0;
  int32_t group_begin = 0;  // the piece, in groups of 16 slots
  int32_t group_end = 0;
  int32_t row_begin = 0;     // the sequence's first query row
  int32_t column_begin = 0;  // the block's first column; column c is row c / group, head c % group
  int32_t column_count = 0;  // 0: nothing to do
  int32_t key_begin = 0;     // the slots that some row of the block may see
  int32_t key_end = 0;
  int32_t dense_begin = 0;  // the slots that every row of the block may see: no mask needed
  int32_t dense_end = 0;
  int32_t partial_begin = 0;  // the first partial of the job in the workspace
  int32_t partial_index = 0;  // this piece among the job's
  int32_t partial_count = 1;
  int32_t arrivals = 0;  // the job's first arrival counter; used when partial_count > 1
  int32_t next = -1;     // the block's next item, -1 for none
};
static_assert(sizeof(WorkItem) == 64);

}  // namespace tributary::cuda
