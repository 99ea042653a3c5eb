// SequenceTable: what workers are told of sequences besides steps, so that they can tell it to a
// coordinator that has restarted.
#include <algorithm>
#include <memory>
#include <utility>

#include "service/schedule/sequence_table.h"

namespace tributary::service {

void SequenceTable::TellLengthsLater(SequenceId id) {
  for (int32_t group = 0; group < groups_.size(); ++group) TellLater(group, id, true);
}

worker::Standing SequenceTable::StandingOf(int32_t group, const Sequence& sequence,
                                           bool lengths) const {
  worker::Standing standing{
      .sequence = sequence.id, .given_up = sequence.groups[group].given_up, .lengths = {}};
  if (!lengths) return standing;
  if (sequence.lost) {  // a coordinator that restarts does not know what is missing
    standing.lengths = {0};
    return standing;
  }
  for (const int32_t layer : groups_[group].layers) {
    standing.lengths.push_back(sequence.lengths[layer]);
  }
  const int64_t first = standing.lengths.front();
  const auto same = [first](int64_t length) { return length == first; };
  if (std::all_of(standing.lengths.begin(), standing.lengths.end(), same)) {
    standing.lengths.resize(1);
  }
  return standing;
}

std::vector<worker::Standing> SequenceTable::TakeStandings(int32_t group) {
  std::vector<worker::Standing> standings;
  for (const auto& [id, lengths] : untold_[group]) {
    if (const Sequence* sequence = Find(id)) {
      standings.push_back(StandingOf(group, *sequence, lengths));
    }
  }
  untold_[group].clear();
  return standings;
}

std::optional<worker::Standing> SequenceTable::TakeLengths(int32_t group, SequenceId id) {
  const auto untold = untold_[group].find(id);
  if (untold == untold_[group].end() || !untold->second) return std::nullopt;
  untold_[group].erase(untold);
  const Sequence* sequence = Find(id);
  if (sequence == nullptr) return std::nullopt;
  return StandingOf(group, *sequence, true);
}

std::vector<bool> SequenceTable::UntoldLengths(SequenceId id) const {
  std::vector<bool> untold;
  for (const auto& group : untold_) {
    const auto found = group.find(id);
    untold.push_back(found != group.end() && found->second);
  }
  return untold;
}

void SequenceTable::SetUntoldLengths(SequenceId id, const std::vector<bool>& untold) {
  for (size_t group = 0; group < untold_.size(); ++group) {
    if (untold[group]) {
      untold_[group][id] = true;
    } else if (const auto found = untold_[group].find(id); found != untold_[group].end()) {
      found->second = false;  // what it gave up is told in any case
    }
  }
}

void SequenceTable::Restore(Sequence sequence) {
  for (int32_t group = 0; group < groups_.size(); ++group) {
    for (const int32_t page : sequence.groups[group].pages) {
      if (page != kNoPage) pages_[group].Claim(page);
    }
  }
  if (sequence.lost) ++lost_;
  ids_.insert(sequence.id);
  const SequenceId id = sequence.id;
  sequences_.emplace(id, std::make_unique<Sequence>(std::move(sequence)));
}

void SequenceTable::FinishRestoring() {
  for (PageAllocator& pages : pages_) pages.FinishClaims();
}

}  // namespace tributary::service
