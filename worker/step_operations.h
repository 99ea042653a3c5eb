// What the wrappers (DCP, DFlash) are made of: the operations of one planned step on one rank.
//
// The wrappers say what is computed and in which order, once for all devices. Where partials lie
// and how they are computed and exchanged is the device's business: on a GPU an operation may
// merely be put into a stream, and an error of it shows when the step is finished.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "collective/communicator.h"
#include "collective/exchange/exchange.h"
#include "worker/cache_spec.h"
#include "worker/command.h"
#include "worker/plan.h"

namespace tributary::worker {

class Shard;

// A step that was checked and planned. Everything is borrowed.
struct PlannedStep {
  StepKind kind = StepKind::kDecode;
  int32_t layer_index = 0;
  const CacheSpec& spec;
  TensorView q;
  TensorView k;
  TensorView v;
  const StepPlan& plan;
  collective::Communicator& comm;
  collective::Deadline deadline;
  // As all ranks know them alike: sequences in the step, and the positions up to which their rows
  // and tokens reach, added up.
  int32_t entries = 0;
  int64_t reach = 0;
  // On rank 0, for all query rows; what goes into the reply has its place in host memory by now.
  std::span<const StepOutput> outputs = {};
  bool bf16_partials = false;  // StepCommand::bf16_partials
  // Where the step writes the ward's tokens as well, as plan.kept_slots say; null: nowhere. Of the
  // backend's own (Backend::CreateReplica).
  Shard* replica = nullptr;

  const LayerSpec& layer() const { return spec.layers[static_cast<size_t>(layer_index)]; }
  // The query heads of the layer that this rank computes where a part is split over heads.
  collective::HeadSlice own_heads() const {
    return collective::SliceOfRank(geometry().q_heads, comm.size(), comm.rank());
  }
  LayerGeometry geometry() const { return GeometryOf(spec, layer()); }
};

class StepOperations {
 public:
  // In the memory of the device. o: [rows, heads, value_dim]; lse: [rows, heads].
  struct Partial {
    float* o = nullptr;
    float* lse = nullptr;
  };

  virtual ~StepOperations() = default;

  // Memory for the partials of a pass, all heads; and for those of a slice of the heads, all rows
  // of the step. A step that wants a slice asks for it first. Memory is kept from step to step, so
  // that none allocates once it has grown to the largest.
  virtual Partial ReserveSlice(collective::HeadSlice heads) = 0;
  virtual Partial ReservePass(const RowPass& pass) = 0;

  // Writes the tokens this rank owns; of replayed entries compares instead, and reports entries
  // with a difference. A conflict is a result, not an error.
  virtual absl::Status AppendOrCompare() = 0;

  // Attention of all query heads over this rank's share of the cache, for the rows of a pass.
  virtual absl::Status AttendContext(const RowPass& pass, Partial out) = 0;

  // Prefill: attention of the new tokens over each other, for a slice of the heads and all rows of
  // the step. Rows outside of every run get the empty partial.
  virtual absl::Status AttendNewTokens(collective::HeadSlice heads, Partial out) = 0;

  // DFlash: attention of the block over itself, for a slice of the heads and the rows of the pass,
  // merged into the pass's partial of all heads. Comes right behind AttendContext, which may have
  // done it already.
  virtual absl::Status AddBlock(const RowPass& pass, collective::HeadSlice heads,
                                Partial partial) = 0;

  // Collective. Merges the partials of all ranks, applies sinks, and puts the pass's rows into the
  // step's result on rank 0.
  virtual absl::Status MergeToRoot(const RowPass& pass, Partial partial) = 0;

  // Collective. Merges the partials of all ranks, without sinks; every rank gets its slice of the
  // heads, for the rows of the pass. Valid until the next pass.
  virtual absl::StatusOr<Partial> MergeToSlices(const RowPass& pass, Partial partial) = 0;

  // Merges `context` (as MergeToSlices gave it; without pointers: none) into the pass's rows of the
  // slice, and applies sinks.
  virtual absl::Status AddToSlice(const RowPass& pass, collective::HeadSlice heads, Partial context,
                                  Partial slice) = 0;

  // Collective. Puts the slices of all ranks, the pass's rows, into the step's result on rank 0.
  virtual absl::Status GatherToRoot(const RowPass& pass, collective::HeadSlice heads,
                                    Partial slice) = 0;
};

// Runs the step's operations, in the order its kind asks for.
absl::Status RunStep(const PlannedStep& step, StepOperations& operations);

}  // namespace tributary::worker
