// Which decode kernel a call takes, and what its plan is made from. Pure functions: they look at no
// device, so tests call them without one.
#pragma once

#include <cstdint>
#include <string>

#include "kernels/cuda/architectures.h"
#include "kernels/cuda/plan/plan.h"
#include "kernels/cuda/plan/shared_plan.h"
#include "kernels/dtype.h"
#include "kernels/kv_geometry.h"
#include "kernels/status.h"

namespace tributary::cuda {

struct DeviceProperties {
  int32_t compute_capability = 0;  // 10 * major + minor
  int32_t multiprocessors = 0;
  // How many clusters of 2, 4 and 8 thread blocks run at once, one block per multiprocessor; 0:
  // unknown.
  int32_t clusters[3] = {};
};

// What a kernel is chosen from.
struct AttentionShape {
  KvGeometry geometry;    // of the cache; a row of kernels/head_dims.h
  int32_t q_heads = 0;    // kv_heads times 1 to kMaxGqaRatio
  int32_t page_size = 0;  // 16, 32, 64 or 128
  int32_t max_rows = 1;   // query rows of one sequence
  // About what a call has; these matter for speed only.
  int32_t sequences = 1;
  int64_t total_keys = 0;  // of all sequences
};

struct KernelOptions {
  // Leaves out what only one architecture has.
  bool portable = false;
  // A sequence's result does not depend on what else is in the batch, down to the last bit. That
  // takes the same max_rows in every call, because max_rows decides the kernel.
  bool batch_invariant = false;
  // A launch may begin while the one ahead of it ends. Benchmarks of single launches turn it off.
  bool begins_early = true;
  // Over an FP8 cache: queries are rounded to e4m3, too, with one scale per row and head. kWgmmaFp8
  // then computes half as many products of queries and keys.
  bool fp8_queries = false;
};

enum class KernelKind {
  kMma,       // decode/sm80/mma_attention: sm_80 and later; query tiles of 8 or 16
  kWgmma,     // decode/sm90/wgmma_attention: wgmma; query tiles of 32 or 64
  kWgmmaFp8,  // decode/sm90/wgmma_fp8_attention: FP8 and NVFP4 caches alone; query tiles of 64
  kTcgen05,   // decode/sm100, where there is tcgen05; query tiles as kMma's
};

struct KernelChoice {
  KernelKind kind = KernelKind::kMma;
  int32_t tile_rows = 8;      // packed rows of a query tile
  int32_t share_strips = 16;  // strips that a thread block takes in one round
  int32_t blocks_per_multiprocessor = 1;
  int32_t cluster_size = 1;   // thread blocks that share each item and merge in shared memory
  bool begins_early = false;  // KernelOptions
  bool batch_invariant = false;
  bool fp8_queries = false;
  bool rings = false;  // kMma over NVFP4: strips come through shared memory (decode/sm90/mma_rings)
};
// "mma, tile 8, clusters of 4", for logs and benchmarks.
std::string ToString(const KernelChoice& choice);

// The kernel for calls of this shape.
KernelChoice ChooseKernel(const DeviceProperties& device, const AttentionShape& shape,
                          const KernelOptions& options = {});
// The same on a device whose code has these features.
KernelChoice ChooseKernelWith(const Features& can, const DeviceProperties& device,
                              const AttentionShape& shape, const KernelOptions& options = {});

// The kernel that a launch of this choice runs. kWgmmaFp8 takes queries in bf16 without a soft cap;
// others go to kWgmma, which runs the same plans.
KernelKind LaunchedKind(const KernelChoice& choice, DType q, float soft_cap);

// What the choice's plans are made from.
DecodePlanShape DecodePlanShapeFor(const KernelChoice& choice, const AttentionShape& shape,
                                   const DeviceProperties& device);

// What sharing pages among sequences (plan/shared_plan.h) costs and saves in calls of this shape.
SharingCosts SharingCostsFor(const DeviceProperties& device, const AttentionShape& shape,
                             const KernelOptions& options = {});

// Refuses, naming the field, what no kernel here supports.
Status Validate(const AttentionShape& shape);
Status Validate(const AttentionShape& shape, const KernelOptions& options);

}  // namespace tributary::cuda
