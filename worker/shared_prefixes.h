// Which entries of a step begin with the same physical pages, so that these are read once for all
// of their rows.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kernels/params.h"
#include "worker/page_prefixes.h"

namespace tributary::worker {

// An entry whose table shares pages with another table, be it of the step or not.
struct PrefixUser {
  int32_t entry = 0;  // its number in the pass
  // Of its table, no more of them than it shares with others (SharedUnits): [i] stands for the
  // pages of slots [0, (i + 1) * kSharedSlots).
  std::span<PagePrefix* const> shared;
  KeyRange slots;  // all that its rows see lies within; empty: nothing is seen
};

// The tree of what entries share with each other: an element for each run of units that two or more
// of them have alike, those nearer to the begin first. An entry's elements follow one another
// without a gap, from slot 0 on. Entries that see nothing of a run are not named in it, and not in
// those behind. `users`: in the order of the pass; entries that are not among them share nothing.
std::vector<SharedPages> FindSharedPages(std::span<const PrefixUser> users);

}  // namespace tributary::worker
