#include "kernels/cpu/attend_chunk.h"

#include "kernels/cpu/chunk_tiles.h"
#include "kernels/cpu/instruction_set.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/attend_chunk.cc"
#include "hwy/foreach_target.h"
// After foreach_target:
#include "hwy/highway.h"
#include "kernels/cpu/chunk_pass-inl.h"
#include "kernels/cpu/float_math-inl.h"

HWY_BEFORE_NAMESPACE();
namespace tributary::cpu {
namespace HWY_NAMESPACE {

void AttendChunkFloat(const ChunkParams& p, std::byte* memory, float* o, float* lse) {
  ChunkPass<FloatMath>(p, memory).Run(o, lse);
}

}  // namespace HWY_NAMESPACE
}  // namespace tributary::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace tributary::cpu {

HWY_EXPORT(AttendChunkFloat);

// Defined in attend_chunk_bf16.cc; to be called only where HasBf16Dot().
void AttendChunkBf16(const ChunkParams& p, std::byte* memory, float* o, float* lse);

namespace {

// The dot-product instruction takes elements that are exact in bf16.
bool FitsBf16(DType type) { return type == DType::kBf16 || IsFp8(type) || type == DType::kNvfp4; }

}  // namespace

Workspace::Workspace(int32_t query_vectors, int32_t key_dim, int32_t value_dim)
    : data_(hwy::AllocateAligned<std::byte>(
          WorkspaceLayout(query_vectors, key_dim, value_dim).bytes)) {}

void AttendChunk(const ChunkParams& p, const Workspace& workspace, float* o, float* lse) {
  if (FitsBf16(p.kv_dtype) && HasBf16Dot()) {
    AttendChunkBf16(p, workspace.data(), o, lse);
  } else {
    HWY_DYNAMIC_DISPATCH(AttendChunkFloat)(p, workspace.data(), o, lse);
  }
}

}  // namespace tributary::cpu
#endif  // HWY_ONCE
