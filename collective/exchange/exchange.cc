#include "collective/exchange/exchange.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>

#include "collective/carver.h"
#include "collective/exchange/merge_partials.h"
#include "collective/exchange/message_sizes.h"

namespace tributary::collective {
namespace {

struct Scratch {
  float* send;
  float* recv;
  float* weights;   // [ranks]
  float* slice;     // one packed part: this rank's merged heads, on their way to rank 0
  float* gathered;  // [ranks] packed parts, on rank 0
};

struct ScratchSizes {
  size_t send = 0;
  size_t recv = 0;
  size_t weights = 0;
  size_t slice = 0;
  size_t gathered = 0;
};

Scratch Carve(const ScratchSizes& n, ExchangeWorkspace& workspace) {
  auto layout = [&n](Carver& c) {
    return Scratch{c.Take<float>(n.send), c.Take<float>(n.recv), c.Take<float>(n.weights),
                   c.Take<float>(n.slice), c.Take<float>(n.gathered)};
  };
  Carver count;
  layout(count);
  Carver carve(workspace.Reserve(count.bytes()));
  return layout(carve);
}

const float* SinksFrom(const float* sinks, int32_t head) {
  return sinks == nullptr ? nullptr : sinks + head;
}

// Copies a slice's columns between [rows, from_heads, unit] and [rows, to_heads, unit].
void CopyHeads(const float* from, size_t from_heads, float* to, size_t to_heads, size_t heads,
               size_t rows, size_t unit) {
  if (heads == 0) return;
  for (size_t row = 0; row < rows; ++row) {
    std::memcpy(to + row * to_heads * unit, from + row * from_heads * unit,
                heads * unit * sizeof(float));
  }
}

// ---------------------------------------------------------------------------------------------
// Gathering of merged slices

// A packed part holds O as [rows, count, value_dim] from its start and LSE as [rows, count] from
// part_o_floats().
Status GatherPackedParts(const MessageSizes& d, const Scratch& s, Communicator& comm, float* out,
                         float* lse_out, Deadline deadline) {
  Status status =
      comm.Gather(s.slice, s.gathered, d.packed_part_floats() * sizeof(float), 0, deadline);
  if (!status.ok() || comm.rank() != 0) return status;
  for (int r = 0; r < d.ranks; ++r) {
    const HeadSlice slice = d.slice(r);
    const size_t count = slice.count;
    const float* part = s.gathered + r * d.packed_part_floats();
    CopyHeads(part, count, out + slice.begin * d.value_dim, d.heads, count, d.rows, d.value_dim);
    if (lse_out != nullptr) {
      CopyHeads(part + d.part_o_floats(), count, lse_out + slice.begin, d.heads, count, d.rows, 1);
    }
  }
  return status;
}

void AddGatherScratch(const MessageSizes& d, int rank, ScratchSizes* n) {
  n->slice = d.packed_part_floats();
  n->gathered = rank == 0 ? d.ranks * d.packed_part_floats() : 0;
}

// Where a rank's merged slice goes: to the caller, or into the part that rank 0 gathers.
struct SliceOutput {
  float* o;
  float* lse;
};

SliceOutput OutputOf(const ExchangeParams& p, const MessageSizes& d, const Scratch& s) {
  if (p.placement == Placement::kScattered) return {p.out, p.lse_out};
  return {s.slice, s.slice + d.part_o_floats()};
}

// ---------------------------------------------------------------------------------------------
// Strategies

// A group of one: there is nothing to bring together, and a partial is the result, to the bit.
// `out` may be `o`, and `lse_out` may be `lse`.
void MergeAlone(const ExchangeParams& p, const MessageSizes& d, ExchangeWorkspace& workspace) {
  const Scratch s = Carve({.weights = 1}, workspace);
  for (size_t i = 0; i < d.rows * d.heads; ++i) {
    const float* const o = p.o + i * d.value_dim;
    float* const out = p.out + i * d.value_dim;
    const float lse = p.lse[i];
    const float* const sink = SinksFrom(p.sinks, static_cast<int32_t>(i % d.heads));
    float* const lse_out = p.lse_out == nullptr ? nullptr : p.lse_out + i;
    if (!std::isfinite(lse)) {
      MergeSources({o, &lse, 0, 1}, 1, 1, d.value_dim, 1, sink, s.weights, out, lse_out);
      continue;
    }
    if (out != o) std::copy_n(o, d.value_dim, out);
    if (sink != nullptr) ApplySink(lse, *sink, d.value_dim, out);
    if (lse_out != nullptr) *lse_out = lse;
  }
}

// One message holds O and LSE of all heads. Gathered needs them on rank 0 only.
Status AllGatherAndMerge(const ExchangeParams& p, const MessageSizes& d, Communicator& comm,
                         ExchangeWorkspace& workspace, Deadline deadline) {
  const bool gathered = p.placement == Placement::kGathered;
  const bool receives = !gathered || comm.rank() == 0;
  const Scratch s = Carve({.send = d.packed_floats(),
                           .recv = receives ? d.ranks * d.packed_floats() : 0,
                           .weights = static_cast<size_t>(d.ranks)},
                          workspace);
  std::memcpy(s.send, p.o, d.o_floats() * sizeof(float));
  std::memcpy(s.send + d.o_floats(), p.lse, d.lse_floats() * sizeof(float));

  const size_t bytes = d.packed_floats() * sizeof(float);
  Status status = gathered ? comm.Gather(s.send, s.recv, bytes, 0, deadline)
                           : comm.AllGather(s.send, s.recv, bytes, deadline);
  if (!status.ok() || !receives) return status;

  const HeadSlice mine =
      gathered ? HeadSlice{0, static_cast<int32_t>(d.heads)} : d.slice(comm.rank());
  MergeSources({s.recv + mine.begin * d.value_dim, s.recv + d.o_floats() + mine.begin,
                d.packed_floats(), d.heads},
               d.rows, mine.count, d.value_dim, d.ranks, SinksFrom(p.sinks, mine.begin), s.weights,
               p.out, p.lse_out);
  return status;
}

// Scales the own O by its weight in the union, cut into one part per rank, and writes the merged
// LSE of this rank's slice.
void ScaleIntoParts(const ExchangeParams& p, const MessageSizes& d, int rank, const float* all_lse,
                    float* weights, float* parts, float* slice_lse) {
  std::fill(parts, parts + d.ranks * d.part_o_floats(), 0.0f);
  for (int to = 0; to < d.ranks; ++to) {
    const HeadSlice slice = d.slice(to);
    for (size_t row = 0; row < d.rows; ++row) {
      for (int32_t h = 0; h < slice.count; ++h) {
        const size_t at = row * d.heads + slice.begin + h;
        const size_t in_slice = row * slice.count + h;
        const float merged = MergeWeightsOf(all_lse + at, d.lse_floats(), d.ranks, weights);
        Scale(p.o + at * d.value_dim, p.lse[at], weights[rank], d.value_dim,
              parts + to * d.part_o_floats() + in_slice * d.value_dim);
        if (to == rank) slice_lse[in_slice] = merged;
      }
    }
  }
}

// The LSEs go round first; then the sum of the scaled O is the merged O.
Status AllGatherLseAndReduceScatter(const ExchangeParams& p, const MessageSizes& d,
                                    Communicator& comm, ExchangeWorkspace& workspace,
                                    Deadline deadline) {
  const HeadSlice mine = d.slice(comm.rank());
  const size_t slice_lse_floats = d.part_lse_floats();
  ScratchSizes sizes{.send = d.ranks * d.part_o_floats(),
                     .recv = d.ranks * d.lse_floats() + d.part_o_floats() + slice_lse_floats,
                     .weights = static_cast<size_t>(d.ranks)};
  if (p.placement == Placement::kGathered) AddGatherScratch(d, comm.rank(), &sizes);
  const Scratch s = Carve(sizes, workspace);
  float* all_lse = s.recv;                          // [ranks][rows, heads]
  float* sum = all_lse + d.ranks * d.lse_floats();  // a part of O
  float* merged_lse = sum + d.part_o_floats();      // [rows, mine.count]

  Status status = comm.AllGather(p.lse, all_lse, d.lse_floats() * sizeof(float), deadline);
  if (!status.ok()) return status;
  ScaleIntoParts(p, d, comm.rank(), all_lse, s.weights, s.send, merged_lse);
  status = comm.ReduceScatter(s.send, sum, d.part_o_floats(), deadline);
  if (!status.ok()) return status;

  const SliceOutput output = OutputOf(p, d, s);
  const size_t merged_heads = d.rows * mine.count;
  std::copy(sum, sum + merged_heads * d.value_dim, output.o);
  if (p.sinks != nullptr) {
    for (size_t i = 0; i < merged_heads; ++i) {
      ApplySink(merged_lse[i], p.sinks[mine.begin + i % mine.count], d.value_dim,
                output.o + i * d.value_dim);
    }
  }
  if (output.lse != nullptr) std::copy(merged_lse, merged_lse + merged_heads, output.lse);
  if (p.placement == Placement::kScattered) return status;
  return GatherPackedParts(d, s, comm, p.out, p.lse_out, deadline);
}

// Each rank gets all partials of its own heads, and merges those.
Status AllToAllAndMerge(const ExchangeParams& p, const MessageSizes& d, Communicator& comm,
                        ExchangeWorkspace& workspace, Deadline deadline) {
  ScratchSizes sizes{.send = d.ranks * d.packed_part_floats(),
                     .recv = d.ranks * d.packed_part_floats(),
                     .weights = static_cast<size_t>(d.ranks)};
  if (p.placement == Placement::kGathered) AddGatherScratch(d, comm.rank(), &sizes);
  const Scratch s = Carve(sizes, workspace);
  for (int to = 0; to < d.ranks; ++to) {
    const HeadSlice slice = d.slice(to);
    float* part = s.send + to * d.packed_part_floats();
    CopyHeads(p.o + slice.begin * d.value_dim, d.heads, part, slice.count, slice.count, d.rows,
              d.value_dim);
    CopyHeads(p.lse + slice.begin, d.heads, part + d.part_o_floats(), slice.count, slice.count,
              d.rows, 1);
  }

  Status status = comm.AllToAll(s.send, s.recv, d.packed_part_floats() * sizeof(float), deadline);
  if (!status.ok()) return status;

  const HeadSlice mine = d.slice(comm.rank());
  const SliceOutput output = OutputOf(p, d, s);
  MergeSources(
      {s.recv, s.recv + d.part_o_floats(), d.packed_part_floats(), static_cast<size_t>(mine.count)},
      d.rows, mine.count, d.value_dim, d.ranks, SinksFrom(p.sinks, mine.begin), s.weights, output.o,
      output.lse);
  if (p.placement == Placement::kScattered) return status;
  return GatherPackedParts(d, s, comm, p.out, p.lse_out, deadline);
}

Status CheckShape(const ExchangeShape& s) {
  if (s.rows < 0) return InvalidArgument("rows is negative: " + std::to_string(s.rows));
  if (s.heads < 0) return InvalidArgument("heads is negative: " + std::to_string(s.heads));
  if (s.value_dim < 1)
    return InvalidArgument("value_dim is below 1: " + std::to_string(s.value_dim));
  return Status::Ok();
}

bool HasOutput(const ExchangeShape& s, int rank) {
  if (s.placement == Placement::kGathered) return rank == 0;
  return SliceOfRank(s.heads, s.ranks, rank).count > 0;
}

}  // namespace

std::byte* ExchangeWorkspace::Reserve(size_t bytes) {
  if (buffer_.size() < bytes) {
    buffer_ = {};  // first, so that the old and the new one never exist together
    buffer_.resize(bytes);
  }
  return buffer_.data();
}

Status ExchangeAndMerge(const ExchangeParams& p, Communicator& comm, ExchangeWorkspace& workspace,
                        Deadline deadline) {
  const ExchangeShape shape{p.rows, p.heads, p.value_dim, comm.size(), p.placement};
  if (Status s = CheckShape(shape); !s.ok()) return s;
  if (p.rows == 0 || p.heads == 0) return Status::Ok();
  if (p.o == nullptr) return InvalidArgument("o is null");
  if (p.lse == nullptr) return InvalidArgument("lse is null");
  if (p.out == nullptr && HasOutput(shape, comm.rank())) return InvalidArgument("out is null");

  const MessageSizes d = MessageSizesOf(shape);
  if (d.ranks == 1) {
    MergeAlone(p, d, workspace);
    return Status::Ok();
  }
  switch (ChooseStrategy(shape, p.strategy)) {
    case Strategy::kAuto:
      break;
    case Strategy::kAllGather:
      return AllGatherAndMerge(p, d, comm, workspace, deadline);
    case Strategy::kAgRs:
      return AllGatherLseAndReduceScatter(p, d, comm, workspace, deadline);
    case Strategy::kA2a:
      return AllToAllAndMerge(p, d, comm, workspace, deadline);
    case Strategy::kDirect:
      return InvalidArgument("strategy: direct is for partials in GPU memory");
  }
  return InvalidArgument("strategy is not one of all_gather, ag_rs, a2a");
}

Status GatherSlices(const float* slice_o, const float* slice_lse, const ExchangeShape& shape,
                    Communicator& comm, ExchangeWorkspace& workspace, float* out, float* lse_out,
                    Deadline deadline) {
  if (Status s = CheckShape(shape); !s.ok()) return s;
  if (shape.ranks != comm.size()) {
    return InvalidArgument("ranks is " + std::to_string(shape.ranks) + ", the group has " +
                           std::to_string(comm.size()));
  }
  if (shape.rows == 0 || shape.heads == 0) return Status::Ok();
  const MessageSizes d = MessageSizesOf(shape);
  const size_t count = d.slice(comm.rank()).count;
  if (count > 0 && slice_o == nullptr) return InvalidArgument("slice_o is null");
  if (comm.rank() == 0 && out == nullptr) return InvalidArgument("out is null");
  if (comm.rank() == 0 && lse_out != nullptr && slice_lse == nullptr) {
    return InvalidArgument("lse_out is wanted but slice_lse is null");
  }

  ScratchSizes sizes;
  AddGatherScratch(d, comm.rank(), &sizes);
  const Scratch s = Carve(sizes, workspace);
  std::fill(s.slice, s.slice + d.packed_part_floats(), 0.0f);
  CopyHeads(slice_o, count, s.slice, count, count, d.rows, d.value_dim);
  if (slice_lse != nullptr) {
    CopyHeads(slice_lse, count, s.slice + d.part_o_floats(), count, count, d.rows, 1);
  }
  return GatherPackedParts(d, s, comm, out, lse_out, deadline);
}

}  // namespace tributary::collective
