#include "service/schedule/range_steps.h"

#include <algorithm>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status/errors.h"
#include "base/status/rpc_errors.h"
#include "base/status/status_macros.h"

namespace tributary::service {

absl::StatusOr<AcceptedRange> RangeSteps::Accept(const LayerRange& range, worker::StepKind kind,
                                                 const std::vector<worker::StepEntry>& entries,
                                                 const std::vector<EntryChange>& changes,
                                                 const ClientAccountPtr& owner) {
  AcceptedRange accepted;
  accepted.range = range;
  accepted.entries = entries;
  for (int32_t layer = range.first; layer < range.end(); ++layer) {
    const int32_t group = table_.groups().PlaceOf(layer).group;
    const auto of = [group](const GroupPages& pages) { return pages.group == group; };
    if (std::none_of(accepted.pages.begin(), accepted.pages.end(), of)) {
      accepted.pages.push_back({.group = group});
    }
  }
  std::vector<std::vector<bool>> untold;
  for (const worker::StepEntry& entry : entries) {
    untold.push_back(table_.UntoldLengths(entry.sequence));
  }
  SavedSequences saved;  // that truncations and forks change
  table_.HoldReleased(&accepted.held);
  absl::Status status;
  if (!changes.empty()) status = ApplyChanges(entries, changes, owner, &saved, &accepted);
  if (status.ok()) {
    TellStandings(&accepted);
    status = ReserveLayers(kind, &accepted);
  }
  if (!status.ok()) table_.PutBack(saved);
  table_.HoldReleased(nullptr);
  for (size_t i = 0; i < entries.size() && !status.ok(); ++i) {
    table_.SetUntoldLengths(entries[i].sequence, untold[i]);
  }
  if (!status.ok()) {
    table_.ReleaseHeld(&accepted.held);
    return status;
  }
  return accepted;
}

// ------------------------------------------------------------------------- truncations and forks

absl::Status RangeSteps::ApplyChanges(const std::vector<worker::StepEntry>& entries,
                                      const std::vector<EntryChange>& changes,
                                      const ClientAccountPtr& owner, SavedSequences* saved,
                                      AcceptedRange* accepted) {
  // All forks see the sequences as they were.
  for (size_t i = 0; i < entries.size(); ++i) {
    if (changes[i].fork_from.has_value()) {
      // What another fork was brought may have mended it.
      if (Sequence* from = table_.Find(*changes[i].fork_from)) table_.Mend(from);
      table_.Save(*changes[i].fork_from, saved);
    }
    if (changes[i].fork_from.has_value() || changes[i].truncate_to.has_value()) {
      table_.Save(entries[i].sequence, saved);
    }
  }
  for (size_t i = 0; i < entries.size(); ++i) {
    const auto index = static_cast<int>(i);
    const SequenceId id = entries[i].sequence;
    if (changes[i].fork_from.has_value()) {
      TRIBUTARY_RETURN_IF_ERROR(Fork(index, id, changes[i], owner, *saved));
      accepted->forked.push_back(id);
    }
    if (!changes[i].truncate_to.has_value()) continue;
    const absl::Status truncated = table_.Truncate(id, *changes[i].truncate_to).status();
    if (!truncated.ok()) {
      const bool cut = FieldOf(truncated) == "length";
      return RenameField(EntryField(index, cut ? "truncate_to" : "sequence_id"), truncated);
    }
  }
  // Workers are told whole tables of forks. What a truncated sequence lost, they need not forget.
  for (size_t i = 0; i < entries.size(); ++i) {
    if (!changes[i].fork_from.has_value()) continue;
    const Sequence& sequence = *table_.Find(entries[i].sequence);
    for (int32_t group = 0; group < table_.groups().size(); ++group) {
      const auto of = [group](const GroupPages& pages) { return pages.group == group; };
      auto told = std::find_if(accepted->pages.begin(), accepted->pages.end(), of);
      if (told == accepted->pages.end()) {
        told = accepted->pages.insert(told, {.group = group});
      }
      told->page_updates.push_back(
          {sequence.id, 0, SequenceTable::ToldPages(sequence.groups[group])});
    }
  }
  return absl::OkStatus();
}

void RangeSteps::TellStandings(AcceptedRange* accepted) {
  for (int32_t group = 0; group < table_.groups().size(); ++group) {
    for (const worker::StepEntry& entry : accepted->entries) {
      std::optional<worker::Standing> standing = table_.TakeLengths(group, entry.sequence);
      if (!standing.has_value()) continue;
      const auto of = [group](const GroupPages& pages) { return pages.group == group; };
      auto told = std::find_if(accepted->pages.begin(), accepted->pages.end(), of);
      if (told == accepted->pages.end()) {
        told = accepted->pages.insert(told, GroupPages{.group = group});
      }
      told->standings.push_back(*std::move(standing));
    }
  }
}

absl::Status RangeSteps::Fork(int index, SequenceId id, const EntryChange& change,
                              const ClientAccountPtr& owner, const SavedSequences& saved) {
  const std::optional<Sequence>& found = saved.at(*change.fork_from);
  if (!found.has_value()) {
    return NotFound("sequence", absl::StrCat(*change.fork_from), EntryField(index, "fork_from"));
  }
  const Sequence& from = *found;
  if (from.lost) return table_.LostError({from.id}, 0, EntryField(index, "fork_from"));
  const int64_t length = change.fork_length < 0 ? LeastLength(from) : change.fork_length;
  TRIBUTARY_RETURN_IF_ERROR(
      table_.CheckFork([index] { return EntryField(index, "fork_length"); }, from, length));
  Sequence* to = table_.Find(id);
  if (to == nullptr) {
    bool reopened = false;
    TRIBUTARY_RETURN_IF_ERROR(table_.Open(id, &reopened, owner).status());
    to = table_.Find(id);
  }
  if (to->lost) return Lost({id}, EntryField(index, "sequence_id"));
  table_.BecomeFork(from, length, to);
  return absl::OkStatus();
}

// ---------------------------------------------------------------------------------------- layers

absl::Status RangeSteps::CheckLayers(int index, const Sequence& sequence, const LayerRange& range,
                                     int64_t first_position) const {
  for (int32_t layer = range.first; layer < range.end(); ++layer) {
    const int64_t length = sequence.lengths[layer];
    if (length != sequence.lengths[range.first]) {
      return FieldError(absl::StatusCode::kOutOfRange, EntryField(index, "first_position"),
                        absl::StrCat("layer ", range.first, " holds ",
                                     sequence.lengths[range.first], " tokens and layer ", layer,
                                     " holds ", length, ": a step needs layers of one length"));
    }
    TRIBUTARY_RETURN_IF_ERROR(table_.CheckReach(
        [index] { return EntryField(index, "first_position"); }, sequence, layer, first_position));
  }
  return absl::OkStatus();
}

absl::Status RangeSteps::CheckWhole(const AcceptedRange& accepted) {
  std::vector<SequenceId> lost;
  std::string field;
  for (size_t i = 0; i < accepted.entries.size(); ++i) {
    Sequence* sequence = table_.Find(accepted.entries[i].sequence);
    if (sequence == nullptr || table_.Mend(sequence)) continue;
    if (lost.empty()) field = EntryField(static_cast<int>(i), "sequence_id");
    lost.push_back(sequence->id);
  }
  return lost.empty() ? absl::OkStatus() : table_.LostError(lost, accepted.range.first, field);
}

absl::Status RangeSteps::ReserveLayers(worker::StepKind kind, AcceptedRange* accepted) {
  const LayerRange& range = accepted->range;
  TRIBUTARY_RETURN_IF_ERROR(CheckWhole(*accepted));
  for (size_t i = 0; i < accepted->entries.size(); ++i) {
    const worker::StepEntry& entry = accepted->entries[i];
    const Sequence* sequence = table_.Find(entry.sequence);
    if (sequence == nullptr) continue;  // which Reserve tells
    TRIBUTARY_RETURN_IF_ERROR(
        CheckLayers(static_cast<int>(i), *sequence, range, entry.first_position));
  }
  std::vector<StepReservation> reservations;
  absl::Status status;
  for (const GroupPages& pages : accepted->pages) {
    const std::vector<int32_t>& layers = table_.groups()[pages.group].layers;
    const auto first = std::find_if(layers.begin(), layers.end(), [&](int32_t layer) {
      return layer >= range.first && layer < range.end();
    });
    if (first == layers.end()) continue;  // told of a fork, but not of the step
    absl::StatusOr<StepReservation> reserved = table_.Reserve(*first, kind, accepted->entries);
    if (!reserved.ok()) {
      status = reserved.status();
      break;
    }
    reservations.push_back(*std::move(reserved));
  }
  if (!status.ok()) {
    for (const StepReservation& reservation : reservations) table_.Rollback(reservation);
    return status;
  }
  CommitLayers(reservations, accepted);
  return absl::OkStatus();
}

void RangeSteps::CommitLayers(const std::vector<StepReservation>& reservations,
                              AcceptedRange* accepted) {
  const LayerRange& range = accepted->range;
  accepted->entries = reservations.front().entries;
  for (const StepReservation::Change& change : reservations.front().changes) {
    const Sequence& sequence = *change.sequence;
    const auto in_range = [&range](const std::vector<int64_t>& of_layers) {
      return std::vector<int64_t>(of_layers.begin() + range.first, of_layers.begin() + range.end());
    };
    accepted->before.push_back(
        {change.sequence, in_range(sequence.lengths), in_range(sequence.last_step)});
    accepted->lengths.push_back(change.length);
  }
  for (const StepReservation& reservation : reservations) {
    const auto told =
        std::find_if(accepted->pages.begin(), accepted->pages.end(),
                     [&](const GroupPages& pages) { return pages.group == reservation.group; });
    told->page_copies = reservation.page_copies;
    told->page_updates.insert(told->page_updates.end(), reservation.page_updates.begin(),
                              reservation.page_updates.end());
    for (const StepReservation::Change& change : reservation.changes) {
      AcceptedRange::Undo undo{.change = change, .group = reservation.group};
      const PageList& list = change.sequence->groups[reservation.group];
      for (const auto& [index, page] : change.replaced) undo.replaced.push_back(list.pages[index]);
      accepted->undo.push_back(std::move(undo));
    }
    table_.CommitAhead(reservation);
  }
  for (size_t i = 0; i < accepted->before.size(); ++i) {
    Sequence& sequence = *accepted->before[i].sequence;
    const int64_t before = accepted->before[i].lengths.front();
    if (accepted->lengths[i] == before) continue;
    for (int32_t layer = range.first; layer < range.end(); ++layer) {
      sequence.lengths[layer] = accepted->lengths[i];
      sequence.last_step[layer] = before;
    }
  }
}

void RangeSteps::Settle(AcceptedRange* accepted) {
  for (const AcceptedRange::Before& before : accepted->before) {
    if (!before.sequence->lost) table_.GiveUpOld(before.sequence);
  }
  for (const GroupPages& pages : accepted->pages) table_.EndCopies(pages.group, pages.page_copies);
  table_.ReleaseHeld(&accepted->held);
}

void RangeSteps::Undo(AcceptedRange* accepted) {
  for (const AcceptedRange::Before& before : accepted->before) {
    Sequence& sequence = *before.sequence;
    if (sequence.lost && !sequence.mendable) continue;
    // A later step may have cut it shorter than it was.
    for (int32_t i = 0; i < accepted->range.count; ++i) {
      int64_t& length = sequence.lengths[accepted->range.first + i];
      int64_t& last_step = sequence.last_step[accepted->range.first + i];
      length = std::min(length, before.lengths[i]);
      last_step = std::min({length, last_step, before.last_step[i]});
    }
    table_.ReplaceTokens(LeastLength(sequence), &sequence);
    table_.TellLengthsLater(sequence.id);
  }
  for (auto undo = accepted->undo.rbegin(); undo != accepted->undo.rend(); ++undo) {
    if (!undo->change.sequence->lost || undo->change.sequence->mendable) {
      table_.UndoPages(undo->change, undo->group, undo->replaced);
    }
  }
  for (const GroupPages& pages : accepted->pages) table_.EndCopies(pages.group, pages.page_copies);
  // What they were forked from may have counted tokens of steps that failed.
  for (const SequenceId id : accepted->forked) {
    if (Sequence* sequence = table_.Find(id)) table_.MarkLost(sequence);
  }
  table_.ReleaseHeld(&accepted->held);
}

}  // namespace tributary::service
