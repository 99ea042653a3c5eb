// Which entries of a step begin with the same physical pages, so that these are read once for all
// of their rows.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kernels/params.h"

namespace tributary::worker {

// What is known of an entry.
struct PrefixUser {
  // Ids of its table (PrefixIds): [i] stands for the pages of slots [0, (i + 1) * kSharedSlots).
  std::span<const uint64_t> ids;
  KeyRange slots;  // all that its rows see lies within; empty: nothing is seen
};

// The tree of what they share: an element for each run of units that two or more entries have
// alike, those nearer to the begin first. An entry's elements follow one another without a gap,
// from slot 0 on. Entries that see nothing of a run are not named in it, and not in those behind.
std::vector<SharedPages> FindSharedPages(std::span<const PrefixUser> users);

}  // namespace tributary::worker
