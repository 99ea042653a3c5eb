#include "collective/device/device_exchange.h"

#include <algorithm>

#include "collective/device/device_strategies.h"
#include "collective/device/pack.h"
#include "collective/direct/direct_kernel.h"
#include "collective/direct/direct_layout.h"

namespace tributary::collective {
namespace {

Status CheckDims(int32_t rows, int32_t heads, int32_t head_dim) {
  if (rows < 0) return InvalidArgument("rows is negative: " + std::to_string(rows));
  if (heads < 0) return InvalidArgument("heads is negative: " + std::to_string(heads));
  if (head_dim < 8 || head_dim % 8 != 0 || head_dim > 1024) {
    return InvalidArgument("head_dim is not a multiple of 8 up to 1024: " +
                           std::to_string(head_dim));
  }
  return Status::Ok();
}

bool Aligned(const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; }

Status CheckArray(const void* p, const char* name) {
  if (p == nullptr) return InvalidArgument(std::string(name) + " is null");
  if (!Aligned(p)) return InvalidArgument(std::string(name) + " is not aligned to 16 bytes");
  return Status::Ok();
}

size_t OfCall(int64_t rows, int64_t heads, int64_t head_dim, DType type) {
  return static_cast<size_t>(rows * heads * head_dim) * SizeOf(type);
}

bool Fits(const DeviceExchangeParams& p, const DeviceExchangeLimits& l) {
  const DType wide = SizeOf(p.wire) > SizeOf(p.out_dtype) ? p.wire : p.out_dtype;
  // LSEs are a small share at head_dim 8 too, and none of it is counted for limits of head_dim 64.
  return OfCall(p.rows, p.heads, p.head_dim, wide) <=
             OfCall(l.rows, l.heads, l.head_dim, l.widest) &&
         static_cast<int64_t>(p.rows) * p.heads <= static_cast<int64_t>(l.rows) * l.heads;
}

bool FitsDirect(const DirectShape& shape, const DeviceExchangeCapability& c) {
  const DeviceExchangeLimits& l = c.limits;
  DirectPlan plan;
  return PlanDirect(shape, LayOutDirect(c.ranks, l.rows, l.heads, l.head_dim, l.widest), {}, &plan);
}

// Half as many rows until they fit.
template <typename Fitting>
int32_t MostRows(int32_t rows, const Fitting& fit) {
  while (rows > 0 && !fit(rows)) rows = rows == 1 ? 0 : (rows + 1) / 2;
  return rows;
}

}  // namespace

DirectShape DirectShapeOf(const DeviceExchangeParams& p) {
  return {.rows = p.rows,
          .heads = p.heads,
          .head_dim = p.head_dim,
          .placement = p.placement,
          .wire = p.wire,
          .out = p.out_dtype};
}

DirectShape DirectShapeOf(const DeviceGatherParams& p) {
  return {.rows = p.rows, .heads = p.heads, .head_dim = p.head_dim, .merged = true, .out = p.dtype};
}

int32_t RowsAtOnce(const DeviceExchangeParams& params, const DeviceExchangeCapability& c) {
  return MostRows(params.rows, [&](int32_t rows) {
    DeviceExchangeParams p = params;
    p.rows = rows;
    Strategy strategy = Strategy::kAuto;
    if (!ChooseDeviceStrategy(p, c, &strategy).ok()) return false;
    return c.ranks == 1 || strategy == Strategy::kDirect ||
           DeviceWorkspaceBytes(p, c.ranks, strategy) <= DeviceWorkspaceBytes(c.limits, c.ranks);
  });
}

int32_t RowsAtOnce(const DeviceGatherParams& params, const DeviceExchangeCapability& c) {
  return MostRows(params.rows, [&](int32_t rows) {
    DeviceGatherParams p = params;
    p.rows = rows;
    if (c.ranks == 1) return true;
    if (c.no_direct.empty() && FitsDirect(DirectShapeOf(p), c)) return true;
    return c.no_nccl.empty() &&
           DeviceWorkspaceBytes(p, c.ranks) <= DeviceWorkspaceBytes(c.limits, c.ranks);
  });
}

Status CheckDeviceExchange(const DeviceExchangeParams& p, int32_t rank, int32_t ranks) {
  if (Status s = CheckDims(p.rows, p.heads, p.head_dim); !s.ok()) return s;
  if (IsFp8(p.wire)) return InvalidArgument("wire must be f32, bf16 or f16");
  if (!DirectTypesSupported(p.o_dtype, p.wire)) {
    return InvalidArgument(std::string("o_dtype must be f32 or the wire's, not ") +
                           Name(p.o_dtype));
  }
  if (IsFp8(p.out_dtype)) return InvalidArgument("out_dtype must be f32, bf16 or f16");
  if (p.partial_arrives && p.o_dtype != DType::kF32) {
    return InvalidArgument("partial_arrives: o_dtype must be f32");
  }
  if (p.rows == 0 || p.heads == 0) return Status::Ok();
  if (Status s = CheckArray(p.o, "o"); !s.ok()) return s;
  if (p.lse == nullptr) return InvalidArgument("lse is null");
  const bool writes =
      p.placement == Placement::kGathered ? rank == 0 : SliceOfRank(p.heads, ranks, rank).count > 0;
  return writes ? CheckArray(p.out, "out") : Status::Ok();
}

Status CheckDeviceGather(const DeviceGatherParams& p, int32_t rank, int32_t ranks) {
  if (Status s = CheckDims(p.rows, p.heads, p.head_dim); !s.ok()) return s;
  if (IsFp8(p.dtype)) return InvalidArgument("dtype must be f32, bf16 or f16");
  if (p.rows == 0 || p.heads == 0) return Status::Ok();
  if (SliceOfRank(p.heads, ranks, rank).count > 0) {
    if (Status s = CheckArray(p.slice, "slice"); !s.ok()) return s;
  }
  if (rank != 0) return Status::Ok();
  if (p.lse_out != nullptr && p.slice_lse == nullptr) {
    return InvalidArgument("lse_out is wanted but slice_lse is null");
  }
  return CheckArray(p.out, "out");
}

Status ChooseDeviceStrategy(const DeviceExchangeParams& p, const DeviceExchangeCapability& c,
                            Strategy* out) {
  if (!Fits(p, c.limits)) {
    return {StatusCode::kFailedPrecondition,
            std::to_string(p.rows) + " rows of " + std::to_string(p.heads) + " heads of " +
                std::to_string(p.head_dim) + " are more than the group is made for (" +
                std::to_string(c.limits.rows) + " rows of " + std::to_string(c.limits.heads) +
                " heads of " + std::to_string(c.limits.head_dim) + ")"};
  }
  // Nothing is exchanged; any name will do.
  if (c.ranks == 1) {
    *out = p.strategy == Strategy::kAuto ? Strategy::kAllGather : p.strategy;
    return Status::Ok();
  }
  std::string no_direct = c.no_direct;
  if (no_direct.empty() && !FitsDirect(DirectShapeOf(p), c)) {
    no_direct = "heads are dealt so unevenly that the widest slice does not fit";
  }
  if (p.strategy != Strategy::kAuto) {
    const std::string& why = p.strategy == Strategy::kDirect ? no_direct : c.no_nccl;
    if (!why.empty()) {
      return {StatusCode::kFailedPrecondition, std::string(Name(p.strategy)) + ": " + why};
    }
    *out = p.strategy;
    return Status::Ok();
  }
  // One launch instead of three or more, at link speed: nothing of NCCL's was faster at any size
  // that was measured (docs/benchmarks.md).
  if (no_direct.empty()) {
    *out = Strategy::kDirect;
    return Status::Ok();
  }
  if (!c.no_nccl.empty()) {
    return {StatusCode::kFailedPrecondition,
            "direct: " + no_direct + "; all_gather, ag_rs, a2a: " + c.no_nccl};
  }
  // a2a needs one operation for scattered heads and a second one to gather them; all_gather sends
  // rank 0 everything in one, which is faster while that is little.
  constexpr size_t kLittle = 256 << 10;
  const size_t all = DeviceBytesSent(p, c.ranks, Strategy::kAllGather);
  const bool one = p.placement == Placement::kGathered && (c.ranks == 2 || all <= kLittle);
  *out = one ? Strategy::kAllGather : Strategy::kA2a;
  return Status::Ok();
}

size_t DeviceBytesSent(const DeviceExchangeParams& p, int32_t ranks, Strategy strategy) {
  if (ranks == 1 || p.rows == 0 || p.heads == 0) return 0;
  const bool gathered = p.placement == Placement::kGathered;
  const size_t peers = ranks - 1;
  const size_t whole = LayOutParts(p.rows, p.heads, p.head_dim, 1, p.wire).stride;
  const PartsLayout part = LayOutParts(p.rows, p.heads, p.head_dim, ranks, p.wire);
  const size_t gather =
      gathered ? LayOutParts(p.rows, p.heads, p.head_dim, ranks, p.out_dtype).stride : 0;
  const size_t all_lse = sizeof(float) * p.rows * p.heads;
  switch (strategy) {
    case Strategy::kAllGather:
      return gathered ? whole : peers * whole;
    case Strategy::kAgRs:
      return peers * (all_lse + part.lse_offset) + gather;
    case Strategy::kA2a:
      return peers * part.stride + gather;
    case Strategy::kAuto:
    case Strategy::kDirect:
      break;
  }
  // The bytes of the data, and a word a peer and block for the bookkeeping.
  DirectPlan plan;
  if (!PlanDirect(DirectShapeOf(p), LayOutDirect(ranks, p.rows, p.heads, p.head_dim, DType::kF32),
                  {}, &plan)) {
    return 0;
  }
  const size_t books = peers * plan.blocks * sizeof(uint32_t);
  if (plan.route == DirectRoute::kOneHop) return whole + books;
  return peers * part.stride + gather + books;
}

}  // namespace tributary::collective
