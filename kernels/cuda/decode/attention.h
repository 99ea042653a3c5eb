// Attention over a paged cache on one GPU: choose a kernel, plan on the host, launch.
//
//   const KernelChoice choice = ChooseKernel(device, shape);            // once a cache
//   const DecodePlanShape plan_shape = DecodePlanShapeFor(choice, shape, device);
//   PlanAttention(plan_shape, entries, keys, &plan);                    // once a step
//   ... copy plan.items and plan.keys to the device ...
//   LaunchAttention(choice, shape, args, plan_shape.blocks, stream);    // once a layer
//
// A launch allocates nothing, waits for nothing and reads nothing back, so it can be captured in a
// CUDA graph; replaying the graph after copying another plan to the same place runs that plan.
//
// On sm_90 a launch begins before the one ahead of it in the stream has ended, and reads the plan
// and the page tables at once: these must have been written by copies, not by a kernel. The cache,
// the queries and whatever else kernels write is read when all launches ahead have ended. Behind an
// append that itself waits for what is ahead of it, the kernels for few columns wait only where
// they come to its tokens (AttentionArgs::late_strips).
#pragma once

#include <cuda_runtime.h>

#include <string>

#include "kernels/cuda/decode/attention_args.h"
#include "kernels/cuda/plan/plan.h"
#include "kernels/kv_geometry.h"
#include "kernels/status.h"

namespace tributary::cuda {

struct DeviceProperties {
  int32_t compute_capability = 0;  // 10 * major + minor
  int32_t multiprocessors = 0;
  // Clusters of 2, 4 and 8 blocks that run at once, a block to a multiprocessor; 0: unknown.
  int32_t clusters[3] = {};
};
Status QueryDevice(int device, DeviceProperties* properties);

// What a kernel is chosen from.
struct AttentionShape {
  KvGeometry geometry;    // of the cache; a row of kernels/head_dims.h
  int32_t q_heads = 0;    // kv_heads times 1 to kMaxGqaRatio
  int32_t page_size = 0;  // 16, 32, 64 or 128
  int32_t max_rows = 1;   // query rows of one sequence
  // About what a call has; a matter of speed alone.
  int32_t sequences = 1;
  int64_t total_keys = 0;  // of all sequences
};

struct KernelOptions {
  // Leaves out what only one architecture has.
  bool portable = false;
  // A sequence's result must not depend on what else is in the batch, down to the last bit. That
  // takes the same max_rows in every call: it decides the kernel.
  bool batch_invariant = false;
  // A launch may begin while the one ahead of it ends. For benchmarks of one launch by itself.
  bool begins_early = true;
  // Over an FP8 cache: queries are rounded to e4m3, too, with a scale a row and head. The kernel of
  // wide FP8 blocks then has half as many products of queries and keys.
  bool fp8_queries = false;
};

enum class KernelKind {
  kMma,    // sm_80 and later; 8 or 16 columns a block
  kWgmma,  // sm_90a; 32 or 64 columns a block
};

struct KernelChoice {
  KernelKind kind = KernelKind::kMma;
  int32_t tile_rows = 8;      // a block of columns
  int32_t share_strips = 16;  // groups of 16 tokens that a block of threads takes in one round
  int32_t blocks_per_multiprocessor = 1;
  int32_t cluster_size = 1;   // blocks that share each item and merge through shared memory
  bool begins_early = false;  // see above
  bool batch_invariant = false;
  bool fp8_queries = false;
};
// "mma, 8 columns, clusters of 4", for logs and benchmarks.
std::string ToString(const KernelChoice& choice);

// A pure function of its arguments.
KernelChoice ChooseKernel(const DeviceProperties& device, const AttentionShape& shape,
                          const KernelOptions& options = {});

DecodePlanShape DecodePlanShapeFor(const KernelChoice& choice, const AttentionShape& shape,
                                   const DeviceProperties& device);

// Refuses, naming the field, what no kernel here supports.
Status Validate(const AttentionShape& shape);
Status Validate(const AttentionShape& shape, const KernelOptions& options);

// AttentionArgs::late_strips behind a launch that appends up to so many tokens to a sequence.
int32_t LateStripsOf(int32_t tokens);

// Whether a launch over the context of drafts may take their blocks with it (AttentionArgs::block):
// one that would run the kernel of wide FP8 blocks.
bool MayAttendBlock(const KernelChoice& choice, const AttentionShape& shape, DType q,
                    DType block_kv, float soft_cap);

// Attention for a plan of `blocks` blocks, whose device copy `args.items` is.
Status LaunchAttention(const KernelChoice& choice, const AttentionShape& shape,
                       const AttentionArgs& args, int32_t blocks, cudaStream_t stream);

}  // namespace tributary::cuda
