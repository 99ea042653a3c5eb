#include "worker/cuda/device_exchange.h"

#include <algorithm>
#include <cstddef>

#include "absl/strings/str_cat.h"
#include "base/status/status_macros.h"
#include "worker/status_conversion.h"

namespace tributary::worker {
namespace {

using collective::DeviceExchangeParams;
using collective::DeviceGatherParams;
using collective::Placement;

// CacheSpec bounds heads and head dimensions far below this.
absl::Status RowTooLarge(int32_t heads, int32_t value_dim) {
  return absl::InternalError(absl::StrCat("a row of ", heads, " heads of ", value_dim,
                                          " does not fit the exchange between GPUs"));
}

}  // namespace

// ag_rs adds in the wire's type, and a step's result may depend on its other requests' types only
// where it may depend on them at all.
DType DeviceExchange::WireOf(const PlannedStep& step, collective::Strategy strategy,
                             bool batch_invariant) {
  const bool narrow =
      step.bf16_partials && !batch_invariant && strategy != collective::Strategy::kAgRs;
  return narrow ? DType::kBf16 : DType::kF32;
}

DeviceExchangeParams DeviceExchange::ParamsFor(int32_t rows, Placement placement) const {
  return {.o_dtype = DType::kF32,
          .rows = rows,
          .heads = step_.geometry().q_heads,
          .value_dim = step_.geometry().kv.value_dim,
          .placement = placement,
          .strategy = strategy_,
          .wire = wire_,
          .out_dtype = DType::kF32};
}

bool DeviceExchange::MayBeCaptured(int32_t rows) const {
  // Pieces are all alike: `direct` takes the last, which has fewer rows, wherever it takes more.
  return rows == 0 || RowsOfDirect(rows) > 0;
}

bool DeviceExchange::MayArrive(int32_t rows) const {
  return rows > 0 && RowsOfDirect(rows) == rows;
}

int32_t DeviceExchange::RowsOfDirect(int32_t rows) const {
  DeviceExchangeParams params = ParamsFor(rows, Placement::kGathered);
  params.rows = collective::RowsAtOnce(params, group_.capability());
  collective::Strategy strategy = collective::Strategy::kAuto;
  const bool direct =
      params.rows > 0 &&
      collective::ChooseDeviceStrategy(params, group_.capability(), &strategy).ok() &&
      strategy == collective::Strategy::kDirect;
  return direct ? params.rows : 0;
}

absl::Status DeviceExchange::MergeToRoot(int32_t rows, Partial partial, const float* sinks,
                                         Partial out, bool arrives) {
  DeviceExchangeParams params = ParamsFor(rows, Placement::kGathered);
  params.sinks = sinks;
  params.partial_arrives = arrives;
  return Merge(params, step_.geometry().q_heads, partial, out);
}

absl::Status DeviceExchange::MergeToSlices(int32_t rows, Partial partial, Partial out) {
  return Merge(ParamsFor(rows, Placement::kScattered), OwnHeads(), partial, out);
}

absl::Status DeviceExchange::Merge(DeviceExchangeParams params, int32_t out_heads, Partial partial,
                                   Partial out) {
  return InPieces(params, [&](DeviceExchangeParams& piece, int32_t row) {
    const Partial from = Advance(partial, row, piece.heads);
    const Partial to = Advance(out, row, out_heads);
    piece.o = from.o;
    piece.lse = from.lse;
    piece.out = to.o;
    piece.lse_out = to.lse;
    return group_.Exchange(piece, stream_);
  });
}

absl::Status DeviceExchange::GatherToRoot(int32_t rows, Partial slice, Partial out) {
  const DeviceGatherParams params{.dtype = DType::kF32,
                                  .rows = rows,
                                  .heads = step_.geometry().q_heads,
                                  .value_dim = step_.geometry().kv.value_dim};
  return InPieces(params, [&](DeviceGatherParams& piece, int32_t row) {
    const Partial from = Advance(slice, row, OwnHeads());
    const Partial to = Advance(out, row, piece.heads);
    piece.slice = from.o;
    piece.slice_lse = from.lse;
    piece.out = to.o;
    piece.lse_out = to.lse;
    return group_.GatherSlices(piece, stream_);
  });
}

template <typename Params, typename Enqueue>
absl::Status DeviceExchange::InPieces(Params params, Enqueue enqueue) {
  const int32_t rows = params.rows;
  const int32_t most = collective::RowsAtOnce(params, group_.capability());
  if (rows > 0 && most == 0) return RowTooLarge(params.heads, params.value_dim);
  for (int32_t row = 0; row < rows; row += most) {
    params.rows = std::min(most, rows - row);
    TRIBUTARY_RETURN_IF_ERROR(CollectiveStatus(enqueue(params, row)));
  }
  return absl::OkStatus();
}

int32_t DeviceExchange::OwnHeads() const {
  return collective::SliceOfRank(step_.geometry().q_heads, group_.size(), group_.rank()).count;
}

// Where nothing is wanted, nothing is wanted further on either.
DeviceExchange::Partial DeviceExchange::Advance(Partial partial, int32_t rows,
                                                int32_t heads) const {
  if (partial.o == nullptr) return {};
  const size_t pairs = static_cast<size_t>(rows) * static_cast<size_t>(heads);
  return {partial.o + pairs * static_cast<size_t>(step_.geometry().kv.value_dim),
          partial.lse + pairs};
}

}  // namespace tributary::worker
