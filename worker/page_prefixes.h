// The beginnings of page tables, and how many tables begin alike (forks, and forks of forks), kept
// up to date as tables change: so a table says by itself whether it shares pages with another.
#pragma once

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "absl/container/node_hash_map.h"

namespace tributary::worker {

// A beginning that at least one table has.
struct PagePrefix {
  // The beginning that is a unit shorter, null where there is none, and the pages of the unit.
  using Key = std::pair<const PagePrefix*, std::vector<int32_t>>;

  int64_t tables = 0;        // that begin so
  const Key* key = nullptr;  // its own, where PagePrefixes keeps it
};

// A table's beginnings of one unit, of two and so on; an element stays where it is while the table
// has it. The first n units of two tables are of the same physical pages if, and only if, their
// elements n - 1 are the same object.
using PrefixesOfTable = std::vector<PagePrefix*>;

// How many of a table's units another table begins with, too. Needs no other table: where a unit is
// shared, so are all before it.
int64_t SharedUnits(std::span<PagePrefix* const> of_table);

// Used from one thread at a time, as the tables.
class PagePrefixes {
 public:
  // A table is cut into units of so many pages. 0: no beginnings are kept.
  explicit PagePrefixes(int32_t unit_pages) : unit_pages_(unit_pages) {}
  PagePrefixes(const PagePrefixes&) = delete;
  PagePrefixes& operator=(const PagePrefixes&) = delete;

  // Brings a table's beginnings up to date after its pages from `first_changed` on have changed, or
  // have come or gone. Costs what lies behind that page.
  void Update(std::span<const int32_t> pages, size_t first_changed, PrefixesOfTable* of_table) {
    if (unit_pages_ == 0) return;
    // Nearly every new page is one of a unit that is not full yet.
    const size_t covered = of_table->size() * static_cast<size_t>(unit_pages_);
    if (first_changed >= covered && pages.size() < covered + static_cast<size_t>(unit_pages_)) {
      return;
    }
    UpdateUnits(pages, first_changed, of_table);
  }
  // The table is no more.
  void Drop(PrefixesOfTable* of_table) { Shorten(0, of_table); }
  // Beginnings that some table has.
  size_t size() const { return prefixes_.size(); }

 private:
  void UpdateUnits(std::span<const int32_t> pages, size_t first_changed, PrefixesOfTable* of_table);
  void Shorten(size_t units, PrefixesOfTable* of_table);

  const int32_t unit_pages_;
  absl::node_hash_map<PagePrefix::Key, PagePrefix> prefixes_;
};

}  // namespace tributary::worker
