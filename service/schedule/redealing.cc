// SequenceTable: the same sequences over another number of ranks.
//
// A page of N ranks stands for page_size * N tokens. The pages of a sequence over M ranks therefore
// have the tokens of one or more of its pages over N ranks, or of parts of them. Two sequences
// share a new page if they share all the old ones that it has tokens of, as far as the shorter of
// them reaches. Then they share their tokens there, as they did before.
#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "base/status/rpc_errors.h"
#include "base/status/status_macros.h"
#include "service/schedule/sequence_table.h"
#include "worker/redeal.h"

namespace tributary::service {
namespace {

// A page that a sequence needs over the new number of ranks.
struct Need {
  int64_t index = 0;          // among the pages of its sequence
  std::vector<int32_t> from;  // the sequence's old pages with its tokens
  size_t sequence = 0;        // in the order of ids
};

bool Before(const Need& one, const Need& other) {
  return one.index != other.index ? one.index < other.index : one.from < other.from;
}

// Whether what a page has for `longer` is right for `shorter`, too.
bool Serves(const Need& longer, const Need& shorter) {
  return longer.index == shorter.index && longer.from.size() >= shorter.from.size() &&
         std::equal(shorter.from.begin(), shorter.from.end(), longer.from.begin());
}

}  // namespace

absl::Status SequenceTable::CheckMayRedeal() {
  const auto wait = [this](absl::string_view why) {
    return Unavailable("CACHE_NOT_WHOLE", absl::StrCat("cache '", geometry_.name, "': ", why),
                       geometry_.retry_delay);
  };
  if (missing(PagePlace::kRank) + missing(PagePlace::kReplica) > 0) {
    return wait("pages are being restored, or replicas made again");
  }
  std::vector<std::vector<int32_t>> listed;
  for (const PageAllocator& pages : pages_) {
    listed.emplace_back(static_cast<size_t>(pages.ever_taken()));
  }
  for (auto& [id, sequence] : sequences_) {
    if (!Mend(sequence.get()) && sequence->mendable) {
      return absl::FailedPreconditionError(
          absl::StrCat("cache '", geometry_.name, "': sequence ", id,
                       " lacks tokens that were lost with a worker; its host must bring them "
                       "again, open it anew or close it"));
    }
    for (int32_t group = 0; group < groups_.size(); ++group) {
      for (const int32_t page : sequence->groups[group].pages) {
        if (page != kNoPage) ++listed[static_cast<size_t>(group)][static_cast<size_t>(page)];
      }
    }
  }
  for (int32_t group = 0; group < groups_.size(); ++group) {
    for (int32_t page = 0; page < pages_[group].ever_taken(); ++page) {
      const int32_t in_lists = listed[static_cast<size_t>(group)][static_cast<size_t>(page)];
      if (pages_[group].references(page) != in_lists) return wait("calls are under way");
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<worker::MovedPage>> SequenceTable::RedealGroup(
    int32_t group, const SequenceTable& to, std::vector<PageList>* lists) const {
  const worker::RankChange ranks{geometry_.ranks, to.geometry_.ranks};
  std::vector<Need> needs;
  lists->clear();
  for (const SequenceId id : ids_) {
    const Sequence& sequence = *sequences_.at(id);
    const PageList& old = sequence.groups[group];
    PageList& list = lists->emplace_back();
    const int64_t tokens = sequence.lost ? 0 : LongestOf(group, sequence);
    const int64_t pages = (tokens + to.page_tokens() - 1) / to.page_tokens();
    list.pages.assign(static_cast<size_t>(pages), kNoPage);
    list.given_up = static_cast<int32_t>(std::min(pages, FirstHeld(old) / to.page_tokens()));
    for (int64_t index = list.given_up; index < pages; ++index) {
      const auto held = static_cast<int64_t>(old.pages.size());
      const int64_t first = std::min(held, worker::FirstSource(ranks, index));
      const int64_t end = std::min(held, worker::EndSource(ranks, index));
      needs.push_back({.index = index,
                       .from = {old.pages.begin() + first, old.pages.begin() + end},
                       .sequence = lists->size() - 1});
    }
  }
  std::sort(needs.begin(), needs.end(), Before);
  std::vector<worker::MovedPage> moved;
  // From behind, so that a page is made for the longest of those that share it.
  for (auto need = needs.rbegin(); need != needs.rend(); ++need) {
    if (need == needs.rbegin() || !Serves(*std::prev(need), *need)) {
      moved.push_back(
          {.page = static_cast<int32_t>(moved.size()), .index = need->index, .from = need->from});
    }
    (*lists)[need->sequence].pages[static_cast<size_t>(need->index)] = moved.back().page;
  }
  if (static_cast<int64_t>(moved.size()) <= to.pages_[group].total()) return moved;
  return absl::FailedPreconditionError(
      absl::StrCat("cache '", geometry_.name, "': its sequences take ", moved.size(), " pages of ",
                   to.geometry_.ranks, " workers, and it has ", to.pages_[group].total(),
                   ": close some of them, or create it larger"));
}

absl::StatusOr<SequenceTable::RedealtPages> SequenceTable::RedealInto(SequenceTable* to) {
  TRIBUTARY_RETURN_IF_ERROR(CheckMayRedeal());
  RedealtPages moved;
  std::vector<std::vector<PageList>> lists(static_cast<size_t>(groups_.size()));
  for (int32_t group = 0; group < groups_.size(); ++group) {
    TRIBUTARY_ASSIGN_OR_RETURN(std::vector<worker::MovedPage> pages,
                               RedealGroup(group, *to, &lists[static_cast<size_t>(group)]));
    moved.push_back(std::move(pages));
  }
  size_t place = 0;
  for (const SequenceId id : ids_) {
    Sequence sequence = *sequences_.at(id);
    sequence.owner = nullptr;
    for (int32_t group = 0; group < groups_.size(); ++group) {
      const std::optional<int64_t> reach = groups_[group].reach;
      const int64_t held_from = FirstHeld(sequence.groups[group]);
      // A new page may begin with tokens that were given up: the rule must still say so.
      if (reach.has_value() && held_from > 0) {
        sequence.longest =
            std::max(sequence.longest, held_from + *reach + geometry_.rollback_tokens);
      }
      sequence.groups[group] = std::move(lists[static_cast<size_t>(group)][place]);
    }
    ++place;
    to->Restore(std::move(sequence));
  }
  to->FinishRestoring();
  return moved;
}

void SequenceTable::TakeOwners(SequenceTable* from) {
  absl::flat_hash_set<ClientAccountPtr> owners;
  for (auto& [id, sequence] : sequences_) {
    Sequence* before = from->Find(id);
    if (before == nullptr || before->owner == nullptr) continue;
    sequence->owner = std::exchange(before->owner, nullptr);
    owners.insert(sequence->owner);
    for (int32_t group = 0; group < groups_.size(); ++group) {
      for (const int32_t page : sequence->groups[group].pages) {
        if (page != kNoPage) sequence->owner->Hold(geometry_.first_id + group, page);
      }
    }
  }
  for (const ClientAccountPtr& owner : owners) {
    for (int32_t group = 0; group < groups_.size(); ++group) {
      owner->ForgetPages(from->geometry_.first_id + group);
    }
  }
}

}  // namespace tributary::service
