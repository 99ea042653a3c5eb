// The exchange of partials in device memory: what a call is given, and whether it is well formed.
// DeviceGroup (collective/group/device_group.h) runs it.
#pragma once

#include <cstdint>

#include "collective/exchange/head_slice.h"  // IWYU pragma: export
#include "collective/exchange/strategy.h"    // IWYU pragma: export
#include "kernels/dtype.h"
#include "kernels/status.h"

namespace tributary::collective {

// Everything is device memory of the rank's GPU, 16-byte aligned.
struct DeviceExchangeParams {
  const void* o = nullptr;      // [rows, heads, value_dim] of o_dtype, this rank's partial
  DType o_dtype = DType::kF32;  // f32, or the wire's type
  const float* lse = nullptr;   // [rows, heads], natural log
  int32_t rows = 0;
  int32_t heads = 0;
  int32_t value_dim = 0;  // a multiple of 8
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
  // gathered: [rows, heads, value_dim] on rank 0, ignored elsewhere;
  // scattered: [rows, slice.count, value_dim] on every rank (SliceOfRank of exchange.h).
  void* out = nullptr;
  DType out_dtype = DType::kBf16;  // f32, bf16 or f16
  float* lse_out = nullptr;        // same without value_dim; LSE without the sink; may be nullptr
};

// Slices of all ranks [rows, slice.count, value_dim] become [rows, heads, value_dim] on rank 0.
struct DeviceGatherParams {
  const void* slice = nullptr;       // of dtype
  const float* slice_lse = nullptr;  // [rows, slice.count] or nullptr, alike on every rank
  DType dtype = DType::kBf16;        // f32, bf16 or f16
  int32_t rows = 0;
  int32_t heads = 0;
  int32_t value_dim = 0;     // a multiple of 8
  void* out = nullptr;       // rank 0
  float* lse_out = nullptr;  // rank 0: [rows, heads] or nullptr
};

// The largest call a group is made for. A call fits when rows * heads * value_dim bytes do, so one
// with fewer heads may have more rows.
struct DeviceExchangeLimits {
  int32_t rows = 512;
  int32_t heads = 32;
  int32_t value_dim = 128;
  DType widest = DType::kF32;  // of wire and output
};

// Whether O of type `o` may travel as `wire`: f32 as anything wider than FP8, others as what they
// are.
bool MayTravelAs(DType o, DType wire);

// Shapes, types and pointers, for `rank` of `ranks`.
Status CheckDeviceExchange(const DeviceExchangeParams& params, int32_t rank, int32_t ranks);
Status CheckDeviceGather(const DeviceGatherParams& params, int32_t rank, int32_t ranks);

}  // namespace tributary::collective
