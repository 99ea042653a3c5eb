#include "collective/group/device_choice.h"

#include <string>

#include "collective/device/device_strategies.h"
#include "collective/device/pack.h"
#include "collective/direct/direct_layout.h"
#include "kernels/cuda/merge/merge.h"

namespace tributary::collective {
namespace {

size_t OfCall(int64_t rows, int64_t heads, int64_t value_dim, DType type) {
  return static_cast<size_t>(rows * heads * value_dim) * SizeOf(type);
}

bool Fits(const DeviceExchangeParams& p, const DeviceExchangeLimits& l) {
  const DType wide = SizeOf(p.wire) > SizeOf(p.out_dtype) ? p.wire : p.out_dtype;
  // LSEs are a small share at value_dim 8 too, and none of it is counted for limits of
  // value_dim 64.
  return OfCall(p.rows, p.heads, p.value_dim, wide) <=
             OfCall(l.rows, l.heads, l.value_dim, l.widest) &&
         static_cast<int64_t>(p.rows) * p.heads <= static_cast<int64_t>(l.rows) * l.heads;
}

bool FitsDirect(const DirectShape& shape, const DeviceExchangeCapability& c) {
  const DeviceExchangeLimits& l = c.limits;
  DirectPlan plan;
  return PlanDirect(shape, LayOutDirect(c.ranks, l.rows, l.heads, l.value_dim, l.widest), {},
                    &plan);
}

// Whether one launch merges the partials of so many ranks. ag_rs merges by sums instead.
bool Merges(Strategy strategy, int32_t ranks) {
  return strategy == Strategy::kAgRs || ranks <= cuda::kMaxMergeSources;
}

// Half as many rows until they fit.
template <typename Fitting>
int32_t MostRows(int32_t rows, const Fitting& fit) {
  while (rows > 0 && !fit(rows)) rows = rows == 1 ? 0 : (rows + 1) / 2;
  return rows;
}

}  // namespace

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

Status ChooseDeviceStrategy(const DeviceExchangeParams& p, const DeviceExchangeCapability& c,
                            Strategy* out) {
  if (!Fits(p, c.limits)) {
    return {StatusCode::kFailedPrecondition,
            std::to_string(p.rows) + " rows of " + std::to_string(p.heads) + " heads of " +
                std::to_string(p.value_dim) + " are more than the group is made for (" +
                std::to_string(c.limits.rows) + " rows of " + std::to_string(c.limits.heads) +
                " heads of " + std::to_string(c.limits.value_dim) + ")"};
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
    if (p.strategy != Strategy::kDirect && !Merges(p.strategy, c.ranks)) {
      return {StatusCode::kFailedPrecondition, std::string(Name(p.strategy)) +
                                                   ": merges the partials of at most " +
                                                   std::to_string(cuda::kMaxMergeSources) +
                                                   " ranks, not of " + std::to_string(c.ranks)};
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
  if (!Merges(Strategy::kAllGather, c.ranks)) {
    *out = Strategy::kAgRs;
    return Status::Ok();
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
  const size_t whole = LayOutParts(p.rows, p.heads, p.value_dim, 1, p.wire).stride;
  const PartsLayout part = LayOutParts(p.rows, p.heads, p.value_dim, ranks, p.wire);
  const size_t gather =
      gathered ? LayOutParts(p.rows, p.heads, p.value_dim, ranks, p.out_dtype).stride : 0;
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
  if (!PlanDirect(DirectShapeOf(p), LayOutDirect(ranks, p.rows, p.heads, p.value_dim, DType::kF32),
                  {}, &plan)) {
    return 0;
  }
  const size_t books = peers * plan.blocks * sizeof(uint32_t);
  if (plan.route == DirectRoute::kOneHop) return whole + books;
  return peers * part.stride + gather + books;
}

}  // namespace tributary::collective
