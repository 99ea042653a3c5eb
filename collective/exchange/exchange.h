// Brings the partials of all ranks together in host memory and merges them exactly, by one of the
// strategies of strategy.h. Each rank calls it with its own partial, over its group's Communicator.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "collective/communicator.h"
#include "collective/exchange/head_slice.h"  // IWYU pragma: export
#include "collective/exchange/strategy.h"    // IWYU pragma: export
#include "kernels/status.h"

namespace tributary::collective {

struct ExchangeParams {
  const float* o = nullptr;    // [rows, heads, value_dim], this rank's partial
  const float* lse = nullptr;  // [rows, heads]
  int32_t rows = 0;
  int32_t heads = 0;
  int32_t value_dim = 0;
  const float* sinks = nullptr;  // [heads] or nullptr; applied once, after the merge
  Placement placement = Placement::kGathered;
  Strategy strategy = Strategy::kAuto;
  // gathered: [rows, heads, value_dim] on rank 0, ignored elsewhere;
  // scattered: [rows, slice.count, value_dim] on every rank. In a group of one `out` may be `o`,
  // and `lse_out` may be `lse`.
  float* out = nullptr;
  float* lse_out = nullptr;  // same without value_dim; LSE without the sink; may be nullptr
};

// Scratch kept between calls, so that a step allocates nothing once it has grown to the largest
// shape.
class ExchangeWorkspace {
 public:
  std::byte* Reserve(size_t bytes);

 private:
  std::vector<std::byte> buffer_;
};

// Entered by all ranks with the same shape, placement and strategy. Partials are added in rank
// order, so that every strategy and placement gives the same bits. An empty partial (LSE = -inf)
// counts for nothing, whatever its O holds; a NaN stays in its element (in O) or in its row and
// head (in LSE). Without rows or heads no rank communicates. kInvalidArgument names the field and
// enters nothing; any other error is the communicator's.
Status ExchangeAndMerge(const ExchangeParams& p, Communicator& comm, ExchangeWorkspace& workspace,
                        Deadline deadline);

// The inverse of scattering: slices of all ranks ([rows, slice.count, value_dim]) become
// [rows, heads, value_dim] on rank 0. slice_lse and lse_out may be nullptr.
Status GatherSlices(const float* slice_o, const float* slice_lse, const ExchangeShape& shape,
                    Communicator& comm, ExchangeWorkspace& workspace, float* out, float* lse_out,
                    Deadline deadline);

}  // namespace tributary::collective
