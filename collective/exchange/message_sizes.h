// Sizes of what ranks send each other in host memory, counted in floats. Internal to the exchange.
//
// A part is what one rank sends to another in a2a, ag_rs and GatherSlices: the rows of one head
// slice. Parts of all ranks have the size of the widest slice, because collectives want equal
// parts; a narrower slice leaves the tail of its part unused.
#pragma once

#include <cstddef>

#include "collective/exchange/head_slice.h"
#include "collective/exchange/strategy.h"

namespace tributary::collective {

struct MessageSizes {
  size_t rows;
  size_t heads;
  size_t value_dim;
  int ranks;

  size_t widest() const { return SliceOfRank(static_cast<int32_t>(heads), ranks, 0).count; }
  HeadSlice slice(int rank) const { return SliceOfRank(static_cast<int32_t>(heads), ranks, rank); }

  size_t o_floats() const { return rows * heads * value_dim; }
  size_t lse_floats() const { return rows * heads; }
  size_t part_o_floats() const { return rows * widest() * value_dim; }
  size_t part_lse_floats() const { return rows * widest(); }
  // O and LSE in one message: two messages would cost twice the latency.
  size_t packed_floats() const { return o_floats() + lse_floats(); }
  size_t packed_part_floats() const { return part_o_floats() + part_lse_floats(); }
};

inline MessageSizes MessageSizesOf(const ExchangeShape& s) {
  return {static_cast<size_t>(s.rows), static_cast<size_t>(s.heads),
          static_cast<size_t>(s.value_dim), s.ranks};
}

}  // namespace tributary::collective
