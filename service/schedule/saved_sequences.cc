// SequenceTable: sequences are saved before a change that may be refused half-way, and put back.
#include <cstdint>
#include <memory>

#include "service/schedule/sequence_table.h"

namespace tributary::service {

void SequenceTable::Save(SequenceId id, SavedSequences* saved) {
  const auto [place, added] = saved->try_emplace(id);
  if (!added) return;
  if (const Sequence* sequence = Find(id)) place->second = *sequence;
}

void SequenceTable::PutBack(const SavedSequences& saved) {
  // All accounts are relieved before any is charged again, so no client exceeds its limits. The
  // pages stay taken meanwhile, because what is released is held.
  for (const auto& [id, was] : saved) {
    Sequence* sequence = Find(id);
    if (sequence == nullptr) continue;
    if (sequence->lost) --lost_;
    Empty(sequence);
    Disown(sequence);
    if (was.has_value()) continue;
    sequences_.erase(id);
    ids_.erase(id);
  }
  for (const auto& [id, was] : saved) {
    if (!was.has_value()) continue;
    std::unique_ptr<Sequence>& sequence = sequences_[id];
    if (sequence == nullptr) sequence = std::make_unique<Sequence>();
    ids_.insert(id);
    *sequence = *was;
    if (sequence->lost) ++lost_;
    if (sequence->owner != nullptr) sequence->owner->TakeSequence().IgnoreError();  // as before
    for (int32_t g = 0; g < groups_.size(); ++g) {
      for (const int32_t page : sequence->groups[g].pages) {
        if (page != kNoPage) Retain(g, page, sequence->owner);
      }
    }
  }
}

}  // namespace tributary::service
