// Brings the partials of all ranks together and merges them exactly.
//
// Every rank holds a partial (O, LSE) of every query head over its own keys. Three ways to
// exchange:
//   all_gather  O and LSE of all ranks everywhere, merged locally
//   ag_rs       all-gather LSE, scale the own O by exp(LSE_r - LSE), reduce-scatter O over heads
//   a2a         O and LSE packed in one buffer, one all-to-all over heads, merged by the heads'
//   rank
//   direct      GPUs only (device_exchange.h): peers' memory is written by the kernel that merges
// and two placements of the result:
//   scattered   rank r has the heads of SliceOfRank(heads, size, r)
//   gathered    rank 0 has all heads
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string_view>
#include <vector>

#include "collective/communicator.h"
#include "collective/head_slice.h"  // IWYU pragma: export
#include "kernels/status.h"

namespace tributary::collective {

enum class Strategy : uint8_t { kAuto, kAllGather, kAgRs, kA2a, kDirect };
enum class Placement : uint8_t { kGathered, kScattered };

const char* Name(Strategy s);   // "auto", "all_gather", "ag_rs", "a2a", "direct"
const char* Name(Placement p);  // "gathered", "scattered"
bool Parse(std::string_view text, Strategy* out);

struct ExchangeShape {
  int32_t rows = 0;
  int32_t heads = 0;
  int32_t head_dim = 0;
  int32_t ranks = 1;
  Placement placement = Placement::kGathered;
};

// The strategy for a shape: a pure function, the reason at each branch. `forced` other than kAuto
// wins.
Strategy ChooseStrategy(const ExchangeShape& shape, Strategy forced);

// Bytes that a rank other than 0 sends to its peers (rank 0 sends less when the result is gathered
// on it), for tests and benchmarks.
size_t BytesSent(const ExchangeShape& shape, Strategy strategy);

struct ExchangeParams {
  const float* o = nullptr;    // [rows, heads, head_dim], this rank's partial
  const float* lse = nullptr;  // [rows, heads]
  int32_t rows = 0;
  int32_t heads = 0;
  int32_t head_dim = 0;
  const float* sinks = nullptr;  // [heads] or nullptr; applied once, after the merge
  Placement placement = Placement::kGathered;
  Strategy strategy = Strategy::kAuto;
  // gathered: [rows, heads, head_dim] on rank 0, ignored elsewhere;
  // scattered: [rows, slice.count, head_dim] on every rank.
  float* out = nullptr;
  float* lse_out = nullptr;  // same without head_dim; LSE without the sink; may be nullptr
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

// The inverse of scattering: slices of all ranks ([rows, slice.count, head_dim]) become
// [rows, heads, head_dim] on rank 0. slice_lse and lse_out may be nullptr.
Status GatherSlices(const float* slice_o, const float* slice_lse, const ExchangeShape& shape,
                    Communicator& comm, ExchangeWorkspace& workspace, float* out, float* lse_out,
                    Deadline deadline);

}  // namespace tributary::collective
