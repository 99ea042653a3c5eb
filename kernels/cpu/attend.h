// Attention of any number of query blocks: cuts keys into chunks, spreads the work over threads and
// folds the partials.
#pragma once

#include <cstdint>
#include <span>

#include "kernels/cpu/attend_chunk.h"
#include "kernels/cpu/thread_pool.h"

namespace tributary::cpu {

// A block of queries over all the keys its rows see, and where the result goes.
struct AttendJob {
  ChunkParams params;    // `chunk` is filled in by Attend
  float* o = nullptr;    // [heads, value_dim] of the first row
  float* lse = nullptr;  // [heads] of the first row
  int32_t o_heads = 0;   // heads from one row of o and lse to the next
  // [rows of the block]: which rows of o and lse its rows are; null: the first ones.
  const int32_t* rows = nullptr;
};

// Writes every job's O and LSE. The result of a row depends on nothing but the row: neither on the
// other jobs, nor on the threads, nor on which rows share its block.
void Attend(std::span<const AttendJob> jobs, ThreadPool& pool);

// The same for keys that lie behind those that O and LSE cover already: folds them in. Attending to
// chunks of keys in several calls gives the bits that one call gives.
void AttendFurther(std::span<const AttendJob> jobs, ThreadPool& pool);

}  // namespace tributary::cpu
