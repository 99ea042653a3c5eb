#include "collective/exchange.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>

#include "kernels/lse.h"

namespace tributary::collective {
namespace {

// ---------------------------------------------------------------------------------------------
// Shapes. A part is what one rank sends to another in a2a, ag_rs and GatherSlices: the rows of one
// head slice. Parts of all ranks have the size of the widest slice, because collectives want equal
// parts; a narrower slice leaves the tail of its part unused.

struct Dims {
  size_t rows;
  size_t heads;
  size_t head_dim;
  int ranks;

  size_t widest() const { return SliceOfRank(static_cast<int32_t>(heads), ranks, 0).count; }
  HeadSlice slice(int rank) const { return SliceOfRank(static_cast<int32_t>(heads), ranks, rank); }

  size_t o_floats() const { return rows * heads * head_dim; }
  size_t lse_floats() const { return rows * heads; }
  size_t part_o_floats() const { return rows * widest() * head_dim; }
  size_t part_lse_floats() const { return rows * widest(); }
  // O and LSE in one message: two messages would cost twice the latency.
  size_t packed_floats() const { return o_floats() + lse_floats(); }
  size_t packed_part_floats() const { return part_o_floats() + part_lse_floats(); }
};

Dims DimsOf(const ExchangeShape& s) {
  return {static_cast<size_t>(s.rows), static_cast<size_t>(s.heads),
          static_cast<size_t>(s.head_dim), s.ranks};
}

// Cuts a workspace into arrays of floats. Without a base it only counts, so the size of a workspace
// comes from the code that lays it out.
class Carver {
 public:
  explicit Carver(std::byte* base = nullptr) : base_(base) {}

  float* Floats(size_t n) {
    const size_t at = bytes_;
    bytes_ += n * sizeof(float);
    return base_ == nullptr ? nullptr : reinterpret_cast<float*>(base_ + at);
  }
  size_t bytes() const { return bytes_; }

 private:
  std::byte* base_;
  size_t bytes_ = 0;
};

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
    return Scratch{c.Floats(n.send), c.Floats(n.recv), c.Floats(n.weights), c.Floats(n.slice),
                   c.Floats(n.gathered)};
  };
  Carver count;
  layout(count);
  Carver carve(workspace.Reserve(count.bytes()));
  return layout(carve);
}

// ---------------------------------------------------------------------------------------------
// Merging. All strategies add weight * O in rank order with the same weights, so they agree to the
// bit (the library is built without contraction into fused multiply-adds, see CMakeLists.txt).

// weights[i]: the share of partial i in the union of all n. Returns the LSE of the union.
float MergeWeightsOf(const float* lse, size_t stride, int n, float* weights) {
  UnionLse<float> of_all;
  for (int i = 0; i < n; ++i) of_all.See(lse[i * stride]);
  for (int i = 0; i < n; ++i) {
    weights[i] = of_all.WeightOf(lse[i * stride]);
    of_all.Add(weights[i]);
  }
  for (int i = 0; i < n; ++i) weights[i] = of_all.ShareOf(weights[i]);
  return of_all.Lse();
}

// out = weight * o. An empty partial counts as zero whatever its O holds: 0 * NaN would be NaN.
void Scale(const float* o, float lse, float weight, size_t n, float* out) {
  if (lse == EmptyLse<float>()) {
    std::fill(out, out + n, 0.0f);
    return;
  }
  for (size_t d = 0; d < n; ++d) out[d] = weight * o[d];
}

void AddScaled(const float* o, float lse, float weight, size_t n, float* out) {
  if (lse == EmptyLse<float>()) return;
  for (size_t d = 0; d < n; ++d) out[d] += weight * o[d];
}

// The sink of one (row, head). An empty row stays 0, also under a sink of -inf.
void ApplySink(float lse, float sink, size_t n, float* o) {
  if (lse == EmptyLse<float>()) return;
  const float scale = SinkScale(lse, sink);
  for (size_t d = 0; d < n; ++d) o[d] *= scale;
}

// The partials of all ranks for some heads, in rank order.
struct Sources {
  const float* o;      // of rank 0: [rows, row_heads, head_dim], from the first head wanted
  const float* lse;    // of rank 0: [rows, row_heads]
  size_t rank_stride;  // floats from one rank's o and lse to the next one's
  size_t row_heads;    // heads in a row of a source; at least the heads wanted
};

// Merges `heads` heads into out [rows, heads, head_dim] and lse_out [rows, heads] (may be nullptr).
// `sinks` starts at the first head wanted.
void MergeSources(const Sources& s, const Dims& d, size_t heads, const float* sinks, float* weights,
                  float* out, float* lse_out) {
  for (size_t row = 0; row < d.rows; ++row) {
    for (size_t h = 0; h < heads; ++h) {
      const size_t at = row * s.row_heads + h;
      const float* lse = s.lse + at;
      const float* o = s.o + at * d.head_dim;
      float* dst = out + (row * heads + h) * d.head_dim;
      const float merged = MergeWeightsOf(lse, s.rank_stride, d.ranks, weights);
      Scale(o, lse[0], weights[0], d.head_dim, dst);
      for (int r = 1; r < d.ranks; ++r) {
        AddScaled(o + r * s.rank_stride, lse[r * s.rank_stride], weights[r], d.head_dim, dst);
      }
      if (sinks != nullptr) ApplySink(merged, sinks[h], d.head_dim, dst);
      if (lse_out != nullptr) lse_out[row * heads + h] = merged;
    }
  }
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

// A packed part holds O as [rows, count, head_dim] from its start and LSE as [rows, count] from
// part_o_floats().
Status GatherPackedParts(const Dims& d, const Scratch& s, Communicator& comm, float* out,
                         float* lse_out, Deadline deadline) {
  Status status =
      comm.Gather(s.slice, s.gathered, d.packed_part_floats() * sizeof(float), 0, deadline);
  if (!status.ok() || comm.rank() != 0) return status;
  for (int r = 0; r < d.ranks; ++r) {
    const HeadSlice slice = d.slice(r);
    const size_t count = slice.count;
    const float* part = s.gathered + r * d.packed_part_floats();
    CopyHeads(part, count, out + slice.begin * d.head_dim, d.heads, count, d.rows, d.head_dim);
    if (lse_out != nullptr) {
      CopyHeads(part + d.part_o_floats(), count, lse_out + slice.begin, d.heads, count, d.rows, 1);
    }
  }
  return status;
}

void AddGatherScratch(const Dims& d, int rank, ScratchSizes* n) {
  n->slice = d.packed_part_floats();
  n->gathered = rank == 0 ? d.ranks * d.packed_part_floats() : 0;
}

// Where a rank's merged slice goes: to the caller, or into the part that rank 0 gathers.
struct SliceOutput {
  float* o;
  float* lse;
};

SliceOutput OutputOf(const ExchangeParams& p, const Dims& d, const Scratch& s) {
  if (p.placement == Placement::kScattered) return {p.out, p.lse_out};
  return {s.slice, s.slice + d.part_o_floats()};
}

// ---------------------------------------------------------------------------------------------
// Strategies

// A group of one: there is nothing to bring together.
void MergeAlone(const ExchangeParams& p, const Dims& d, ExchangeWorkspace& workspace) {
  const Scratch s = Carve({.weights = 1}, workspace);
  MergeSources({p.o, p.lse, 0, d.heads}, d, d.heads, p.sinks, s.weights, p.out, p.lse_out);
}

// One message holds O and LSE of all heads. Gathered needs them on rank 0 only.
Status AllGatherAndMerge(const ExchangeParams& p, const Dims& d, Communicator& comm,
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
  MergeSources({s.recv + mine.begin * d.head_dim, s.recv + d.o_floats() + mine.begin,
                d.packed_floats(), d.heads},
               d, mine.count, SinksFrom(p.sinks, mine.begin), s.weights, p.out, p.lse_out);
  return status;
}

// Scales the own O by its weight in the union, cut into one part a rank, and writes the merged LSE
// of this rank's slice.
void ScaleIntoParts(const ExchangeParams& p, const Dims& d, int rank, const float* all_lse,
                    float* weights, float* parts, float* slice_lse) {
  std::fill(parts, parts + d.ranks * d.part_o_floats(), 0.0f);
  for (int to = 0; to < d.ranks; ++to) {
    const HeadSlice slice = d.slice(to);
    for (size_t row = 0; row < d.rows; ++row) {
      for (int32_t h = 0; h < slice.count; ++h) {
        const size_t at = row * d.heads + slice.begin + h;
        const size_t in_slice = row * slice.count + h;
        const float merged = MergeWeightsOf(all_lse + at, d.lse_floats(), d.ranks, weights);
        Scale(p.o + at * d.head_dim, p.lse[at], weights[rank], d.head_dim,
              parts + to * d.part_o_floats() + in_slice * d.head_dim);
        if (to == rank) slice_lse[in_slice] = merged;
      }
    }
  }
}

// The LSEs go round first; then the sum of the scaled O is the merged O.
Status AllGatherLseAndReduceScatter(const ExchangeParams& p, const Dims& d, Communicator& comm,
                                    ExchangeWorkspace& workspace, Deadline deadline) {
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
  std::copy(sum, sum + merged_heads * d.head_dim, output.o);
  if (p.sinks != nullptr) {
    for (size_t i = 0; i < merged_heads; ++i) {
      ApplySink(merged_lse[i], p.sinks[mine.begin + i % mine.count], d.head_dim,
                output.o + i * d.head_dim);
    }
  }
  if (output.lse != nullptr) std::copy(merged_lse, merged_lse + merged_heads, output.lse);
  if (p.placement == Placement::kScattered) return status;
  return GatherPackedParts(d, s, comm, p.out, p.lse_out, deadline);
}

// Each rank gets all partials of its own heads, and merges those.
Status AllToAllAndMerge(const ExchangeParams& p, const Dims& d, Communicator& comm,
                        ExchangeWorkspace& workspace, Deadline deadline) {
  ScratchSizes sizes{.send = d.ranks * d.packed_part_floats(),
                     .recv = d.ranks * d.packed_part_floats(),
                     .weights = static_cast<size_t>(d.ranks)};
  if (p.placement == Placement::kGathered) AddGatherScratch(d, comm.rank(), &sizes);
  const Scratch s = Carve(sizes, workspace);
  for (int to = 0; to < d.ranks; ++to) {
    const HeadSlice slice = d.slice(to);
    float* part = s.send + to * d.packed_part_floats();
    CopyHeads(p.o + slice.begin * d.head_dim, d.heads, part, slice.count, slice.count, d.rows,
              d.head_dim);
    CopyHeads(p.lse + slice.begin, d.heads, part + d.part_o_floats(), slice.count, slice.count,
              d.rows, 1);
  }

  Status status = comm.AllToAll(s.send, s.recv, d.packed_part_floats() * sizeof(float), deadline);
  if (!status.ok()) return status;

  const HeadSlice mine = d.slice(comm.rank());
  const SliceOutput output = OutputOf(p, d, s);
  MergeSources(
      {s.recv, s.recv + d.part_o_floats(), d.packed_part_floats(), static_cast<size_t>(mine.count)},
      d, mine.count, SinksFrom(p.sinks, mine.begin), s.weights, output.o, output.lse);
  if (p.placement == Placement::kScattered) return status;
  return GatherPackedParts(d, s, comm, p.out, p.lse_out, deadline);
}

Status CheckShape(const ExchangeShape& s) {
  if (s.rows < 0) return InvalidArgument("rows is negative: " + std::to_string(s.rows));
  if (s.heads < 0) return InvalidArgument("heads is negative: " + std::to_string(s.heads));
  if (s.head_dim < 1) return InvalidArgument("head_dim is below 1: " + std::to_string(s.head_dim));
  return Status::Ok();
}

bool HasOutput(const ExchangeShape& s, int rank) {
  if (s.placement == Placement::kGathered) return rank == 0;
  return SliceOfRank(s.heads, s.ranks, rank).count > 0;
}

}  // namespace

const char* Name(Strategy s) {
  switch (s) {
    case Strategy::kAuto:
      return "auto";
    case Strategy::kAllGather:
      return "all_gather";
    case Strategy::kAgRs:
      return "ag_rs";
    case Strategy::kA2a:
      return "a2a";
    case Strategy::kDirect:
      return "direct";
  }
  return "?";
}

const char* Name(Placement p) { return p == Placement::kGathered ? "gathered" : "scattered"; }

bool Parse(std::string_view text, Strategy* out) {
  for (Strategy s : {Strategy::kAuto, Strategy::kAllGather, Strategy::kAgRs, Strategy::kA2a,
                     Strategy::kDirect}) {
    if (text == Name(s)) {
      *out = s;
      return true;
    }
  }
  return false;
}

Strategy ChooseStrategy(const ExchangeShape& shape, Strategy forced) {
  if (forced != Strategy::kAuto) return forced;
  // Nothing is exchanged; all_gather is the strategy without a second step.
  if (shape.ranks == 1) return Strategy::kAllGather;
  // One operation, and every byte sent is one that its receiver needs. ag_rs sends as little but
  // in two dependent operations; all_gather sends `ranks` times as much.
  if (shape.placement == Placement::kScattered) return Strategy::kA2a;
  // Two ranks: a2a and its gather bring rank 0 as many bytes as one gather does.
  if (shape.ranks == 2) return Strategy::kAllGather;
  // Rank 0 receives and merges (ranks - 1) whole partials, or with a2a about two; a2a has a second
  // operation, and all ranks pack, copy and merge more in total. Between threads that share cores,
  // where only the total counts, 1.5 MiB less for rank 0 did not yet pay and 5 MiB less did.
  constexpr size_t kWorthASecondOperation = 2 << 20;
  const Dims d = DimsOf(shape);
  const size_t one_gather = (d.ranks - 1) * d.packed_floats() * sizeof(float);
  const size_t two_steps = 2 * (d.ranks - 1) * d.packed_part_floats() * sizeof(float);
  return one_gather >= two_steps + kWorthASecondOperation ? Strategy::kA2a : Strategy::kAllGather;
}

size_t BytesSent(const ExchangeShape& shape, Strategy strategy) {
  const Dims d = DimsOf(shape);
  if (d.ranks == 1 || d.rows == 0 || d.heads == 0) return 0;
  const size_t peers = d.ranks - 1;
  const bool gathered = shape.placement == Placement::kGathered;
  const size_t gather = gathered ? d.packed_part_floats() : 0;
  size_t floats = 0;
  switch (ChooseStrategy(shape, strategy)) {
    case Strategy::kAuto:
    case Strategy::kAllGather:
      floats = gathered ? d.packed_floats() : peers * d.packed_floats();
      break;
    case Strategy::kAgRs:
      floats = peers * (d.lse_floats() + d.part_o_floats()) + gather;
      break;
    case Strategy::kA2a:
      floats = peers * d.packed_part_floats() + gather;
      break;
    case Strategy::kDirect:  // not between hosts' memories
      break;
  }
  return floats * sizeof(float);
}

std::byte* ExchangeWorkspace::Reserve(size_t bytes) {
  if (buffer_.size() < bytes) {
    buffer_ = {};  // first, so that the old and the new one never exist together
    buffer_.resize(bytes);
  }
  return buffer_.data();
}

Status ExchangeAndMerge(const ExchangeParams& p, Communicator& comm, ExchangeWorkspace& workspace,
                        Deadline deadline) {
  const ExchangeShape shape{p.rows, p.heads, p.head_dim, comm.size(), p.placement};
  if (Status s = CheckShape(shape); !s.ok()) return s;
  if (p.rows == 0 || p.heads == 0) return Status::Ok();
  if (p.o == nullptr) return InvalidArgument("o is null");
  if (p.lse == nullptr) return InvalidArgument("lse is null");
  if (p.out == nullptr && HasOutput(shape, comm.rank())) return InvalidArgument("out is null");

  const Dims d = DimsOf(shape);
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
  const Dims d = DimsOf(shape);
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
  CopyHeads(slice_o, count, s.slice, count, count, d.rows, d.head_dim);
  if (slice_lse != nullptr) {
    CopyHeads(slice_lse, count, s.slice + d.part_o_floats(), count, count, d.rows, 1);
  }
  return GatherPackedParts(d, s, comm, out, lse_out, deadline);
}

}  // namespace tributary::collective
