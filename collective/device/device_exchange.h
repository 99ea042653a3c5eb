// The exchange of partials in device memory: shapes, the choice of a strategy, what it costs.
// DeviceGroup (device_group.h) runs it.
//
// Besides the three strategies of exchange.h there is `direct`: one kernel that stores partials
// into peers' memory and merges what it receives (direct_kernel.h). It needs every pair of ranks to
// reach each other's memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "collective/direct/direct_layout.h"
#include "collective/exchange.h"
#include "kernels/dtype.h"
#include "kernels/status.h"

namespace tributary::collective {

// Everything is device memory of the rank's GPU, 16-byte aligned.
struct DeviceExchangeParams {
  const void* o = nullptr;      // [rows, heads, head_dim] of o_dtype, this rank's partial
  DType o_dtype = DType::kF32;  // f32, or the wire's type
  const float* lse = nullptr;   // [rows, heads], natural log
  int32_t rows = 0;
  int32_t heads = 0;
  int32_t head_dim = 0;  // a multiple of 8
  // `direct` only, and o of f32: o and lse are written by the launch ahead in the stream, and are
  // exchanged row by row as they come, beside its end. Every word of both is kNotArrived
  // (direct_layout.h) when that launch begins, and again when the exchange has ended; both are then
  // written in spite of their type. Whatever is ahead of that launch has ended when it begins.
  bool partial_arrives = false;
  const float* sinks = nullptr;  // [heads] or nullptr; applied once, after the merge
  Placement placement = Placement::kGathered;
  Strategy strategy = Strategy::kAuto;
  // O travels as f32, bf16 or f16; LSE always as f32. Every rank's partial is rounded to it, its
  // own too, so that a result does not depend on which rank held what. (A group of one rounds
  // nothing.)
  DType wire = DType::kBf16;
  // gathered: [rows, heads, head_dim] on rank 0, ignored elsewhere;
  // scattered: [rows, slice.count, head_dim] on every rank (SliceOfRank of exchange.h).
  void* out = nullptr;
  DType out_dtype = DType::kBf16;  // f32, bf16 or f16
  float* lse_out = nullptr;        // same without head_dim; LSE without the sink; may be nullptr
};

// Slices of all ranks [rows, slice.count, head_dim] become [rows, heads, head_dim] on rank 0.
struct DeviceGatherParams {
  const void* slice = nullptr;       // of dtype
  const float* slice_lse = nullptr;  // [rows, slice.count] or nullptr, alike on every rank
  DType dtype = DType::kBf16;        // f32, bf16 or f16
  int32_t rows = 0;
  int32_t heads = 0;
  int32_t head_dim = 0;      // a multiple of 8
  void* out = nullptr;       // rank 0
  float* lse_out = nullptr;  // rank 0: [rows, heads] or nullptr
};

// The largest call a group is made for. A call fits when rows * heads * head_dim bytes do, so one
// with fewer heads may have more rows.
struct DeviceExchangeLimits {
  int32_t rows = 512;
  int32_t heads = 32;
  int32_t head_dim = 128;
  DType widest = DType::kF32;  // of wire and output
};

struct DeviceExchangeCapability {
  int32_t ranks = 1;
  DeviceExchangeLimits limits;
  std::string no_nccl;    // why NCCL cannot be used; empty: it can
  std::string no_direct;  // why peers' memory cannot be used; empty: it can
};

// The strategy for a call: a pure function. `forced` other than kAuto wins or is refused.
// kInvalidArgument names the field; kFailedPrecondition lists what was tried and why not.
Status ChooseDeviceStrategy(const DeviceExchangeParams& params,
                            const DeviceExchangeCapability& capability, Strategy* out);

// The most rows, up to the call's own, that a group with this capability takes at once; a call with
// more of them is made in pieces, whose rows follow each other. The same on every rank. 0: not even
// one row fits, or the strategy is not there.
int32_t RowsAtOnce(const DeviceExchangeParams& params, const DeviceExchangeCapability& capability);
int32_t RowsAtOnce(const DeviceGatherParams& params, const DeviceExchangeCapability& capability);

// What PlanDirect is asked about a call.
DirectShape DirectShapeOf(const DeviceExchangeParams& params);
DirectShape DirectShapeOf(const DeviceGatherParams& params);

// Bytes that a rank other than 0 sends to its peers.
size_t DeviceBytesSent(const DeviceExchangeParams& params, int32_t ranks, Strategy strategy);

// Shapes, types and pointers, for `rank` of `ranks`.
Status CheckDeviceExchange(const DeviceExchangeParams& params, int32_t rank, int32_t ranks);
Status CheckDeviceGather(const DeviceGatherParams& params, int32_t rank, int32_t ranks);

}  // namespace tributary::collective
