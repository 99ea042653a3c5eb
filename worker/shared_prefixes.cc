#include "worker/shared_prefixes.h"

#include <algorithm>
#include <utility>

#include "absl/container/flat_hash_map.h"

namespace tributary::worker {
namespace {

// Entries that have their first `from` units alike.
struct Group {
  int64_t from = 0;
  std::vector<int32_t> users;
};

class Finder {
 public:
  explicit Finder(std::span<const PrefixUser> users) : users_(users) {}

  std::vector<SharedPages> Find() {
    Group all;
    for (size_t i = 0; i < users_.size(); ++i) all.users.push_back(static_cast<int32_t>(i));
    std::vector<Group> groups = Part(all);
    // Level by level: what comes of a group is put behind all groups of its own level.
    for (size_t i = 0; i < groups.size(); ++i) {
      const int64_t end = EndOf(groups[i]);
      shared_.push_back({{groups[i].from * kSharedSlots, end * kSharedSlots}, groups[i].users});
      for (Group& next : Part({end, std::move(groups[i].users)})) {
        groups.push_back(std::move(next));
      }
    }
    return std::move(shared_);
  }

 private:
  // Whole units that the entry has and whose slots it may see.
  int64_t Units(int32_t user) const {
    const PrefixUser& u = users_[static_cast<size_t>(user)];
    if (Empty(u.slots)) return 0;
    const int64_t seen = (u.slots.hi + kSharedSlots - 1) / kSharedSlots;
    return std::min(seen, static_cast<int64_t>(u.ids.size()));
  }
  uint64_t Id(int32_t user, int64_t unit) const {
    return users_[static_cast<size_t>(user)].ids[static_cast<size_t>(unit)];
  }

  // Those of a group that go on alike for one unit more or longer, two or more at a time, in the
  // order of their first members.
  std::vector<Group> Part(const Group& group) const {
    std::vector<Group> parts;
    absl::flat_hash_map<uint64_t, size_t> part_of;
    for (const int32_t user : group.users) {
      if (Units(user) <= group.from) continue;
      const auto [it, fresh] = part_of.try_emplace(Id(user, group.from), parts.size());
      if (fresh) parts.push_back({group.from, {}});
      parts[it->second].users.push_back(user);
    }
    std::erase_if(parts, [](const Group& part) { return part.users.size() < 2; });
    return parts;
  }

  // Up to which unit all of a group go on alike. Ids of two tables are equal up to some unit and
  // nowhere behind it.
  int64_t EndOf(const Group& group) const {
    const int32_t first = group.users.front();
    int64_t end = Units(first);
    for (const int32_t user : group.users) {
      int64_t alike = group.from + 1;  // at least
      int64_t most = std::min(end, Units(user));
      while (alike < most) {
        const int64_t middle = alike + (most - alike + 1) / 2;
        if (Id(first, middle - 1) == Id(user, middle - 1)) {
          alike = middle;
        } else {
          most = middle - 1;
        }
      }
      end = alike;
    }
    return end;
  }

  const std::span<const PrefixUser> users_;
  std::vector<SharedPages> shared_;
};

}  // namespace

std::vector<SharedPages> FindSharedPages(std::span<const PrefixUser> users) {
  if (users.size() < 2) return {};
  return Finder(users).Find();
}

}  // namespace tributary::worker
