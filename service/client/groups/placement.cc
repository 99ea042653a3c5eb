#include "service/client/groups/placement.h"

#include <algorithm>
#include <utility>

namespace tributary::client {
namespace {

constexpr int kRandomBits = 64 - kTagBits;

// A bijection that spreads every bit over all others (the finalizer of SplitMix64).
uint64_t Mix(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

}  // namespace

uint32_t TagOfGroup(uint64_t group_id) {
  const auto tag = static_cast<uint32_t>(Mix(group_id) >> kRandomBits);
  return tag == 0 ? 1 : tag;
}

uint32_t TagOfSequence(uint64_t sequence_id) {
  return static_cast<uint32_t>(sequence_id >> kRandomBits);
}

uint64_t SequenceIdFor(uint32_t tag, uint64_t random) {
  const uint64_t own = random & ((uint64_t{1} << kRandomBits) - 1);
  return (uint64_t{tag} << kRandomBits) | own;
}

double FreePagesToCome(const GroupLoad& load) {
  const double each = load.sequences > 0 ? std::max(1.0, static_cast<double>(load.used_pages) /
                                                             static_cast<double>(load.sequences))
                                         : 1.0;
  const int64_t without_pages = std::max<int64_t>(0, load.sequences - load.used_pages);  // or more
  return static_cast<double>(load.free_pages - without_pages) -
         each * static_cast<double>(load.placed);
}

std::vector<size_t> PlacementOrder(const std::vector<std::optional<GroupLoad>>& loads,
                                   const std::function<size_t(size_t)>& random_below) {
  std::vector<size_t> order;
  for (size_t i = 0; i < loads.size(); ++i) {
    if (loads[i].has_value()) order.push_back(i);
  }
  // A random order, then a sort that keeps the order of equals.
  for (size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[random_below(i)]);
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) {
    return FreePagesToCome(*loads[a]) > FreePagesToCome(*loads[b]);
  });
  return order;
}

}  // namespace tributary::client
