// Which physical pages hold a sequence, on every rank alike.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "worker/command.h"
#include "worker/page_prefixes.h"

namespace tributary::worker {

// The page table of one sequence. Entry i is the page of local slots [i * page_size,
// (i + 1) * page_size) on every rank. It has no holes: entries are set at indices up to its size.
// Entries below what any row can see may be of a page that is another sequence's by now.
class PageTable {
 public:
  std::span<const int32_t> pages() const { return pages_; }
  int32_t size() const { return static_cast<int32_t>(pages_.size()); }
  // Changes whenever an entry does and is never used twice in one PageTables, not even after a
  // table was dropped and made again. A plan made at a version stays good while the version lasts,
  // and so does the memory behind pages().
  uint64_t version() const { return version_; }
  // The table's beginnings that other tables have, too; none when the tables keep no beginnings.
  // Costs next to nothing where there is none.
  std::span<PagePrefix* const> shared_prefixes() const {
    return std::span(prefixes_).first(static_cast<size_t>(SharedUnits(prefixes_)));
  }
  // All of its beginnings.
  std::span<PagePrefix* const> prefixes() const { return prefixes_; }

 private:
  friend class PageTables;
  std::vector<int32_t> pages_;
  uint64_t version_ = 0;
  PrefixesOfTable prefixes_;
};

// The tables of one cache. Every operation costs what it touches, not what the tables hold: a step
// that adds a page to a sequence of a million tokens writes one entry.
class PageTables {
 public:
  // `unit_pages`: pages of a unit of the tables' beginnings; 0: none are kept.
  explicit PageTables(int32_t num_pages, int32_t unit_pages = 0)
      : num_pages_(num_pages), prefixes_(unit_pages) {}

  // Pages a sequence's table has.
  using Sizes = absl::flat_hash_map<SequenceId, int64_t>;

  // Whether Update would accept all of `updates`, in order: pages exist and no
  // hole is left. kInvalidArgument naming "<field>[i]...". `after`: the sizes of the tables
  // touched, as they will be.
  absl::Status Check(const std::vector<PageUpdate>& updates, const char* field, Sizes* after) const;
  // Sets entries by index, growing the table; setting what is already there changes nothing, the
  // version included. Must have passed Check.
  void Update(const PageUpdate& update);

  // Like Check and Update, except that an update with first_index 0 stands for the whole table:
  // what lay beyond is forgotten.
  absl::Status CheckReplace(const std::vector<PageUpdate>& tables, const char* field) const;
  void Replace(const PageUpdate& table);

  void Drop(SequenceId sequence);
  // nullptr when there is none.
  const PageTable* Find(SequenceId sequence) const;
  size_t size() const { return tables_.size(); }

 private:
  absl::Status CheckEach(const std::vector<PageUpdate>& updates, bool replace, const char* field,
                         Sizes* after) const;

  int32_t num_pages_;
  PagePrefixes prefixes_;
  uint64_t last_version_ = 0;
  absl::flat_hash_map<SequenceId, PageTable> tables_;
};

}  // namespace tributary::worker
