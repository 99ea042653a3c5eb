// SequenceTable: sequences are saved before a change that may be refused half-way, and put back.
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "service/schedule/sequence_table.h"

namespace tributary::service {

SavedSequence SequenceTable::Save(SequenceId id) {
  SavedSequence saved{.id = id};
  const Sequence* sequence = Find(id);
  if (sequence == nullptr) return saved;
  saved.was = *sequence;
  for (int32_t g = 0; g < groups_.size(); ++g) {
    for (const int32_t page : sequence->groups[g].pages) {
      if (page != kNoPage) pages_[g].Retain(page);
    }
  }
  return saved;
}

void SequenceTable::Forget(const std::vector<SavedSequence>& saved) {
  for (const SavedSequence& each : saved) {
    if (!each.was.has_value()) continue;
    for (int32_t g = 0; g < groups_.size(); ++g) {
      for (const int32_t page : each.was->groups[g].pages) {
        if (page != kNoPage) pages_[g].Release(page);
      }
    }
  }
}

void SequenceTable::PutBack(std::vector<SavedSequence> saved) {
  // All accounts are relieved before any is charged again, so no client exceeds its limits.
  for (const SavedSequence& each : saved) {
    Sequence* sequence = Find(each.id);
    if (sequence == nullptr) continue;
    if (sequence->lost) --lost_;
    Empty(sequence);
    Disown(sequence);
    if (!each.was.has_value()) sequences_.erase(each.id);
  }
  for (SavedSequence& each : saved) {
    if (!each.was.has_value()) continue;
    std::unique_ptr<Sequence>& sequence = sequences_[each.id];
    if (sequence == nullptr) sequence = std::make_unique<Sequence>();
    *sequence = *std::move(each.was);
    if (sequence->lost) ++lost_;
    if (sequence->owner == nullptr) continue;
    sequence->owner->TakeSequence().IgnoreError();  // it held this one before
    // The references that Save took are the sequence's own now.
    for (int32_t g = 0; g < groups_.size(); ++g) {
      for (const int32_t page : sequence->groups[g].pages) {
        if (page != kNoPage) sequence->owner->Hold(geometry_.first_id + g, page);
      }
    }
  }
}

}  // namespace tributary::service
