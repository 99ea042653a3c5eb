// Pages of ranks' shares of which nobody has the bytes any more, and how far hosts have brought
// their tokens again. One group of layers of a cache has one, in its SequenceTable. Costs nothing
// while nothing is lost.
//
// What is noted is true of the pages, whoever holds them: forks lack, and get back, what they
// share.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "absl/container/flat_hash_map.h"

namespace tributary::service {

class LostPages {
 public:
  // `layers`: of the group.
  LostPages(int ranks, size_t layers) : ranks_(ranks), layers_(layers) {}

  bool any() const { return !pages_.empty(); }
  // Whether tokens of some rank in the page were lost. They may be there again.
  bool Has(int32_t page) const { return any() && pages_.contains(page); }
  // The rank's tokens in the page are gone, in all layers.
  void Add(int rank, int32_t page);
  // The first slot of the page in which the rank lacks its token of a layer (an index among those
  // of the group), with all slots after it. Nothing: it lacks none.
  std::optional<int32_t> FirstLacking(int rank, int32_t page, int32_t layer) const;
  // The rank has the layer's tokens in the slots before `end` again.
  void Fill(int rank, int32_t page, int32_t layer, int32_t end);
  // The page is free, or is held by one sequence that lacks nothing and is about to write to it.
  void Forget(int32_t page) { pages_.erase(page); }

 private:
  static constexpr int16_t kWhole = -1;

  size_t IndexOf(int rank, int32_t layer) const {
    return static_cast<size_t>(rank) * layers_ + static_cast<size_t>(layer);
  }

  int ranks_;
  size_t layers_;
  // By page: [ranks][layers], the slots that are there again, or kWhole.
  absl::flat_hash_map<int32_t, std::vector<int16_t>> pages_;
};

}  // namespace tributary::service
