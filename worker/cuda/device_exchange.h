// The exchange of partials that lie in device memory, over the rank's group of GPUs: the sibling of
// HostExchange. Everything is put into the stream and nothing is waited for.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "absl/status/status.h"
#include "collective/group/device_group.h"
#include "worker/step_operations.h"

namespace tributary::worker {

// The exchange of one step. Rows, heads and the strategy are the same on every rank, and so are the
// pieces that a call is made in. O travels as f32: the result is the one that the host's exchange
// gives, up to the order of what is added. Where all of it is rounded to bf16 in the end, O travels
// as that.
//
// An error is CollectiveStatus'.
class DeviceExchange {
 public:
  using Partial = StepOperations::Partial;

  // All references outlive the object.
  // batch_invariant: the result must not depend on what else is in the step.
  DeviceExchange(const PlannedStep& step, collective::Strategy strategy,
                 collective::DeviceGroup& group, cudaStream_t stream, bool batch_invariant = false)
      : step_(step),
        strategy_(strategy),
        wire_(WireOf(step, strategy, batch_invariant)),
        group_(group),
        stream_(stream) {}

  uint64_t epoch() const { return group_.epoch(); }

  // Whether MergeToRoot of so many rows may be captured in a CUDA graph, which is so when it goes
  // by `direct`. That is the same kernel in a graph and outside of one, and it keeps its counts in
  // device memory. So ranks need not capture the same steps: a step that one rank has seen before
  // may be new to another, whose plan differs. NCCL wants all ranks to capture alike.
  bool MayBeCaptured(int32_t rows) const;

  // Whether MergeToRoot of so many rows is one `direct` call, which can take a partial as it
  // arrives.
  bool MayArrive(int32_t rows) const;

  // partial: [rows, q_heads]; out: [rows, q_heads] on rank 0. sinks: [q_heads] or null. arrives:
  // the launch ahead writes the partial (DeviceExchangeParams::partial_arrives).
  absl::Status MergeToRoot(int32_t rows, Partial partial, const float* sinks, Partial out,
                           bool arrives = false);
  // partial: [rows, q_heads]; out: [rows, heads of the rank].
  absl::Status MergeToSlices(int32_t rows, Partial partial, Partial out);
  // slice: [rows, heads of the rank]; out: [rows, q_heads] on rank 0.
  absl::Status GatherToRoot(int32_t rows, Partial slice, Partial out);

  // The type that O travels as. This is a pure function.
  static DType WireOf(const PlannedStep& step, collective::Strategy strategy, bool batch_invariant);

 private:
  collective::DeviceExchangeParams ParamsFor(int32_t rows, collective::Placement placement) const;
  absl::Status Merge(collective::DeviceExchangeParams params, int32_t out_heads, Partial partial,
                     Partial out);
  // How many rows each `direct` call of MergeToRoot has; 0 when it does not go by `direct`.
  int32_t RowsOfDirect(int32_t rows) const;
  // Calls enqueue(params of a piece, its first row) until all rows of the call are dealt with.
  template <typename Params, typename Enqueue>
  absl::Status InPieces(Params params, Enqueue enqueue);
  int32_t OwnHeads() const;
  Partial Advance(Partial partial, int32_t rows, int32_t heads) const;

  const PlannedStep& step_;
  const collective::Strategy strategy_;
  const DType wire_;
  collective::DeviceGroup& group_;
  const cudaStream_t stream_;
};

}  // namespace tributary::worker
