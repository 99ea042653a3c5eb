// Launches the kernels that exchange and merge by storing into the memory of peers. direct_layout.h
// describes the memory, direct_protocol.cuh the protocol on the device, and docs/architecture.md
// says why it is safe.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "collective/direct/direct_layout.h"
#include "kernels/dtype.h"
#include "kernels/status.h"

namespace tributary::collective {

struct DirectArgs {
  std::byte* memory[kMaxDirectRanks] =
      {};  // of every rank, at the address where this rank reaches it
  DirectLayout layout;
  DirectPlan plan;
  int32_t rank = 0;
  int32_t rows = 0;
  int32_t heads = 0;
  int32_t value_dim = 0;
  // Heads [first_head[r], first_head[r + 1]) go to rank r; SetHeads fills it from route and heads.
  int32_t first_head[kMaxDirectRanks + 1] = {};
  // kGather: merged heads [rows, slice.count, value_dim] of out_dtype and their LSE or nullptr;
  // otherwise the partial [rows, heads, value_dim] and its LSE.
  void* o = nullptr;
  float* lse = nullptr;
  // The partial, which is f32, is still being written: each word of it reads kNotArrived until it
  // is there, and again once the kernel has read it.
  bool partial_arrives = false;
  const float* sinks = nullptr;
  void* out = nullptr;
  float* lse_out = nullptr;
  DType out_dtype = DType::kBf16;  // f32, bf16 or f16
  uint64_t bound_ns = 0;           // the longest that a wait may take
  uint32_t* host_failure =
      nullptr;  // host memory that the GPU reaches; failures are reported there

  // Bytes of one element of `out`. (SizeOf knows more types, and a kernel that asks it for one that
  // is not constant takes 0.1 us longer.)
  TRIBUTARY_HOST_DEVICE constexpr int32_t OutBytes() const {
    return out_dtype == DType::kF32 ? 4 : 2;
  }
};

// Fills args->first_head from the route and the heads.
void SetHeads(DirectArgs* args);

// `o_dtype` may travel as `wire` (device_exchange.h, MayTravelAs).
Status LaunchDirect(const DirectArgs& args, DType o_dtype, DType wire, bool overlap_launch,
                    cudaStream_t stream);

// One word in the memory of each rank; `at` is null for ranks that get none.
struct PeerWords {
  std::byte* at[kMaxDirectRanks] = {};
  uint32_t value[kMaxDirectRanks] = {};
};

// Stores each word where 0 stands. A rank may still store there between the look and the store:
// either word ends the exchange, and each rank reports what it finds first.
Status LaunchStoreIfZero(const PeerWords& words, cudaStream_t stream);

// All kernels of this file (kernels/cuda/launch/load_kernels.h).
Status LoadDirectKernels();

}  // namespace tributary::collective
