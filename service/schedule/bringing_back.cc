// SequenceTable: sequences of which some tokens are gone for good, and hosts that bring those
// again.
#include <algorithm>
#include <utility>
#include <vector>

#include "base/status/errors.h"
#include "base/status/rpc_errors.h"
#include "base/status/status_macros.h"
#include "kernels/key_range.h"
#include "service/schedule/sequence_table.h"

namespace tributary::service {
namespace {

// Of an error: its details travel in a trailer, which has room for a few kilobytes.
constexpr size_t kRangesTold = 100;

// Local slots [begin, end) of a rank as ranges of positions, added in order.
void AddRanges(const DcpLayout& layout, int64_t begin, int64_t end,
               std::vector<PositionRange>* ranges) {
  while (begin < end) {
    const int64_t turn_end = (begin / layout.interleave + 1) * layout.interleave;
    const int64_t first = GlobalPosition(layout, begin);
    ranges->push_back({first, first + std::min(turn_end, end) - begin});
    begin = std::min(turn_end, end);
  }
}

// Sorted, and ranges that touch are one.
void Join(std::vector<PositionRange>* ranges) {
  std::sort(ranges->begin(), ranges->end(),
            [](const PositionRange& a, const PositionRange& b) { return a.begin < b.begin; });
  std::vector<PositionRange> joined;
  for (const PositionRange& range : *ranges) {
    if (!joined.empty() && joined.back().end == range.begin) {
      joined.back().end = range.end;
    } else {
      joined.push_back(range);
    }
  }
  *ranges = std::move(joined);
}

}  // namespace

std::vector<PositionRange> SequenceTable::LackingIn(const Sequence& sequence, int32_t layer,
                                                    size_t index) const {
  const LayerPlace place = groups_.PlaceOf(layer);
  const int32_t page = sequence.groups[place.group].pages[index];
  std::vector<PositionRange> ranges;
  if (!lost_pages_[place.group].Has(page)) return ranges;
  for (int rank = 0; rank < geometry_.ranks; ++rank) {
    const std::optional<int32_t> lacking =
        lost_pages_[place.group].FirstLacking(rank, page, place.index);
    if (!lacking.has_value()) continue;
    const DcpLayout layout{rank, geometry_.ranks, geometry_.interleave};
    const auto first = static_cast<int64_t>(index) * geometry_.page_size;
    const int64_t held =
        std::min(LocalLength(layout, sequence.lengths[layer]), first + geometry_.page_size);
    AddRanges(layout, first + *lacking, held, &ranges);
  }
  Join(&ranges);
  return ranges;
}

std::optional<PositionRange> SequenceTable::NextLacking(const Sequence& sequence, int32_t layer,
                                                        int64_t from) const {
  const LayerPlace place = groups_.PlaceOf(layer);
  if (!lost_pages_[place.group].any()) return std::nullopt;
  const size_t pages = sequence.groups[place.group].pages.size();
  std::optional<PositionRange> next;
  for (auto i = static_cast<size_t>(from / page_tokens()); i < pages; ++i) {
    for (const PositionRange& range : LackingIn(sequence, layer, i)) {
      if (range.end <= from) continue;
      if (!next.has_value()) {
        next = {std::max(range.begin, from), range.end};
      } else if (range.begin == next->end) {  // it goes on in the next page
        next->end = range.end;
      } else {
        return next;
      }
    }
    if (next.has_value() && next->end < static_cast<int64_t>(i + 1) * page_tokens()) return next;
  }
  return next;
}

MissingTokens SequenceTable::MissingOf(const Sequence& sequence, int32_t layer) const {
  MissingTokens missing{.sequence = sequence.id, .layer = layer};
  // A layer that lacks nothing any more waits for the others.
  for (int32_t i = 0; i < geometry_.layers && !NextLacking(sequence, missing.layer, 0); ++i) {
    missing.layer = i;
  }
  const int32_t group = groups_.PlaceOf(missing.layer).group;
  for (size_t i = 0; i < sequence.groups[group].pages.size(); ++i) {
    for (const PositionRange& range : LackingIn(sequence, missing.layer, i)) {
      missing.tokens += range.end - range.begin;
      const bool joins = !missing.ranges.empty() && missing.ranges.back().end == range.begin;
      if (joins) {
        missing.ranges.back().end = range.end;
      } else if (missing.ranges.size() < kRangesTold) {
        missing.ranges.push_back(range);
      }
    }
  }
  return missing;
}

int64_t SequenceTable::CountLacking(const Sequence& sequence, int32_t layer) const {
  int64_t tokens = 0;
  const int32_t group = groups_.PlaceOf(layer).group;
  for (size_t i = 0; i < sequence.groups[group].pages.size(); ++i) {
    for (const PositionRange& range : LackingIn(sequence, layer, i)) {
      tokens += range.end - range.begin;
    }
  }
  return tokens;
}

void SequenceTable::LoseSequences() {
  const auto touched = [this](const Sequence& sequence) {
    for (int32_t group = 0; group < groups_.size(); ++group) {
      for (const int32_t page : sequence.groups[group].pages) {
        if (lost_pages_[group].Has(page)) return true;
      }
    }
    return false;
  };
  for (auto& [id, sequence] : sequences_) {
    if ((sequence->lost && !sequence->mendable) || !touched(*sequence)) continue;
    bool lacks = false;
    bool any_left = false;
    for (int32_t layer = 0; layer < geometry_.layers; ++layer) {
      const int64_t from = FirstHeld(sequence->groups[groups_.PlaceOf(layer).group]);
      const int64_t held = std::max<int64_t>(0, sequence->lengths[layer] - from);
      const int64_t lacking = CountLacking(*sequence, layer);
      lacks |= lacking > 0;
      any_left |= lacking < held;
    }
    if (!lacks) continue;
    if (!any_left) {
      MarkLost(sequence.get());
      continue;
    }
    if (!std::exchange(sequence->lost, true)) ++lost_;
    sequence->mendable = true;
    TellLengthsLater(id);
  }
}

absl::Status SequenceTable::LostError(const std::vector<SequenceId>& lost, int32_t layer,
                                      absl::string_view field) const {
  const Sequence& first = *sequences_.at(lost.front());
  if (!first.mendable) return Lost(lost, field);
  return Lost(lost, field, MissingOf(first, layer));
}

bool SequenceTable::Mend(Sequence* sequence) {
  if (!sequence->lost) return true;
  if (!sequence->mendable) return false;
  for (int32_t layer = 0; layer < geometry_.layers; ++layer) {
    if (NextLacking(*sequence, layer, 0).has_value()) return false;
  }
  sequence->lost = false;
  sequence->mendable = false;
  --lost_;
  TellLengthsLater(sequence->id);
  return true;
}

absl::Status SequenceTable::ReserveMissing(int index, StepReservation* reservation) {
  worker::StepEntry& entry = reservation->entries[index];
  Sequence* sequence = Find(entry.sequence);
  const auto field = [index] { return EntryField(index, "first_position"); };
  const int32_t layer = reservation->layer;
  const int64_t end = entry.first_position + entry.new_tokens;
  // Where the tokens end that entries before this one bring.
  int64_t brought = 0;
  for (size_t i = reservation->changes.size(); i > 0 && brought == 0; --i) {
    const StepReservation::Change& change = reservation->changes[i - 1];
    if (change.sequence != sequence) break;
    const worker::StepEntry& before = reservation->entries[i - 1];
    if (change.brings_back) brought = before.first_position + before.new_tokens;
  }
  const std::optional<PositionRange> in_entry = NextLacking(*sequence, layer, entry.first_position);
  const bool held = end <= sequence->lengths[layer];
  const bool lacks_some = in_entry.has_value() && in_entry->begin < end;
  if (lacks_some) {
    const std::optional<PositionRange> next = NextLacking(*sequence, layer, brought);
    const bool in_order = next->begin == entry.first_position && end <= next->end;
    if (!in_order) return LostError({entry.sequence}, layer, field());
  } else if (!held) {
    return LostError({entry.sequence}, layer, field());
  } else {
    TRIBUTARY_RETURN_IF_ERROR(CheckReach(field, *sequence, layer, entry.first_position));
  }
  TRIBUTARY_RETURN_IF_ERROR(
      CheckThere([index] { return EntryField(index, "sequence_id"); }, *sequence));
  entry.replay = !lacks_some;
  entry.brings_back = lacks_some;
  reservation->changes.push_back({.sequence = sequence,
                                  .length = sequence->lengths[layer],
                                  .owner = sequence->owner,
                                  .brings_back = lacks_some});
  return absl::OkStatus();
}

void SequenceTable::BringBack(const worker::StepEntry& entry, int32_t layer, Sequence* sequence) {
  const LayerPlace place = groups_.PlaceOf(layer);
  const PageList& list = sequence->groups[place.group];
  const DcpLayout any{0, geometry_.ranks, geometry_.interleave};
  const int64_t end = entry.first_position + entry.new_tokens;
  for (int64_t t = entry.first_position; t < end;) {
    const int64_t turn_end = std::min(end, (t / any.interleave + 1) * any.interleave);
    const int64_t last = LocalSlot(any, turn_end - 1);
    lost_pages_[place.group].Fill(
        OwnerOf(any, t), list.pages[static_cast<size_t>(last / geometry_.page_size)], place.index,
        static_cast<int32_t>(last % geometry_.page_size) + 1);
    t = turn_end;
  }
  if (!NextLacking(*sequence, layer, 0).has_value()) Mend(sequence);
}

}  // namespace tributary::service
