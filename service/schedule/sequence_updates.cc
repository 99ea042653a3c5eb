#include "service/schedule/sequence_updates.h"

#include <string>
#include <utility>

#include "absl/container/flat_hash_set.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "base/status/errors.h"
#include "base/status/status_macros.h"

namespace tributary::service {
namespace {

using Kind = SequenceUpdate::Kind;
using State = UpdatedSequences::State;

absl::StatusOr<State> Apply(const SequenceUpdate& update, const ClientAccountPtr& owner,
                            SequenceTable* table) {
  switch (update.kind) {
    case Kind::kOpen: {
      bool reopened = false;
      TRIBUTARY_ASSIGN_OR_RETURN(const SequenceId id,
                                 table->Open(update.sequence, &reopened, owner));
      return State{id, 0};
    }
    case Kind::kFork: {
      TRIBUTARY_ASSIGN_OR_RETURN(const Sequence* child,
                                 table->Fork(update.parent, update.sequence, update.length, owner));
      return State{child->id, child->fork_length};
    }
    case Kind::kTruncate: {
      TRIBUTARY_ASSIGN_OR_RETURN(const int64_t held,
                                 table->Truncate(update.sequence, update.length));
      return State{update.sequence, held};
    }
    case Kind::kClose: {
      TRIBUTARY_RETURN_IF_ERROR(table->Close(update.sequence));
      return State{update.sequence, 0};
    }
  }
  return absl::InternalError("an update of no kind");
}

// The refusal of updates[i], with the field as the request has it, and its other details. One that
// names no field, as that of a limit, stays as it is.
absl::Status Named(int i, Kind kind, const absl::Status& status) {
  const std::string update = absl::StrCat("updates[", i, "]");
  if (kind == Kind::kFork) return PrefixField(absl::StrCat(update, ".fork"), status);
  if (kind == Kind::kTruncate) return PrefixField(absl::StrCat(update, ".truncate"), status);
  return RenameField(absl::StrCat(update, kind == Kind::kOpen ? ".open" : ".close"), status);
}

// Each sequence of one kind of update once, in order.
std::vector<SequenceId> Touched(const std::vector<SequenceUpdate>& updates,
                                const std::vector<State>& states, Kind kind) {
  std::vector<SequenceId> touched;
  absl::flat_hash_set<SequenceId> seen;
  for (size_t i = 0; i < updates.size(); ++i) {
    if (updates[i].kind != kind || !seen.insert(states[i].sequence).second) continue;
    touched.push_back(states[i].sequence);
  }
  return touched;
}

}  // namespace

absl::StatusOr<UpdatedSequences> ApplyUpdates(const std::vector<SequenceUpdate>& updates,
                                              const ClientAccountPtr& owner, SequenceTable* table) {
  SavedSequences saved;
  for (const SequenceUpdate& update : updates) {
    if (update.sequence != 0) table->Save(update.sequence, &saved);
  }
  HeldPages held;
  table->HoldReleased(&held);
  UpdatedSequences updated;
  absl::Status refused;
  for (size_t i = 0; i < updates.size(); ++i) {
    absl::StatusOr<State> state = Apply(updates[i], owner, table);
    if (!state.ok()) {
      table->PutBack(saved);
      refused = Named(static_cast<int>(i), updates[i].kind, state.status());
      break;
    }
    saved.try_emplace(state->sequence);  // an id that the table chose was nobody's before
    updated.states.push_back(*state);
  }
  table->HoldReleased(nullptr);
  table->ReleaseHeld(&held);
  TRIBUTARY_RETURN_IF_ERROR(refused);
  updated.closed = Touched(updates, updated.states, Kind::kClose);
  for (const SequenceId id : Touched(updates, updated.states, Kind::kFork)) {
    if (table->Find(id) != nullptr) updated.forked.push_back(id);
  }
  return updated;
}

}  // namespace tributary::service
