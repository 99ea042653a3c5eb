// Attention over a paged cache on one GPU: choose a kernel, plan on the host, launch.
//
//   const KernelChoice choice = ChooseKernel(device, shape);            // once a cache
//   PlanAttention(PlanShapeFor(choice, shape, device), entries, keys, &plan);   // once a step
//   ... copy plan.items and plan.keys to the device ...
//   LaunchAttention(choice, shape, args, device.blocks, stream);        // once a layer
//
// A launch allocates nothing, waits for nothing and reads nothing back, so it can be captured in a
// CUDA graph; replaying the graph after copying another plan to the same place runs that plan.
#pragma once

#include <cuda_runtime.h>

#include <string>

#include "kernels/cuda/attention_args.h"
#include "kernels/cuda/plan.h"
#include "kernels/status.h"

namespace tributary::cuda {

struct DeviceProperties {
  int32_t compute_capability = 0;  // 10 * major + minor
  int32_t multiprocessors = 0;
};
Status QueryDevice(int device, DeviceProperties* properties);

// What a kernel is chosen from.
struct AttentionShape {
  DType kv = DType::kBf16;
  int32_t head_dim = 0;   // 64, 128 or 256
  int32_t q_heads = 0;    // kv_heads times 1..16
  int32_t kv_heads = 0;
  int32_t page_size = 0;  // 16, 32, 64 or 128
  int32_t max_rows = 1;   // query rows of one sequence
};

enum class KernelKind {
  kMma,    // sm_80 and later; 8 or 16 columns a block
  kWgmma,  // sm_90a; 32 or 64 columns a block
};

struct KernelChoice {
  KernelKind kind = KernelKind::kMma;
  int32_t columns = 8;        // a block of columns
  int32_t share_groups = 16;  // groups of 16 tokens that a block of threads takes in one round
};
// "mma, 8 columns", for logs and benchmarks.
std::string ToString(const KernelChoice& choice);

// A pure function of its arguments. `portable` leaves out what only one architecture has.
KernelChoice ChooseKernel(const DeviceProperties& device, const AttentionShape& shape,
                          bool portable = false);

PlanShape PlanShapeFor(const KernelChoice& choice, const AttentionShape& shape,
                       const DeviceProperties& device, bool batch_invariant = false);

// Refuses, naming the field, what no kernel here supports.
Status Validate(const AttentionShape& shape);

// Attention for plan shape `plan`, of which `args.items` is a plan's device copy.
Status LaunchAttention(const KernelChoice& choice, const AttentionShape& shape,
                       const AttentionArgs& args, int32_t blocks, cudaStream_t stream);

}  // namespace tributary::cuda
