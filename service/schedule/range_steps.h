// Steps over a range of layers, as sessions submit them.
//
// A step is accepted before it is carried out, and the next one may be accepted on top of it: its
// positions follow those of the first. So acceptance changes the table at once, and remembers how
// to undo that. Steps are settled in the order in which they were accepted, and those that failed
// are undone in the opposite order.
//
// Used under the coordinator's lock, like the table. The sequences of a step take part in nothing
// else until it is settled, but for later steps of the same session.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "service/schedule/client_quota.h"
#include "service/schedule/sequence_table.h"
#include "worker/command.h"

namespace tributary::service {

struct LayerRange {
  int32_t first = 0;
  int32_t count = 1;
  int32_t end() const { return first + count; }
};

// What happens to a sequence before the rows of its entry.
struct EntryChange {
  std::optional<int64_t> truncate_to;
  std::optional<SequenceId> fork_from;
  int64_t fork_length = -1;  // -1: all that it holds
};

// What the workers are told of one group of layers before the step.
struct GroupPages {
  int32_t group = 0;
  std::vector<worker::PageCopy> page_copies;
  std::vector<worker::PageUpdate> page_updates;
  std::vector<worker::Standing> standings;
};

// Made by Accept; ends with Settle or Undo.
struct AcceptedRange {
  LayerRange range;
  std::vector<worker::StepEntry> entries;  // `replay` filled in
  std::vector<GroupPages> pages;           // of each group that has layers in the range
  std::vector<int64_t> lengths;            // [entries], tokens after the step

  // How to undo it.
  struct Undo {
    StepReservation::Change change;
    int32_t group = 0;
    std::vector<int32_t> replaced;  // the pages that stood at change.replaced
  };
  struct Before {
    Sequence* sequence = nullptr;
    std::vector<int64_t> lengths;    // [layers of the range]
    std::vector<int64_t> last_step;  // [layers of the range]
  };
  std::vector<Undo> undo;
  std::vector<Before> before;  // [entries]
  std::vector<SequenceId> forked;
  HeldPages held;
};

class RangeSteps {
 public:
  explicit RangeSteps(SequenceTable& table) : table_(table) {}

  // Checks everything and changes the table, or changes nothing. `changes` are empty, or one per
  // entry. `owner` pays for sequences that are opened by a fork. Errors name fields of
  // SubmitStep (session.proto).
  absl::StatusOr<AcceptedRange> Accept(const LayerRange& range, worker::StepKind kind,
                                       const std::vector<worker::StepEntry>& entries,
                                       const std::vector<EntryChange>& changes,
                                       const ClientAccountPtr& owner);
  // Call it when all ranks have carried out the step, and all earlier steps have been settled.
  void Settle(AcceptedRange* accepted);
  // Call it when the step failed. Later steps have been undone, and no rank is still running this
  // one. Truncations that came with the step stay; sequences that it forked are lost.
  void Undo(AcceptedRange* accepted);

 private:
  absl::Status ApplyChanges(const std::vector<worker::StepEntry>& entries,
                            const std::vector<EntryChange>& changes, const ClientAccountPtr& owner,
                            SavedSequences* saved, AcceptedRange* accepted);
  absl::Status Fork(int index, SequenceId id, const EntryChange& change,
                    const ClientAccountPtr& owner, const SavedSequences& saved);
  // What was decided before the step about how its sequences stand.
  void TellStandings(AcceptedRange* accepted);
  absl::Status CheckLayers(int index, const Sequence& sequence, const LayerRange& range,
                           int64_t first_position) const;
  // DATA_LOSS of the entries' sequences that are lost: a step brings nothing back.
  absl::Status CheckWhole(const AcceptedRange& accepted);
  absl::Status ReserveLayers(worker::StepKind kind, AcceptedRange* accepted);
  void CommitLayers(const std::vector<StepReservation>& reservations, AcceptedRange* accepted);

  SequenceTable& table_;
};

}  // namespace tributary::service
