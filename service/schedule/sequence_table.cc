#include "service/schedule/sequence_table.h"

#include <algorithm>
#include <string>
#include <utility>

#include "absl/container/flat_hash_set.h"
#include "absl/random/random.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "base/status/errors.h"
#include "base/status/rpc_errors.h"
#include "base/status/status_macros.h"
#include "kernels/key_range.h"
#include "kernels/row_mask.h"

namespace tributary::service {
namespace {

int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Where an entry of a layer that holds `length` tokens stands; sets entry->replay.
absl::Status CheckPosition(FieldName field, worker::StepKind kind, int64_t length,
                           worker::StepEntry* entry) {
  const int64_t first = entry->first_position;
  // first <= length from here on, so sums with an int32 cannot overflow.
  if (first > length) return BeyondEnd(field(), first, length);
  if (kind == worker::StepKind::kDflash) return absl::OkStatus();
  if (entry->new_tokens == 0) {
    const int64_t end = first + entry->query_rows;
    if (end > length) return BeyondEnd(field(), end, length);
    return absl::OkStatus();
  }
  if (first == length) return absl::OkStatus();
  if (first + entry->new_tokens > length) {
    return InvalidField(
        field(),
        absl::StrCat("tokens [", first, ", ", first + entry->new_tokens, ") overlap the end at ",
                     length, ": they must start there (append) or end before it (repeat)"));
  }
  entry->replay = true;
  return absl::OkStatus();
}

std::vector<int64_t> WindowsOf(const TableGeometry& geometry) {
  return geometry.window_left.empty() ? std::vector<int64_t>(geometry.layers, -1)
                                      : geometry.window_left;
}

// Whether `child` is the fork of `length` tokens, on so many pages, that is asked for, and
// untouched.
bool IsForkOf(const Sequence& parent, int64_t length, int64_t shared, const Sequence& child) {
  if (child.lost || child.id == parent.id) return false;
  if (LeastLength(child) != length || GreatestLength(child) != length) return false;
  if (child.parent == parent.id && child.parent_tokens == parent.tokens &&
      child.fork_length == length) {
    return true;
  }
  // A coordinator that has restarted knows no parents. Who holds the same pages, and nothing else,
  // holds the same tokens.
  for (size_t g = 0; g < child.groups.size(); ++g) {
    const std::vector<int32_t>& pages = child.groups[g].pages;
    const std::vector<int32_t>& of_parent = parent.groups[g].pages;
    if (pages.size() != shared || of_parent.size() < pages.size()) return false;
    if (!std::equal(pages.begin(), pages.end(), of_parent.begin())) return false;
  }
  return length > 0;
}

// Drops what an index list says of indices outside [begin, end).
void KeepBetween(int64_t begin, int64_t end, std::vector<int32_t>* indices) {
  const auto outside = [&](int32_t i) { return i < begin || i >= end; };
  indices->erase(std::remove_if(indices->begin(), indices->end(), outside), indices->end());
}

// Adds table[index] = page, joined to the last update when it follows on.
void AddUpdate(SequenceId sequence, int32_t index, int32_t page,
               std::vector<worker::PageUpdate>* updates) {
  if (!updates->empty()) {
    worker::PageUpdate& last = updates->back();
    if (last.sequence == sequence &&
        last.first_index + static_cast<int32_t>(last.pages.size()) == index) {
      last.pages.push_back(page);
      return;
    }
  }
  updates->push_back({sequence, index, {page}});
}

}  // namespace

int64_t LeastLength(const Sequence& sequence) {
  return *std::min_element(sequence.lengths.begin(), sequence.lengths.end());
}

int64_t GreatestLength(const Sequence& sequence) {
  return *std::max_element(sequence.lengths.begin(), sequence.lengths.end());
}

SequenceTable::SequenceTable(const TableGeometry& geometry)
    : geometry_(geometry), groups_(WindowsOf(geometry), geometry.window_pages > 0) {
  for (int32_t g = 0; g < groups_.size(); ++g) {
    const bool own = geometry.window_pages > 0 && groups_[g].reach.has_value();
    pages_.emplace_back(own ? geometry.window_pages : geometry.pages);
    missing_.emplace_back(geometry.ranks, pages_.back().total(), geometry.replica_stride > 0);
    lost_pages_.emplace_back(geometry.ranks, groups_[g].layers.size());
  }
  untold_.resize(groups_.size());
}

Sequence* SequenceTable::Find(SequenceId id) {
  const auto it = sequences_.find(id);
  return it == sequences_.end() ? nullptr : it->second.get();
}

SequenceId SequenceTable::UnusedId() {
  absl::BitGen random;
  while (true) {
    const SequenceId id = absl::Uniform<uint64_t>(random) >> 1;
    if (id != 0 && !sequences_.contains(id)) return id;
  }
}

absl::StatusOr<SequenceId> SequenceTable::Open(SequenceId id, bool* reopened,
                                               ClientAccountPtr owner) {
  *reopened = false;
  if (Sequence* held = id == 0 ? nullptr : Find(id)) {
    if (!held->lost && GreatestLength(*held) > 0) {
      return Conflict("sequence_id", absl::StrCat("sequence ", id, " is open and holds ",
                                                  GreatestLength(*held), " tokens"));
    }
    if (owner != nullptr && owner != held->owner) TRIBUTARY_RETURN_IF_ERROR(owner->TakeSequence());
    if (held->lost) --lost_;
    Empty(held);
    if (owner != held->owner) Disown(held);
    held->owner = std::move(owner);
    held->lost = false;
    held->mendable = false;
    held->parent = 0;
    TellLengthsLater(id);
    *reopened = true;
    return id;
  }
  if (static_cast<int64_t>(sequences_.size()) >= geometry_.max_sequences) {
    return Exhausted(absl::StrCat("sequences of cache ", geometry_.name),
                     absl::StrCat("all ", geometry_.max_sequences, " are open"));
  }
  if (owner != nullptr) TRIBUTARY_RETURN_IF_ERROR(owner->TakeSequence());
  if (id == 0) id = UnusedId();
  auto sequence = std::make_unique<Sequence>();
  sequence->id = id;
  sequence->tokens = ++last_tokens_;
  sequence->owner = std::move(owner);
  sequence->lengths.assign(geometry_.layers, 0);
  sequence->last_step.assign(geometry_.layers, 0);
  sequence->groups.resize(groups_.size());
  sequences_.emplace(id, std::move(sequence));
  ids_.insert(id);
  return id;
}

absl::StatusOr<Sequence*> SequenceTable::Fork(SequenceId parent_id, SequenceId child_id,
                                              int64_t length, ClientAccountPtr owner) {
  Sequence* parent = Find(parent_id);
  if (parent == nullptr) return NotFound("sequence", absl::StrCat(parent_id), "parent_id");
  if (!Mend(parent)) return LostError({parent_id}, 0, "parent_id");
  if (length < 0) length = LeastLength(*parent);
  TRIBUTARY_RETURN_IF_ERROR(CheckFork([] { return "length"; }, *parent, length));
  if (Sequence* child = child_id == 0 ? nullptr : Find(child_id)) {
    if (IsForkOf(*parent, length, CeilDiv(length, page_tokens()), *child)) {
      Recognise(*parent, length, child);
      return child;
    }
    return Conflict("sequence_id", absl::StrCat("sequence ", child_id, " is open"));
  }
  const int64_t shared = CeilDiv(length, page_tokens());
  if (owner != nullptr && owner != parent->owner) {
    int64_t more = 0;
    for (int32_t g = 0; g < groups_.size() && length > 0; ++g) {
      const PageList& from = parent->groups[g];
      const auto pages = absl::MakeConstSpan(from.pages).first(shared).subspan(from.given_up);
      more += owner->CountNew(geometry_.first_id + g, pages);
    }
    TRIBUTARY_RETURN_IF_ERROR(owner->CheckRoom(more));
  }
  bool reopened = false;
  TRIBUTARY_ASSIGN_OR_RETURN(child_id, Open(child_id, &reopened, std::move(owner)));
  Sequence* child = Find(child_id);
  BecomeFork(*parent, length, child);
  return child;
}

absl::StatusOr<int64_t> SequenceTable::Truncate(SequenceId id, int64_t length) {
  Sequence* sequence = Find(id);
  if (sequence == nullptr) return NotFound("sequence", absl::StrCat(id), "sequence_id");
  if (sequence->lost && !sequence->mendable) return Lost({id}, "sequence_id");
  TRIBUTARY_RETURN_IF_ERROR(CheckCut([] { return "length"; }, *sequence, length));
  for (int64_t& held : sequence->lengths) held = std::min(held, length);
  for (int64_t& begin : sequence->last_step) begin = std::min(begin, length);
  if (GreatestLength(*sequence) == 0) sequence->longest = 0;
  ReplaceTokens(length, sequence);
  for (int32_t g = 0; g < groups_.size(); ++g) {
    Shorten(g, CeilDiv(LongestOf(g, *sequence), page_tokens()), sequence);
  }
  TellLengthsLater(id);
  Mend(sequence);
  return LeastLength(*sequence);
}

std::vector<const Sequence*> SequenceTable::Next(SequenceId after, size_t most) const {
  std::vector<const Sequence*> next;
  for (auto id = ids_.upper_bound(after); id != ids_.end() && next.size() < most; ++id) {
    next.push_back(sequences_.at(*id).get());
  }
  return next;
}

absl::Status SequenceTable::Close(SequenceId id) {
  Sequence* sequence = Find(id);
  if (sequence == nullptr) return NotFound("sequence", absl::StrCat(id), "sequence_id");
  if (sequence->lost) --lost_;
  Empty(sequence);
  Disown(sequence);
  sequences_.erase(id);
  ids_.erase(id);
  for (auto& untold : untold_) untold.erase(id);
  return absl::OkStatus();
}

void SequenceTable::Disown(Sequence* sequence) {
  if (const ClientAccountPtr owner = std::exchange(sequence->owner, nullptr)) {
    owner->ReturnSequence();
  }
}

void SequenceTable::DisownAll() {
  absl::flat_hash_set<ClientAccountPtr> owners;
  for (auto& [id, sequence] : sequences_) {
    if (sequence->owner != nullptr) owners.insert(sequence->owner);
    Disown(sequence.get());
  }
  for (const ClientAccountPtr& owner : owners) {
    for (int32_t g = 0; g < groups_.size(); ++g) owner->ForgetPages(geometry_.first_id + g);
  }
}

void SequenceTable::Retain(int32_t group, int32_t page, const ClientAccountPtr& owner) {
  pages_[group].Retain(page);
  if (owner != nullptr) owner->Hold(geometry_.first_id + group, page);
}

void SequenceTable::Release(int32_t group, int32_t page, const ClientAccountPtr& owner) {
  if (owner != nullptr) owner->Release(geometry_.first_id + group, page);
  if (held_ != nullptr) {
    held_->pages.push_back({group, page});
  } else {
    ReleaseReference(group, page);
  }
}

void SequenceTable::ReleaseReference(int32_t group, int32_t page) {
  pages_[group].Release(page);
  if (pages_[group].references(page) > 0) return;
  missing_[group].Forget(page);
  lost_pages_[group].Forget(page);
}

void SequenceTable::Return(int32_t group, const StepReservation::Change& change) {
  for (const int32_t page : change.added) Release(group, page, change.owner);
  for (const auto& [index, page] : change.replaced) Release(group, page, change.owner);
}

void SequenceTable::Shorten(int32_t group, int64_t keep, Sequence* sequence) {
  PageList& list = sequence->groups[group];
  while (static_cast<int64_t>(list.pages.size()) > keep) {
    if (list.pages.back() != kNoPage) Release(group, list.pages.back(), sequence->owner);
    list.pages.pop_back();
  }
  list.given_up = std::min(list.given_up, static_cast<int32_t>(list.pages.size()));
  // What lies beyond the pages is dead: it is told again when the table grows.
  KeepBetween(0, keep, &list.unsynced);
}

void SequenceTable::Empty(Sequence* sequence) {
  for (int32_t g = 0; g < groups_.size(); ++g) Shorten(g, 0, sequence);
  sequence->lengths.assign(geometry_.layers, 0);
  sequence->last_step.assign(geometry_.layers, 0);
  sequence->longest = 0;
  ReplaceTokens(0, sequence);
}

void SequenceTable::ReplaceTokens(int64_t from, Sequence* sequence) {
  if (from < sequence->fork_length) sequence->parent = 0;
  if (from >= sequence->longest_fork) return;
  sequence->tokens = ++last_tokens_;
  sequence->longest_fork = 0;
}

void SequenceTable::Recognise(const Sequence& parent, int64_t length, Sequence* child) {
  child->parent = 0;
  Sequence* const now = Find(parent.id);
  if (now == nullptr || now->tokens != parent.tokens || LeastLength(*now) < length) return;
  child->parent = parent.id;
  child->fork_length = length;
  child->parent_tokens = now->tokens;
  now->longest_fork = std::max(now->longest_fork, length);
}

int64_t SequenceTable::LongestOf(int32_t group, const Sequence& sequence) const {
  int64_t greatest = 0;
  for (const int32_t layer : groups_[group].layers) {
    greatest = std::max(greatest, sequence.lengths[layer]);
  }
  return greatest;
}

int64_t SequenceTable::HeldFrom(const Sequence& sequence) const {
  int64_t from = 0;
  for (const PageList& list : sequence.groups) from = std::max(from, FirstHeld(list));
  return from;
}

int64_t SequenceTable::FirstKept(int32_t group, const Sequence& sequence) const {
  const std::optional<int64_t> reach = groups_[group].reach;
  if (!reach.has_value()) return 0;
  const int64_t begin = std::max<int64_t>(0, sequence.longest - geometry_.rollback_tokens);
  // After a restart only the entries without pages tell which tokens were given up.
  return std::max(FirstVisible({*reach, -1}, begin), FirstHeld(sequence.groups[group]));
}

int64_t SequenceTable::FirstPossible(int32_t layer, int64_t kept) const {
  return kept == 0 ? 0 : kept + geometry_.window_left[layer];
}

absl::Status SequenceTable::CheckReach(FieldName field, const Sequence& sequence, int32_t layer,
                                       int64_t position) const {
  const int32_t group = groups_.PlaceOf(layer).group;
  const bool repeats = position >= sequence.last_step[layer];
  const int64_t held = FirstHeld(sequence.groups[group]);
  const int64_t kept = repeats ? held : FirstKept(group, sequence);
  const int64_t possible = FirstPossible(layer, kept);
  if (position >= possible) return absl::OkStatus();
  // The last step may be repeated, if what it looked for is there.
  const int64_t last = sequence.last_step[layer];
  const bool repeatable = !repeats && last >= FirstPossible(layer, held);
  return GivenUp(field(), position, repeatable ? std::min(last, possible) : possible);
}

absl::Status SequenceTable::CheckCut(FieldName field, const Sequence& sequence,
                                     int64_t length) const {
  if (length == 0) return absl::OkStatus();
  int64_t possible = 0;
  for (int32_t layer = 0; layer < geometry_.layers; ++layer) {
    if (sequence.lengths[layer] <= length) continue;
    const int64_t kept = FirstKept(groups_.PlaceOf(layer).group, sequence);
    possible = std::max(possible, FirstPossible(layer, kept));
  }
  return length >= possible ? absl::OkStatus() : GivenUp(field(), length, possible);
}

void SequenceTable::GiveUp(int32_t group, Sequence* sequence) {
  const std::optional<int64_t> reach = groups_[group].reach;
  if (!reach.has_value()) return;
  // The earliest position at which a row of any layer may yet begin, and the furthest look back.
  const int64_t begin =
      std::min(LeastLength(*sequence) - geometry_.rollback_tokens,
               *std::min_element(sequence->last_step.begin(), sequence->last_step.end()));
  const int64_t reached = FirstVisible({*reach, -1}, std::max<int64_t>(0, begin));
  PageList& list = sequence->groups[group];
  while (FirstHeld(list) + page_tokens() <= reached) {
    Release(group, std::exchange(list.pages[list.given_up], kNoPage), sequence->owner);
    ++list.given_up;
    ++given_up_;
    TellLater(group, sequence->id, false);
  }
  KeepBetween(list.given_up, static_cast<int64_t>(list.pages.size()), &list.unsynced);
}

absl::StatusOr<StepReservation> SequenceTable::Reserve(
    int32_t layer, worker::StepKind kind, const std::vector<worker::StepEntry>& entries) {
  StepReservation reservation;
  reservation.layer = layer;
  reservation.group = groups_.PlaceOf(layer).group;
  reservation.entries = entries;
  reservation.changes.reserve(entries.size());
  for (int i = 0; i < static_cast<int>(entries.size()); ++i) {
    if (absl::Status status = ReserveEntry(i, kind, &reservation); !status.ok()) {
      for (const StepReservation::Change& change : reservation.changes)
        Return(reservation.group, change);
      EndCopies(reservation.group, reservation.page_copies);
      // All lost ones are named, unless the call is there to mend one.
      const bool mends = kind == worker::StepKind::kAppend && MissingTokensOf(status).has_value();
      if (!absl::IsDataLoss(status) || mends) return status;
      return LostError(LostOf(entries), layer, FieldOf(status));
    }
  }
  return reservation;
}

std::vector<SequenceId> SequenceTable::LostOf(const std::vector<worker::StepEntry>& entries) {
  std::vector<SequenceId> lost;
  for (const worker::StepEntry& entry : entries) {
    const Sequence* sequence = Find(entry.sequence);
    const bool named = !lost.empty() && lost.back() == entry.sequence;
    if (sequence != nullptr && sequence->lost && !named) lost.push_back(entry.sequence);
  }
  return lost;
}

absl::Status SequenceTable::ReserveEntry(int index, worker::StepKind kind,
                                         StepReservation* reservation) {
  worker::StepEntry& entry = reservation->entries[index];
  Sequence* sequence = Find(entry.sequence);
  if (sequence == nullptr) {
    return NotFound("sequence", absl::StrCat(entry.sequence), EntryField(index, "sequence_id"));
  }
  if (!Mend(sequence)) {
    const bool may_mend = sequence->mendable && kind == worker::StepKind::kAppend;
    if (may_mend) return ReserveMissing(index, reservation);
    return LostError({entry.sequence}, reservation->layer, EntryField(index, "sequence_id"));
  }
  if (!reservation->changes.empty() && reservation->changes.back().sequence == sequence) {
    return InvalidField(EntryField(index, "sequence_id"),
                        absl::StrCat("sequence ", entry.sequence, " appears twice"));
  }
  const int64_t length = sequence->lengths[reservation->layer];
  const auto position = [index] { return EntryField(index, "first_position"); };
  TRIBUTARY_RETURN_IF_ERROR(CheckPosition(position, kind, length, &entry));
  TRIBUTARY_RETURN_IF_ERROR(
      CheckReach(position, *sequence, reservation->layer, entry.first_position));
  TRIBUTARY_RETURN_IF_ERROR(
      CheckThere([index] { return EntryField(index, "sequence_id"); }, *sequence));

  reservation->changes.push_back({.sequence = sequence, .length = length});
  StepReservation::Change* change = &reservation->changes.back();
  change->owner = sequence->owner;
  const PageList& list = sequence->groups[reservation->group];
  change->resent = list.unsynced;
  for (const int32_t i : change->resent) {
    AddUpdate(sequence->id, i, list.pages[i], &reservation->page_updates);
  }
  const bool keeps = kind != worker::StepKind::kDflash && entry.new_tokens > 0;
  if (!keeps || entry.replay) return absl::OkStatus();
  change->length = length + entry.new_tokens;
  return ReservePages(length, change->length, change, reservation);
}

// Makes the pages of tokens [begin, end) the sequence's own: those it shares are copied, those it
// lacks are added.
absl::Status SequenceTable::ReservePages(int64_t begin, int64_t end,
                                         StepReservation::Change* change,
                                         StepReservation* reservation) {
  const Sequence& sequence = *change->sequence;
  const PageList& list = sequence.groups[reservation->group];
  PageAllocator& pages = pages_[reservation->group];
  const int64_t held = static_cast<int64_t>(list.pages.size());
  const int64_t needed = std::max<int64_t>(0, CeilDiv(end, page_tokens()) - held);
  const int64_t last_held = std::min(held - 1, (end - 1) / page_tokens());
  std::vector<int32_t> shared;
  for (int64_t i = begin / page_tokens(); i <= last_held; ++i) {
    if (pages.IsShared(list.pages[i])) shared.push_back(static_cast<int32_t>(i));
  }
  const int64_t wanted = needed + static_cast<int64_t>(shared.size());
  const ClientAccountPtr& owner = change->owner;
  if (owner != nullptr) TRIBUTARY_RETURN_IF_ERROR(owner->CheckRoom(wanted));
  std::vector<int32_t> fresh;
  if (wanted > pages.free() || !pages.Reserve(static_cast<int32_t>(wanted), &fresh)) {
    const char* which = groups_.size() > 1 && groups_[reservation->group].reach.has_value()
                            ? "window pages of cache "
                            : "pages of cache ";
    return Exhausted(
        absl::StrCat(which, geometry_.name),
        absl::StrCat(wanted, " needed, ", pages.free(), " of ", pages.total(), " free"));
  }
  if (owner != nullptr) {
    for (const int32_t page : fresh) owner->Hold(geometry_.first_id + reservation->group, page);
  }
  auto next = fresh.begin();
  for (const int32_t index : shared) {
    reservation->page_copies.push_back({list.pages[index], *next});
    missing_[reservation->group].CopyAndPin(list.pages[index], *next);
    AddUpdate(sequence.id, index, *next, &reservation->page_updates);
    change->replaced.emplace_back(index, *next++);
  }
  for (int64_t i = 0; i < needed; ++i) {
    AddUpdate(sequence.id, static_cast<int32_t>(held + i), *next, &reservation->page_updates);
    change->added.push_back(*next++);
  }
  return absl::OkStatus();
}

void SequenceTable::Commit(const StepReservation& reservation) {
  CommitAhead(reservation);
  EndCopies(reservation.group, reservation.page_copies);
  for (const StepReservation::Change& change : reservation.changes) {
    if (!change.sequence->lost) GiveUpOld(change.sequence);
  }
}

void SequenceTable::CommitAhead(const StepReservation& reservation) {
  for (size_t i = 0; i < reservation.changes.size(); ++i) {
    const StepReservation::Change& change = reservation.changes[i];
    Sequence& sequence = *change.sequence;
    if (change.brings_back) {
      if (sequence.mendable) BringBack(reservation.entries[i], reservation.layer, &sequence);
      continue;
    }
    if (sequence.lost) {  // since it was reserved
      Return(reservation.group, change);
      continue;
    }
    PageList& list = sequence.groups[reservation.group];
    const int64_t before = std::exchange(sequence.lengths[reservation.layer], change.length);
    for (const auto& [index, page] : change.replaced) {
      Release(reservation.group, std::exchange(list.pages[index], page), sequence.owner);
    }
    list.pages.insert(list.pages.end(), change.added.begin(), change.added.end());
    list.unsynced.clear();
    if (change.length == before) continue;
    sequence.parent = 0;
    sequence.last_step[reservation.layer] = before;
    // Where it writes, no other sequence has anything.
    if (!lost_pages_[reservation.group].any()) continue;
    for (auto page = static_cast<size_t>(before / page_tokens()); page < list.pages.size();
         ++page) {
      lost_pages_[reservation.group].Forget(list.pages[page]);
    }
  }
}

void SequenceTable::GiveUpOld(Sequence* sequence) {
  sequence->longest = std::max(sequence->longest, LeastLength(*sequence));
  for (int32_t g = 0; g < groups_.size(); ++g) GiveUp(g, sequence);
}

void SequenceTable::EndCopies(int32_t group, const std::vector<worker::PageCopy>& copies) {
  for (const worker::PageCopy& copy : copies) missing_[group].Unpin(copy.destination);
}

void SequenceTable::Rollback(const StepReservation& reservation) {
  EndCopies(reservation.group, reservation.page_copies);
  for (const StepReservation::Change& change : reservation.changes) {
    Return(reservation.group, change);
    // Workers that did the step count its tokens.
    const Sequence& sequence = *change.sequence;
    if (!sequence.lost && change.length != sequence.lengths[reservation.layer]) {
      TellLater(reservation.group, sequence.id, true);
    }
    for (const auto& [index, page] : change.replaced) {
      // Some workers may now point at the copy, whose page is no longer ours.
      auto& unsynced = change.sequence->groups[reservation.group].unsynced;
      if (std::find(unsynced.begin(), unsynced.end(), index) == unsynced.end()) {
        unsynced.push_back(index);
      }
    }
  }
}

void SequenceTable::ReleaseHeld(HeldPages* held) {
  for (const HeldPages::Page& page : held->pages) ReleaseReference(page.group, page.page);
  held->pages.clear();
}

void SequenceTable::UndoPages(const StepReservation::Change& change, int32_t group,
                              const std::vector<int32_t>& replaced) {
  Sequence* sequence = change.sequence;
  PageList& list = sequence->groups[group];
  for (size_t i = 0; i < replaced.size(); ++i) {
    const auto [index, copy] = change.replaced[i];
    Retain(group, replaced[i], sequence->owner);
    Release(group, std::exchange(list.pages[index], replaced[i]), sequence->owner);
    if (std::find(list.unsynced.begin(), list.unsynced.end(), index) == list.unsynced.end()) {
      list.unsynced.push_back(index);
    }
  }
  Shorten(group, CeilDiv(LongestOf(group, *sequence), page_tokens()), sequence);
  TellLengthsLater(sequence->id);
}

absl::Status SequenceTable::CheckFork(FieldName field, const Sequence& from, int64_t length) const {
  const int64_t held = LeastLength(from);
  if (length > held) return BeyondEnd(field(), length, held);
  TRIBUTARY_RETURN_IF_ERROR(CheckThere(field, from));
  return CheckCut(field, from, length);
}

void SequenceTable::BecomeFork(const Sequence& from, int64_t length, Sequence* to) {
  const int64_t shared = CeilDiv(length, page_tokens());
  for (int32_t g = 0; g < groups_.size(); ++g) {
    const PageList& source = from.groups[g];
    for (int64_t i = length > 0 ? source.given_up : shared; i < shared; ++i) {
      Retain(g, source.pages[i], to->owner);
    }
  }
  Empty(to);
  if (from.lease != nullptr) to->lease = from.lease;
  Recognise(from, length, to);
  to->lengths.assign(geometry_.layers, length);
  to->last_step.assign(geometry_.layers, length);
  to->longest = length > 0 ? from.longest : 0;
  for (int32_t g = 0; g < groups_.size(); ++g) {
    const PageList& source = from.groups[g];
    PageList& list = to->groups[g];
    list.pages.assign(source.pages.begin(), source.pages.begin() + shared);
    list.given_up = length > 0 ? source.given_up : 0;
    list.unsynced.clear();
  }
  TellLengthsLater(to->id);
}

void SequenceTable::MarkLost(Sequence* sequence) {
  if (sequence->lost && !sequence->mendable) return;
  const std::vector<int64_t> lengths = sequence->lengths;
  Empty(sequence);
  Disown(sequence);
  sequence->lengths = lengths;  // what the caller must bring again
  if (!std::exchange(sequence->lost, true)) ++lost_;
  sequence->mendable = false;
  TellLengthsLater(sequence->id);
}

std::vector<int32_t> SequenceTable::ToldPages(const PageList& list) {
  std::vector<int32_t> pages = list.pages;
  std::fill_n(pages.begin(), list.given_up, 0);
  return pages;
}

std::vector<SequenceTable::Told> SequenceTable::Snapshot(int32_t group) {
  std::vector<Told> all;
  for (auto& [id, sequence] : sequences_) {
    PageList& list = sequence->groups[group];
    list.unsynced.clear();
    Told& told = all.emplace_back();
    if (!list.pages.empty()) told.table = worker::PageUpdate{id, 0, ToldPages(list)};
    told.standing = StandingOf(group, *sequence, true);
  }
  untold_[group].clear();
  return all;
}

int64_t SequenceTable::LocalTokens(int rank, const Sequence& sequence, int64_t length) const {
  const DcpLayout layout{rank, geometry_.ranks, geometry_.interleave};
  int64_t from = length;
  for (const PageList& list : sequence.groups) from = std::min(from, FirstHeld(list));
  return LocalLength(layout, length) - LocalLength(layout, from);
}

}  // namespace tributary::service
