#include "worker/holdings.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status/errors.h"

namespace tributary::worker {

absl::Status SequenceRecords::Check(const std::vector<Standing>& standings,
                                    const char* field) const {
  for (size_t i = 0; i < standings.size(); ++i) {
    const Standing& standing = standings[i];
    if (standing.given_up < 0) {
      return InvalidField(absl::StrCat(field, "[", i, "].given_up"),
                          absl::StrCat("must be >= 0, is ", standing.given_up));
    }
    const auto lengths = static_cast<int32_t>(standing.lengths.size());
    if (lengths > 1 && lengths != layers_) {
      return InvalidField(
          absl::StrCat(field, "[", i, "].lengths"),
          absl::StrCat("must have ", layers_, " elements, or one, or none, has ", lengths));
    }
  }
  return absl::OkStatus();
}

SequenceRecords::Record& SequenceRecords::Of(SequenceId sequence) {
  Record& record = records_[sequence];
  if (record.lengths.empty()) {
    record.lengths.assign(static_cast<size_t>(layers_), 0);
    record.last_step.assign(static_cast<size_t>(layers_), 0);
  }
  return record;
}

void SequenceRecords::Tell(const std::vector<Standing>& standings) {
  for (const Standing& standing : standings) {
    Record& record = Of(standing.sequence);
    const auto none = [](int64_t length) { return length == 0; };
    const bool emptied = !standing.lengths.empty() &&
                         std::all_of(standing.lengths.begin(), standing.lengths.end(), none);
    // What was given up stays so while the sequence holds anything, whatever was decided earlier
    // and is told later.
    record.given_up = emptied ? standing.given_up : std::max(record.given_up, standing.given_up);
    if (standing.lengths.empty()) continue;
    if (standing.lengths.size() == 1) {
      record.lengths.assign(record.lengths.size(), standing.lengths.front());
    } else {
      record.lengths = standing.lengths;
    }
    for (size_t layer = 0; layer < record.lengths.size(); ++layer) {
      record.last_step[layer] = std::min(record.last_step[layer], record.lengths[layer]);
    }
  }
}

void SequenceRecords::Settle(SequenceId sequence) {
  const auto of = [sequence](const Undo& undo) { return undo.sequence == sequence; };
  undo_.erase(std::remove_if(undo_.begin(), undo_.end(), of), undo_.end());
}

void SequenceRecords::Drop(SequenceId sequence) {
  Settle(sequence);
  records_.erase(sequence);
}

void SequenceRecords::SettleUpTo(CommandMark mark) {
  // What an earlier epoch did is settled sequence by sequence, as tables are told anew.
  while (!undo_.empty() && undo_.front().mark.epoch == mark.epoch && undo_.front().mark <= mark) {
    undo_.pop_front();
  }
}

void SequenceRecords::BeforeUpdates(CommandMark mark, const std::vector<PageUpdate>& updates,
                                    const PageTables& tables) {
  for (const PageUpdate& update : updates) {
    const PageTable* table = tables.Find(update.sequence);
    Undo undo{.mark = mark, .sequence = update.sequence, .first_index = update.first_index};
    if (table != nullptr) {
      undo.table_size = table->size();
      const auto first = static_cast<size_t>(update.first_index);
      const size_t end = std::min(first + update.pages.size(), table->pages().size());
      if (first < end) {
        undo.pages.assign(table->pages().begin() + static_cast<std::ptrdiff_t>(first),
                          table->pages().begin() + static_cast<std::ptrdiff_t>(end));
      }
    }
    undo_.push_back(std::move(undo));
  }
}

void SequenceRecords::AfterStep(CommandMark mark, const StepCommand& step) {
  if (step.kind == StepKind::kDflash) return;
  const auto layer = static_cast<size_t>(step.layer);
  for (const StepEntry& entry : step.entries) {
    if (entry.new_tokens == 0 || entry.replay || entry.more_follows || entry.brings_back) continue;
    Record& record = Of(entry.sequence);
    undo_.push_back({.mark = mark,
                     .sequence = entry.sequence,
                     .layer = step.layer,
                     .length = record.lengths[layer],
                     .last_step = record.last_step[layer],
                     .pages = {}});
    // Steps before this one may have begun the entry.
    record.last_step[layer] = std::min(entry.first_position, record.lengths[layer]);
    record.lengths[layer] = entry.first_position + entry.new_tokens;
  }
}

void SequenceRecords::Report(const PageTables& tables, HeldCache* held) const {
  held->sequences.reserve(records_.size());
  for (const auto& [id, record] : records_) {
    HeldSequence sequence{.id = id,
                          .pages = {},
                          .given_up = record.given_up,
                          .lengths = record.lengths,
                          .last_step = record.last_step};
    if (const PageTable* table = tables.Find(id)) {
      sequence.pages.assign(table->pages().begin(), table->pages().end());
    }
    held->sequences.push_back(std::move(sequence));
  }
  held->undo.assign(undo_.begin(), undo_.end());
}

}  // namespace tributary::worker
