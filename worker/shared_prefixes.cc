#include "worker/shared_prefixes.h"

#include <algorithm>
#include <functional>
#include <utility>

namespace tributary::worker {
namespace {

// Users (by index) that have their first `from` units alike.
struct Group {
  int64_t from = 0;
  std::vector<int32_t> users;
};

class Finder {
 public:
  explicit Finder(std::span<const PrefixUser> users) : users_(users) {
    for (const PrefixUser& user : users) {
      const int64_t seen =
          Empty(user.slots) ? 0 : (user.slots.hi + kSharedSlots - 1) / kSharedSlots;
      units_.push_back(std::min(seen, std::ssize(user.shared)));
    }
  }

  std::vector<SharedPages> Find() {
    Group all;
    for (size_t i = 0; i < users_.size(); ++i) all.users.push_back(static_cast<int32_t>(i));
    std::vector<Group> groups;
    Part(0, all.users, &groups);
    // Level by level: what comes of a group is put behind all groups of its own level.
    for (size_t i = 0; i < groups.size(); ++i) {
      const int64_t end = EndOf(groups[i]);
      shared_.push_back({{groups[i].from * kSharedSlots, end * kSharedSlots}, {}});
      for (const int32_t user : groups[i].users) {
        shared_.back().entries.push_back(users_[static_cast<size_t>(user)].entry);
      }
      const std::vector<int32_t> users = std::move(groups[i].users);
      Part(end, users, &groups);
    }
    return std::move(shared_);
  }

 private:
  // Units that the user shares with some table and whose slots it may see.
  int64_t Units(int32_t user) const { return units_[static_cast<size_t>(user)]; }
  const PagePrefix* Prefix(int32_t user, int64_t unit) const {
    return users_[static_cast<size_t>(user)].shared[static_cast<size_t>(unit)];
  }

  // Adds those of `users` that go on alike behind unit `from` for one unit more or longer, two or
  // more at a time, in the order of their first members.
  void Part(int64_t from, std::span<const int32_t> users, std::vector<Group>* groups) {
    next_.clear();
    for (const int32_t user : users) {
      if (Units(user) > from) next_.push_back({Prefix(user, from), user});
    }
    // Who goes on alike is then side by side, each in the order of the pass. The order of the
    // prefixes is that of their addresses and says nothing.
    std::sort(next_.begin(), next_.end(), [](const Next& a, const Next& b) {
      return a.first == b.first ? a.second < b.second : std::less<>()(a.first, b.first);
    });
    const auto first_of_level = std::ssize(*groups);
    for (auto begin = next_.begin(); begin != next_.end();) {
      const auto end = std::find_if(begin, next_.end(),
                                    [&](const Next& next) { return next.first != begin->first; });
      if (end - begin > 1) {
        Group& group = groups->emplace_back(Group{from, {}});
        for (; begin != end; ++begin) group.users.push_back(begin->second);
      }
      begin = end;
    }
    std::sort(groups->begin() + first_of_level, groups->end(),
              [](const Group& a, const Group& b) { return a.users.front() < b.users.front(); });
  }

  // Up to which unit all of a group go on alike. Two tables are alike up to some unit and nowhere
  // behind it.
  int64_t EndOf(const Group& group) const {
    const int32_t first = group.users.front();
    int64_t end = Units(first);
    for (const int32_t user : group.users) {
      int64_t alike = group.from + 1;  // at least
      int64_t most = std::min(end, Units(user));
      while (alike < most) {
        const int64_t middle = alike + (most - alike + 1) / 2;
        if (Prefix(first, middle - 1) == Prefix(user, middle - 1)) {
          alike = middle;
        } else {
          most = middle - 1;
        }
      }
      end = alike;
    }
    return end;
  }

  using Next = std::pair<const PagePrefix*, int32_t>;  // which unit a user has next

  const std::span<const PrefixUser> users_;
  std::vector<int64_t> units_;  // [users]
  std::vector<Next> next_;
  std::vector<SharedPages> shared_;
};

}  // namespace

std::vector<SharedPages> FindSharedPages(std::span<const PrefixUser> users) {
  if (users.size() < 2) return {};
  return Finder(users).Find();
}

}  // namespace tributary::worker
