// Numbers for the beginnings of page tables, so that it costs little to see which sequences begin
// with the same physical pages (forks, and forks of forks).
#pragma once

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"

namespace tributary::worker {

// A table is cut into units of so many pages. The first n units of two tables are of the same
// physical pages if, and only if, their ids at n - 1 are equal.
class PrefixIds {
 public:
  // 0: no ids are kept.
  explicit PrefixIds(int32_t unit_pages) : unit_pages_(unit_pages) {}
  PrefixIds(const PrefixIds&) = delete;
  PrefixIds& operator=(const PrefixIds&) = delete;

  // Brings a table's ids up to date after its pages from `first_changed` on have changed, or have
  // come or gone. Costs what lies behind that page.
  void Update(std::span<const int32_t> pages, size_t first_changed, std::vector<uint64_t>* ids);
  // The table is no more.
  void Drop(std::vector<uint64_t>* ids) { Shorten(0, ids); }
  // Beginnings that some table has.
  size_t size() const { return nodes_.size(); }

 private:
  // A unit's pages behind a beginning; 0: behind nothing.
  using Key = std::pair<uint64_t, std::vector<int32_t>>;
  struct Node {
    uint64_t id = 0;
    int64_t tables = 0;
  };
  using Nodes = absl::flat_hash_map<Key, Node>;

  void Shorten(size_t units, std::vector<uint64_t>* ids);

  const int32_t unit_pages_;
  uint64_t last_id_ = 0;  // ids are never reused, so an old one cannot match by mistake
  Nodes nodes_;
  absl::flat_hash_map<uint64_t, Key> keys_;  // by id
};

}  // namespace tributary::worker
