// In which of several groups of workers a sequence lives.
//
// The groups behind one name hold the same caches and share nothing else. A new sequence goes to
// the group that has the most free pages for it and stays there for life. Its id carries the tag of
// that group, so that every host finds the group again without asking anybody. These are pure
// functions; GroupsClient calls them.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

namespace tributary::client {

// The upper bits of a sequence's id are the tag of its group, the others are drawn at random.
inline constexpr int kTagBits = 24;

// The tag of a group (GetLimitsReply.group_id). Never 0: an id that was drawn without a group in
// mind has any tag.
uint32_t TagOfGroup(uint64_t group_id);
uint32_t TagOfSequence(uint64_t sequence_id);
// An id with this tag; never 0. `random` has 64 random bits.
uint64_t SequenceIdFor(uint32_t tag, uint64_t random);

// What a group last told of one cache, and what was placed there since.
struct GroupLoad {
  int64_t free_pages = 0;
  int64_t used_pages = 0;
  int64_t sequences = 0;  // that use them
  int64_t placed = 0;     // sequences placed since then, which have no pages yet
};

// Pages that will be free once the sequences that were placed since the last report have as many as
// the others have on average, and each of all sequences has one at least.
double FreePagesToCome(const GroupLoad& load);

// The groups in the order in which a new sequence tries them: those with the most free pages to
// come first. Groups without a load (nothing: they do not answer, or do not have the cache) are
// left out. Among equals `random_below(n)`, a random number in [0, n), decides, so that many hosts
// that see the same loads do not all choose the same group.
std::vector<size_t> PlacementOrder(const std::vector<std::optional<GroupLoad>>& loads,
                                   const std::function<size_t(size_t)>& random_below);

}  // namespace tributary::client
