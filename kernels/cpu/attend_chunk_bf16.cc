// AttendChunk with the bf16 dot-product instruction. The file is compiled for one target only, with
// the instruction set that Highway 1.0 does not know added to it by pragma: a compiler flag would
// also reach the inline functions of the standard library, which the linker shares with code that
// must run on older processors.
#include "kernels/cpu/attend_chunk.h"
#include "kernels/cpu/chunk_tiles.h"
#include "kernels/cpu/instruction_set.h"
#include "kernels/cpu/tiling.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/attend_chunk_bf16.cc"
#include "hwy/foreach_target.h"
// After foreach_target:
#if HWY_ARCH_X86
#include <immintrin.h>
#endif

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <type_traits>

#include "hwy/highway.h"

// The -inl.h files are included for every target, as their include guards count targets.
#if HWY_TARGET == HWY_AVX3_DL
#pragma GCC push_options
#pragma GCC target("avx512bf16")
#endif
#include "kernels/cpu/bf16_dot_math-inl.h"
#include "kernels/cpu/chunk_pass-inl.h"
#include "kernels/cpu/nvfp4_dot_math-inl.h"

#if HWY_TARGET == HWY_AVX3_DL
HWY_BEFORE_NAMESPACE();
namespace tributary::cpu {

namespace {

template <class Cells>
void AttendCells(const ChunkParams& p, std::byte* memory, float* o, float* lse) {
  namespace target = HWY_NAMESPACE;
  if (WeightPieces(p.queries.dtype) == 1) {
    target::ChunkPass<target::Bf16DotMath<Cells, 1>>(p, memory).Run(o, lse);
  } else {
    target::ChunkPass<target::Bf16DotMath<Cells, 2>>(p, memory).Run(o, lse);
  }
}

void AttendNvfp4(const ChunkParams& p, std::byte* memory, float* o, float* lse) {
  namespace target = HWY_NAMESPACE;
  if (WeightPieces(p.queries.dtype) == 1) {
    target::ChunkPass<target::Nvfp4DotMath<1>>(p, memory).Run(o, lse);
  } else {
    target::ChunkPass<target::Nvfp4DotMath<2>>(p, memory).Run(o, lse);
  }
}

}  // namespace

void AttendChunkBf16(const ChunkParams& p, std::byte* memory, float* o, float* lse) {
  namespace target = HWY_NAMESPACE;
  if (p.kv_dtype == DType::kNvfp4) {
    AttendNvfp4(p, memory, o, lse);
  } else if (p.kv_dtype == DType::kFp8E4M3) {
    AttendCells<target::Float8Cells<DType::kFp8E4M3>>(p, memory, o, lse);
  } else if (p.kv_dtype == DType::kFp8E5M2) {
    AttendCells<target::Float8Cells<DType::kFp8E5M2>>(p, memory, o, lse);
  } else {
    switch (AskedLines(p.queries.rows * p.queries.heads, PrefetcherGoesOn())) {
      case 4:
        return AttendCells<target::Bf16CellsAsking<4>>(p, memory, o, lse);
      case 2:
        return AttendCells<target::Bf16CellsAsking<2>>(p, memory, o, lse);
      default:
        return AttendCells<target::Bf16Cells>(p, memory, o, lse);
    }
  }
}

}  // namespace tributary::cpu
HWY_AFTER_NAMESPACE();
#pragma GCC pop_options
#endif  // HWY_TARGET == HWY_AVX3_DL

#if HWY_ONCE && (HWY_TARGETS & HWY_AVX3_DL) == 0
namespace tributary::cpu {
void AttendChunkBf16(const ChunkParams&, std::byte*, float*, float*) {}  // HasBf16Dot() is false
}  // namespace tributary::cpu
#endif
