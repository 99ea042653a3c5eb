// How ranks bring their partials together, where the result goes, and what that costs.
//
// Every rank holds a partial (O, LSE) of every query head over its own keys. The strategies:
//
// - all_gather: every rank gets O and LSE of all ranks, and merges them itself.
// - ag_rs: an all-gather of LSE; each rank then scales its own O by
//   exp(LSE_r - LSE); the scaled O are
//   reduce-scattered over heads.
// - a2a: an all-to-all over heads with O and LSE in one buffer; each rank merges its own heads.
// - direct: only between GPUs (collective/direct/). One kernel writes partials into the memory of
//   peers and merges what it receives.
//
// The placements of the result:
//
// - scattered: rank r has the heads of SliceOfRank(heads, size, r).
// - gathered: rank 0 has all heads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace tributary::collective {

enum class Strategy : uint8_t { kAuto, kAllGather, kAgRs, kA2a, kDirect };
enum class Placement : uint8_t { kGathered, kScattered };

const char* Name(Strategy s);   // "auto", "all_gather", "ag_rs", "a2a", "direct"
const char* Name(Placement p);  // "gathered", "scattered"
bool Parse(std::string_view text, Strategy* out);

// What the choice of a strategy depends on. O has `value_dim` elements for each row and head.
struct ExchangeShape {
  int32_t rows = 0;
  int32_t heads = 0;
  int32_t value_dim = 0;
  int32_t ranks = 1;
  Placement placement = Placement::kGathered;
};

// The strategy for a shape in host memory: a pure function, which gives the reason at each branch.
// `forced` wins unless it is kAuto.
Strategy ChooseStrategy(const ExchangeShape& shape, Strategy forced);

// Bytes that a rank other than 0 sends to its peers. (Rank 0 sends less when the result is gathered
// on it.) For tests and benchmarks.
size_t BytesSent(const ExchangeShape& shape, Strategy strategy);

}  // namespace tributary::collective
