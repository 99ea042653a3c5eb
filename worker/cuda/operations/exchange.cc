// CudaOperations: partials between ranks.
#include "worker/cuda/nvtx_range.h"
#include "worker/cuda/operations/operations.h"
#include "worker/cuda/session/gate_kernel.h"
#include "worker/cuda/status.h"

namespace tributary::worker {

absl::StatusOr<StepOperations::Partial> CudaOperations::BringToHost(Partial partial, int32_t rows,
                                                                    size_t heads) {
  const size_t row_heads = static_cast<size_t>(rows) * heads * sizeof(float);
  const Partial host{memory_.staged_o.as<float>(), memory_.staged_lse.as<float>()};
  if (row_heads > 0) {
    TRIBUTARY_CUDA_OK(cudaMemcpyAsync(host.o, partial.o, row_heads * ValueDim(),
                                      cudaMemcpyDeviceToHost, stream_));
    TRIBUTARY_CUDA_OK(
        cudaMemcpyAsync(host.lse, partial.lse, row_heads, cudaMemcpyDeviceToHost, stream_));
  }
  const TimedSection timed(results_.times.attend);
  TRIBUTARY_RETURN_IF_ERROR(rank_.Await(step_.deadline));
  return host;
}

absl::Status CudaOperations::StampAttention() const {
  if (place_.timed_gate.stamps == nullptr) return absl::OkStatus();
  return LaunchStamp(place_.timed_gate, stream_);
}

absl::Status CudaOperations::MergeToRoot(const RowPass& pass, Partial partial) {
  const NvtxRange range("merge to root", step_.layer_index);
  if (alone()) {
    // It lies where it belongs; AddBlock applied a draft's sinks.
    if (layer_.sinks == nullptr || is_draft()) return absl::OkStatus();
    return Merge(plan_.RowsOf(pass), geometry_.q_heads, layer_.sinks, partial, {}, partial);
  }
  if (device_exchange_.has_value()) {
    TRIBUTARY_RETURN_IF_ERROR(StampAttention());
    return device_exchange_->MergeToRoot(plan_.RowsOf(pass), partial, layer_.sinks, ResultOf(pass),
                                         partial_arrives_);
  }
  TRIBUTARY_ASSIGN_OR_RETURN(const Partial host, BringToHost(partial, pass.row_count, Heads()));
  return host_exchange_.MergeToRoot(pass, host);
}

absl::StatusOr<StepOperations::Partial> CudaOperations::MergeToSlices(const RowPass& pass,
                                                                      Partial partial) {
  if (alone()) return partial;
  const NvtxRange range("exchange to slices", step_.layer_index);
  const Partial context{memory_.context_o.as<float>(), memory_.context_lse.as<float>()};
  if (device_exchange_.has_value()) {
    TRIBUTARY_RETURN_IF_ERROR(StampAttention());
    TRIBUTARY_RETURN_IF_ERROR(device_exchange_->MergeToSlices(pass.row_count, partial, context));
    return context;
  }
  TRIBUTARY_ASSIGN_OR_RETURN(const Partial host, BringToHost(partial, pass.row_count, Heads()));
  const Partial merged{memory_.staged_context_o.as<float>(),
                       memory_.staged_context_lse.as<float>()};
  TRIBUTARY_RETURN_IF_ERROR(host_exchange_.MergeToSlices(pass, host, merged));
  const size_t row_heads =
      static_cast<size_t>(pass.row_count) * static_cast<size_t>(OwnHeads().count) * sizeof(float);
  if (row_heads == 0) return context;
  TRIBUTARY_CUDA_OK(cudaMemcpyAsync(context.o, merged.o, row_heads * ValueDim(),
                                    cudaMemcpyHostToDevice, stream_));
  TRIBUTARY_CUDA_OK(
      cudaMemcpyAsync(context.lse, merged.lse, row_heads, cudaMemcpyHostToDevice, stream_));
  return context;
}

absl::Status CudaOperations::GatherToRoot(const RowPass& pass, collective::HeadSlice heads,
                                          Partial slice) {
  if (alone()) return absl::OkStatus();  // the slice is the result
  const NvtxRange range("gather to root", step_.layer_index);
  const auto own = static_cast<size_t>(heads.count);
  const Partial rows = Advance(slice, pass.row_begin, own);
  if (device_exchange_.has_value()) {
    return device_exchange_->GatherToRoot(pass.row_count, rows, ResultOf(pass));
  }
  TRIBUTARY_ASSIGN_OR_RETURN(const Partial host, BringToHost(rows, pass.row_count, own));
  return host_exchange_.GatherToRoot(pass, host);
}

}  // namespace tributary::worker
