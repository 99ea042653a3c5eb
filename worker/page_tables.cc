#include "worker/page_tables.h"

#include <algorithm>
#include <limits>
#include <string>

#include "absl/strings/str_cat.h"
#include "base/status/errors.h"

namespace tributary::worker {

const PageTable* PageTables::Find(SequenceId sequence) const {
  const auto it = tables_.find(sequence);
  return it == tables_.end() ? nullptr : &it->second;
}

absl::Status PageTables::CheckEach(const std::vector<PageUpdate>& updates, bool replace,
                                   const char* field, Sizes* after) const {
  for (size_t i = 0; i < updates.size(); ++i) {
    const PageUpdate& update = updates[i];
    auto [it, fresh] = after->try_emplace(update.sequence, 0);
    if (fresh) {
      const PageTable* table = Find(update.sequence);
      it->second = table == nullptr ? 0 : table->size();
    }
    int64_t& size = it->second;
    if (update.first_index < 0 || update.first_index > size) {
      return InvalidField(absl::StrCat(field, "[", i, "].first_index"),
                          absl::StrCat("is ", update.first_index, ", the table has ", size,
                                       " pages: a hole would be left"));
    }
    // A table may be longer than the cache has pages: those given up count in it.
    const int64_t end = update.first_index + static_cast<int64_t>(update.pages.size());
    if (end > std::numeric_limits<int32_t>::max()) {
      return InvalidField(absl::StrCat(field, "[", i, "].pages"),
                          absl::StrCat("makes a table of ", end, " pages"));
    }
    for (size_t j = 0; j < update.pages.size(); ++j) {
      if (update.pages[j] < 0 || update.pages[j] >= num_pages_) {
        return InvalidField(
            absl::StrCat(field, "[", i, "].pages[", j, "]"),
            absl::StrCat("must be 0 to ", num_pages_ - 1, ", is ", update.pages[j]));
      }
    }
    size = replace && update.first_index == 0 ? end : std::max(size, end);
  }
  return absl::OkStatus();
}

absl::Status PageTables::Check(const std::vector<PageUpdate>& updates, const char* field,
                               Sizes* after) const {
  return CheckEach(updates, /*replace=*/false, field, after);
}

absl::Status PageTables::CheckReplace(const std::vector<PageUpdate>& tables,
                                      const char* field) const {
  Sizes after;
  return CheckEach(tables, /*replace=*/true, field, &after);
}

void PageTables::Update(const PageUpdate& update) {
  auto [it, fresh] = tables_.try_emplace(update.sequence);
  PageTable& table = it->second;
  std::vector<int32_t>& pages = table.pages_;
  const size_t first = static_cast<size_t>(update.first_index);
  const size_t end = first + update.pages.size();
  // Nearly every update is the next page of a table. Vectors grow by doubling: in a table
  // that is built page by page every entry is copied a constant number of times.
  if (first == pages.size() && update.pages.size() == 1) {
    pages.push_back(update.pages.front());
    table.version_ = ++last_version_;
    prefixes_.Update(pages, first, &table.prefixes_);
    return;
  }
  if (!fresh && end <= pages.size() &&
      std::equal(update.pages.begin(), update.pages.end(), pages.begin() + first)) {
    return;
  }
  if (end > pages.size()) pages.resize(end);
  std::copy(update.pages.begin(), update.pages.end(), pages.begin() + first);
  table.version_ = ++last_version_;
  prefixes_.Update(pages, first, &table.prefixes_);
}

void PageTables::Drop(SequenceId sequence) {
  const auto it = tables_.find(sequence);
  if (it == tables_.end()) return;
  prefixes_.Drop(&it->second.prefixes_);
  tables_.erase(it);
}

void PageTables::Replace(const PageUpdate& table) {
  if (table.first_index == 0) {
    const auto held = tables_.find(table.sequence);
    if (held != tables_.end() && held->second.pages_.size() > table.pages.size()) {
      held->second.pages_.resize(table.pages.size());
      held->second.version_ = ++last_version_;
      prefixes_.Update(held->second.pages_, table.pages.size(), &held->second.prefixes_);
    }
  }
  Update(table);
}

}  // namespace tributary::worker
