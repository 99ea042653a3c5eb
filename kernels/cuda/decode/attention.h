// Attention over a paged cache on one GPU: choose a kernel, plan on the host, launch.
//
//   const KernelChoice choice = ChooseKernel(device, shape);                  // once per cache
//   const DecodePlanShape plan_shape = DecodePlanShapeFor(choice, shape, device);
//   PlanAttention(plan_shape, entries, keys, &plan);                          // once per step
//   ... copy plan.items and plan.keys to the device ...
//   LaunchAttention(choice, shape, args, plan_shape.blocks, stream);          // once per layer
//
// A launch allocates nothing, waits for nothing and reads nothing back, so it can be captured in a
// CUDA graph. Replaying the graph after copying another plan to the same place runs that plan.
//
// On sm_90 a launch begins before the one ahead of it in the stream has ended, and reads the plan
// and the page tables at once: these must have been written by copies, not by a kernel. The cache,
// the queries and whatever else kernels write is read when all launches ahead have ended. There is
// one exception: behind an append that itself waits for what is ahead of it, mma_attention waits
// only where it comes to the appended tokens (AttentionArgs::late_strips).
#pragma once

#include <cuda_runtime.h>

#include "kernels/cuda/decode/attention_args.h"
#include "kernels/cuda/decode/choose_kernel.h"
#include "kernels/cuda/plan/plan.h"
#include "kernels/status.h"

namespace tributary::cuda {

Status QueryDevice(int device, DeviceProperties* properties);

// AttentionArgs::late_strips behind a launch that appends up to so many tokens to a sequence.
int32_t LateStripsOf(int32_t tokens);

// Whether a launch over the context of drafts may take their draft blocks with it
// (AttentionArgs::block): only a launch that runs kWgmmaFp8 may.
bool MayAttendBlock(const KernelChoice& choice, DType q, DType block_kv, float soft_cap);

// Launches attention for a plan of `blocks` thread blocks or clusters, whose device copy is
// `args.items`.
Status LaunchAttention(const KernelChoice& choice, const AttentionShape& shape,
                       const AttentionArgs& args, int32_t blocks, cudaStream_t stream);

}  // namespace tributary::cuda
