#include "kernels/cuda/decode/shared_attention.h"

#include "kernels/cuda/decode/gathered_rows.h"
#include "kernels/cuda/decode/side_by_side.h"
#include "kernels/cuda/dispatch.h"

namespace tributary::cuda {
namespace {

Status Gather(const AttentionShape& shape, const AttentionArgs& args,
              const GatheredLaunch& gathered, cudaStream_t stream) {
  const int64_t row_bytes = BytesOf(args.q_dtype, int64_t{shape.q_heads} * shape.geometry.key_dim);
  return LaunchGatherQueries({.from = static_cast<const uint4*>(args.q),
                              .to = reinterpret_cast<uint4*>(gathered.q),
                              .rows = gathered.rows,
                              .gathered_rows = gathered.gathered_rows,
                              .row_vectors = static_cast<int32_t>(row_bytes / 16)},
                             gathered.choice.begins_early, stream);
}

Status Merge(const AttentionShape& shape, const AttentionArgs& args, const GatheredLaunch& gathered,
             cudaStream_t stream) {
  return LaunchMergeGathered({.o = args.o,
                              .lse = args.lse,
                              .gathered_o = gathered.o,
                              .gathered_lse = gathered.lse,
                              .parts = gathered.parts,
                              .part_rows = gathered.part_rows,
                              .rows = gathered.call_rows,
                              .heads = shape.q_heads,
                              .value_dim = shape.geometry.value_dim},
                             gathered.choice.begins_early, stream);
}

}  // namespace

Status LaunchSharedAttention(const KernelChoice& choice, const AttentionShape& shape,
                             const AttentionArgs& args, int32_t blocks,
                             const GatheredLaunch& gathered, cudaStream_t stream) {
  if (gathered.side_by_side && !MayRunSideBySide(gathered.choice, choice)) {
    return Unsupported("side_by_side: these kernels run one after the other");
  }
  if (gathered.rows != nullptr) {
    if (Status status = Gather(shape, args, gathered, stream); !status.ok()) return status;
  }
  AttentionArgs shared = args;
  shared.items = gathered.items;
  shared.keys = gathered.keys;
  const int64_t before =
      BytesOf(args.q_dtype, int64_t{gathered.first_row} * shape.q_heads * shape.geometry.key_dim);
  shared.q = gathered.rows != nullptr ? gathered.q : static_cast<const std::byte*>(args.q) + before;
  shared.o = gathered.o;
  shared.lse = gathered.lse;
  shared.block = {};
  // What only some strips of a sequence wait for is behind the pages that are shared; the gathered
  // queries are waited for at once.
  if (gathered.rows != nullptr) {
    shared.late_strips = 0;
    shared.passage = {};
  }
  AttentionArgs rest = args;
  if (gathered.side_by_side) {
    shared.partial_o += gathered.first_partial_row * gathered.shape.geometry.value_dim;
    shared.partial_lse += gathered.first_partial_row;
    shared.arrivals += gathered.first_arrival;
    shared.late_strips = 0;
    shared.beside = Beside::kNextLaunch;
    rest.late_strips = kNoLateStrips;
    rest.passage = {};  // it begins when what is ahead of the shared launch has ended
    rest.beside = Beside::kLastLaunch;
  }
  if (Status status =
          LaunchAttention(gathered.choice, gathered.shape, shared, gathered.blocks, stream);
      !status.ok()) {
    return status;
  }
  if (Status status = LaunchAttention(choice, shape, rest, blocks, stream); !status.ok()) {
    return status;
  }
  return Merge(shape, args, gathered, stream);
}

}  // namespace tributary::cuda
