// Moves partials between the layout of a call and that of messages, on the GPU.
//
// A part is what one rank sends another: O of some heads [rows, heads of the part, value_dim], from
// its start, and their LSE [rows, heads of the part] from `lse_offset`.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "kernels/dtype.h"
#include "kernels/status.h"

namespace tributary::collective {

struct PartsLayout {
  int32_t rows = 0;
  int32_t heads = 0;          // of all parts
  int32_t value_dim = 0;      // a multiple of 8
  int32_t parts = 1;          // heads are dealt to them as to ranks (head_slice.h)
  DType type = DType::kBf16;  // of O in a part: f32, bf16 or f16
  size_t lse_offset = 0;      // bytes; a multiple of 16
  size_t stride = 0;          // bytes from a part to the next; a multiple of 16
};
// Parts of the size of the widest.
PartsLayout LayOutParts(int32_t rows, int32_t heads, int32_t value_dim, int32_t parts, DType type);

struct PackArgs {
  PartsLayout layout;
  const void* o = nullptr;  // [rows, heads, value_dim]
  DType o_dtype = DType::kF32;
  const float* lse = nullptr;  // [rows, heads]
  void* parts = nullptr;
  // Of ag_rs: O is scaled by this rank's weight among all, and of the LSEs only those of part
  // `rank` are written, merged, to merged_lse [rows, heads of the part].
  const float* all_lse = nullptr;  // [layout.parts][rows, heads] or nullptr: nothing is scaled
  int32_t rank = 0;
  float* merged_lse = nullptr;
};

Status LaunchPack(const PackArgs& args, cudaStream_t stream);

// The inverse, without scaling: parts to [rows, heads, value_dim] of the same type. lse: may be
// nullptr.
Status LaunchUnpack(const PartsLayout& layout, const void* parts, void* o, float* lse,
                    cudaStream_t stream);

// One part from a slice [rows, heads of part `part`, value_dim]. lse may be nullptr.
Status LaunchPackSlice(const PartsLayout& layout, int32_t part, const void* o, const float* lse,
                       void* to, cudaStream_t stream);

// All kernels of this file (kernels/cuda/launch/load_kernels.h).
Status LoadPackKernels();

}  // namespace tributary::collective
