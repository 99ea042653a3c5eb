#include "collective/device/device_strategies.h"

#include <algorithm>

#include "collective/carver.h"
#include "collective/device/pack.h"
#include "kernels/cuda/merge/merge.h"

namespace tributary::collective {
namespace {

// Merged heads on their way to rank 0.
struct GatherSpace {
  PartsLayout layout;
  std::byte* part = nullptr;      // this rank's
  std::byte* gathered = nullptr;  // all of them, on rank 0
};

GatherSpace CarveGather(int32_t rows, int32_t heads, int32_t value_dim, int32_t ranks, DType type,
                        Carver* c) {
  GatherSpace s{.layout = LayOutParts(rows, heads, value_dim, ranks, type)};
  s.part = c->Take(s.layout.stride);
  s.gathered = c->Take(s.layout.stride * ranks);
  return s;
}

struct Space {
  PartsLayout layout;  // of what goes round
  std::byte* send = nullptr;
  std::byte* recv = nullptr;
  std::byte* all_lse = nullptr;     // ag_rs
  std::byte* merged_lse = nullptr;  // ag_rs
  GatherSpace gather;               // of strategies that merge slices
};

Space Carve(const DeviceExchangeParams& p, int32_t ranks, Strategy strategy, Carver* c) {
  Space s;
  const int32_t parts = strategy == Strategy::kAllGather ? 1 : ranks;
  s.layout = LayOutParts(p.rows, p.heads, p.value_dim, parts, p.wire);
  const size_t lse_bytes = sizeof(float) * p.rows * p.heads;
  switch (strategy) {
    case Strategy::kAllGather:
      s.send = c->Take(s.layout.stride);
      s.recv = c->Take(s.layout.stride * ranks);
      return s;
    case Strategy::kAgRs:
      // Sums have no LSE behind them.
      s.layout.stride = s.layout.lse_offset;
      s.all_lse = c->Take(lse_bytes * ranks);
      s.merged_lse = c->Take(lse_bytes);
      s.send = c->Take(s.layout.stride * ranks);
      s.recv = c->Take(s.layout.stride);
      break;
    default:
      s.send = c->Take(s.layout.stride * ranks);
      s.recv = c->Take(s.layout.stride * ranks);
      break;
  }
  if (p.placement == Placement::kGathered) {
    s.gather = CarveGather(p.rows, p.heads, p.value_dim, ranks, p.out_dtype, c);
  }
  return s;
}

// Where a rank's merged heads go: to the caller, or into the part that rank 0 gathers.
void SetOutput(const DeviceExchangeParams& p, const Space& s, cuda::MergeArgs* merge) {
  merge->out_dtype = p.out_dtype;
  if (p.placement == Placement::kScattered || s.gather.part == nullptr) {
    merge->out = p.out;
    merge->lse_out = p.lse_out;
    return;
  }
  merge->out = s.gather.part;
  merge->lse_out = reinterpret_cast<float*>(s.gather.part + s.gather.layout.lse_offset);
}

const float* SinksFrom(const float* sinks, int32_t head) {
  return sinks == nullptr ? nullptr : sinks + head;
}

cuda::MergeArgs MergeOf(const DeviceExchangeParams& p, HeadSlice heads) {
  cuda::MergeArgs merge;
  merge.rows = p.rows;
  merge.heads = heads.count;
  merge.value_dim = p.value_dim;
  merge.sinks = SinksFrom(p.sinks, heads.begin);
  merge.source_dtype = p.wire;
  return merge;
}

// `first`: the source's pair (head) to begin with.
void AddSource(const PartsLayout& layout, const std::byte* part, int32_t first,
               cuda::MergeArgs* merge) {
  const int32_t s = merge->sources++;
  merge->o[s] = part + static_cast<size_t>(first) * layout.value_dim * SizeOf(layout.type);
  merge->lse[s] = reinterpret_cast<const float*>(part + layout.lse_offset) + first;
}

Status GatherMerged(const GatherSpace& s, void* out, float* lse_out, DeviceCommunicator& comm,
                    cudaStream_t stream) {
  Status status = comm.Gather(s.part, s.gathered, s.layout.stride, 0, stream);
  if (!status.ok() || comm.rank() != 0) return status;
  return LaunchUnpack(s.layout, s.gathered, out, lse_out, stream);
}

Status Pack(const DeviceExchangeParams& p, const Space& s, cudaStream_t stream) {
  PackArgs pack{.layout = s.layout, .o = p.o, .o_dtype = p.o_dtype, .lse = p.lse};
  pack.parts = s.send;
  return LaunchPack(pack, stream);
}

Status AllGather(const DeviceExchangeParams& p, const Space& s, DeviceCommunicator& comm,
                 cudaStream_t stream) {
  if (Status status = Pack(p, s, stream); !status.ok()) return status;
  const bool gathered = p.placement == Placement::kGathered;
  Status status = gathered ? comm.Gather(s.send, s.recv, s.layout.stride, 0, stream)
                           : comm.AllGather(s.send, s.recv, s.layout.stride, stream);
  if (!status.ok() || (gathered && comm.rank() != 0)) return status;
  const HeadSlice mine =
      gathered ? HeadSlice{0, p.heads} : SliceOfRank(p.heads, comm.size(), comm.rank());
  cuda::MergeArgs merge = MergeOf(p, mine);
  for (int r = 0; r < comm.size(); ++r) {
    merge.source_heads[r] = p.heads;
    AddSource(s.layout, s.recv + r * s.layout.stride, mine.begin, &merge);
  }
  SetOutput(p, s, &merge);
  return cuda::LaunchMerge(merge, stream);
}

// The LSEs go round first; then the sum of the scaled O is the merged O.
Status AllGatherLseAndReduceScatter(const DeviceExchangeParams& p, const Space& s,
                                    DeviceCommunicator& comm, cudaStream_t stream) {
  const size_t pairs = static_cast<size_t>(p.rows) * p.heads;
  Status status = comm.AllGather(p.lse, s.all_lse, pairs * sizeof(float), stream);
  if (!status.ok()) return status;
  PackArgs pack{.layout = s.layout, .o = p.o, .o_dtype = p.o_dtype, .lse = p.lse};
  pack.parts = s.send;
  pack.all_lse = reinterpret_cast<const float*>(s.all_lse);
  pack.rank = comm.rank();
  pack.merged_lse = reinterpret_cast<float*>(s.merged_lse);
  if (status = LaunchPack(pack, stream); !status.ok()) return status;
  status = comm.ReduceScatter(s.send, s.recv, s.layout.stride / SizeOf(p.wire), p.wire, stream);
  if (!status.ok()) return status;
  // One source: what is left is the sink and the output's type.
  const HeadSlice mine = SliceOfRank(p.heads, comm.size(), comm.rank());
  cuda::MergeArgs merge = MergeOf(p, mine);
  merge.sources = 1;
  merge.o[0] = s.recv;
  merge.lse[0] = pack.merged_lse;
  SetOutput(p, s, &merge);
  if (status = cuda::LaunchMerge(merge, stream); !status.ok()) return status;
  if (p.placement == Placement::kScattered) return status;
  return GatherMerged(s.gather, p.out, p.lse_out, comm, stream);
}

// Each rank gets all partials of its own heads, and merges those.
Status AllToAll(const DeviceExchangeParams& p, const Space& s, DeviceCommunicator& comm,
                cudaStream_t stream) {
  Status status = Pack(p, s, stream);
  if (!status.ok()) return status;
  status = comm.AllToAll(s.send, s.recv, s.layout.stride, stream);
  if (!status.ok()) return status;
  cuda::MergeArgs merge = MergeOf(p, SliceOfRank(p.heads, comm.size(), comm.rank()));
  for (int r = 0; r < comm.size(); ++r) {
    AddSource(s.layout, s.recv + r * s.layout.stride, 0, &merge);
  }
  SetOutput(p, s, &merge);
  if (status = cuda::LaunchMerge(merge, stream); !status.ok()) return status;
  if (p.placement == Placement::kScattered) return status;
  return GatherMerged(s.gather, p.out, p.lse_out, comm, stream);
}

}  // namespace

size_t DeviceWorkspaceBytes(const DeviceExchangeParams& params, int32_t ranks, Strategy strategy) {
  Carver c;
  Carve(params, ranks, strategy, &c);
  return c.bytes();
}

size_t DeviceWorkspaceBytes(const DeviceGatherParams& p, int32_t ranks) {
  Carver c;
  CarveGather(p.rows, p.heads, p.value_dim, ranks, p.dtype, &c);
  return c.bytes();
}

size_t DeviceWorkspaceBytes(const DeviceExchangeLimits& l, int32_t ranks) {
  const DeviceExchangeParams p{.rows = l.rows,
                               .heads = l.heads,
                               .value_dim = l.value_dim,
                               .placement = Placement::kGathered,
                               .wire = l.widest,
                               .out_dtype = l.widest};
  size_t most = 0;
  for (const Strategy s : {Strategy::kAllGather, Strategy::kAgRs, Strategy::kA2a}) {
    most = std::max(most, DeviceWorkspaceBytes(p, ranks, s));
  }
  return most;
}

Status EnqueueExchange(const DeviceExchangeParams& p, Strategy strategy, DeviceCommunicator& comm,
                       std::byte* workspace, cudaStream_t stream) {
  const bool merges = strategy == Strategy::kAllGather || strategy == Strategy::kA2a;
  if (merges && comm.size() > cuda::kMaxMergeSources) {
    return InvalidArgument("strategy: " + std::string(Name(strategy)) + " is for at most " +
                           std::to_string(cuda::kMaxMergeSources) + " ranks");
  }
  Carver c(workspace);
  const Space s = Carve(p, comm.size(), strategy, &c);
  switch (strategy) {
    case Strategy::kAllGather:
      return AllGather(p, s, comm, stream);
    case Strategy::kAgRs:
      return AllGatherLseAndReduceScatter(p, s, comm, stream);
    case Strategy::kA2a:
      return AllToAll(p, s, comm, stream);
    case Strategy::kAuto:
    case Strategy::kDirect:
      break;
  }
  return InvalidArgument("strategy is not one of all_gather, ag_rs, a2a");
}

Status EnqueueGather(const DeviceGatherParams& p, DeviceCommunicator& comm, std::byte* workspace,
                     cudaStream_t stream) {
  Carver c(workspace);
  const GatherSpace s = CarveGather(p.rows, p.heads, p.value_dim, comm.size(), p.dtype, &c);
  Status status = LaunchPackSlice(s.layout, comm.rank(), p.slice, p.slice_lse, s.part, stream);
  if (!status.ok()) return status;
  return GatherMerged(s, p.out, p.lse_out, comm, stream);
}

Status EnqueueAlone(const DeviceExchangeParams& p, cudaStream_t stream) {
  cuda::MergeArgs merge = MergeOf(p, {0, p.heads});
  merge.source_dtype = p.o_dtype;
  merge.sources = 1;
  merge.o[0] = p.o;
  merge.lse[0] = p.lse;
  merge.out = p.out;
  merge.out_dtype = p.out_dtype;
  merge.lse_out = p.lse_out;
  return cuda::LaunchMerge(merge, stream);
}

}  // namespace tributary::collective
