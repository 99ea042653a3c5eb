// The CPU backend. Highway picks the widest instruction set at run time.
//
// Every result is a function of its own row alone: keys are cut into tiles of a fixed size, a
// tile's partial does not depend on the thread that made it, and partials are merged in order. The
// CPU backend is therefore batch-invariant and gives the same bits on any number of threads.
#pragma once

#include "kernels/cpu/thread_pool.h"
#include "kernels/output_format.h"
#include "kernels/params.h"
#include "kernels/status.h"

namespace tributary::cpu {

// Refuses (kInvalidArgument / kFailedPrecondition, the field named) before anything is written.
Status Append(const AppendParams& p, ThreadPool& pool);
Status Attention(const AttentionParams& p, ThreadPool& pool);
Status NewTokens(const NewTokensParams& p, ThreadPool& pool);
Status MergePartials(const MergeParams& p, ThreadPool& pool);

// Whether what `p` would write is already there, bit for bit, for every token whose slot is not
// kPadSlot: matches[t] = 1 or 0 (1 for kPadSlot). This is how a repeated append is recognised.
Status MatchesCache(const AppendParams& p, ThreadPool& pool, uint8_t* matches /* [tokens] */);

// Converts n elements between f32, bf16 and f16 (nearest even).
void Convert(DType from, const void* src, DType to, void* dst, size_t n);

// Stores n elements of an output (NVFP4: whole blocks), OutputBytes(format.dtype, n) bytes.
void StoreOutput(const OutputFormat& format, const float* values, size_t n, void* to);
// The same, shared out to the threads of a pool where there is enough to do.
void StoreOutput(const OutputFormat& format, const float* values, size_t n, void* to,
                 ThreadPool& pool);

// The instruction set in use, for logs and benchmarks: "AVX3_ZEN4", "AVX2", ...
const char* InstructionSet();

}  // namespace tributary::cpu
