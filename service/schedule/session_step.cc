#include "service/schedule/session_step.h"

#include <algorithm>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "base/status/errors.h"
#include "base/status/rpc_errors.h"
#include "base/status/status_macros.h"
#include "service/schedule/entry_list.h"

namespace tributary::service {
namespace {

absl::Status CheckLayers(const v1::SubmitStep& message, int32_t layers) {
  if (message.first_layer() < 0 || message.first_layer() >= layers) {
    return InvalidField("first_layer",
                        absl::StrCat("must be 0 to ", layers - 1, ", is ", message.first_layer()));
  }
  const int32_t most = layers - message.first_layer();
  if (message.layers() < 1 || message.layers() > most) {
    return InvalidField("layers", absl::StrCat("must be 1 to ", most, ", is ", message.layers()));
  }
  return absl::OkStatus();
}

absl::Status CheckRoom(absl::string_view field, int64_t wanted, int64_t room) {
  if (wanted <= room) return absl::OkStatus();
  return Exhausted(absl::StrCat("session ", field),
                   absl::StrCat("the step has ", wanted, ", the session was opened for ", room));
}

// What a host asks for with a few bytes must not take the service's memory before anything else
// refuses it.
absl::Status CheckPieces(absl::string_view field, int64_t wanted, int64_t room) {
  if (room == 0 || wanted <= room * kMostPieces) return absl::OkStatus();
  return Exhausted(absl::StrCat("session ", field),
                   absl::StrCat("the step has ", wanted, ", which is more than ", kMostPieces,
                                " pieces of ", room));
}

absl::StatusOr<std::vector<mailbox::Piece>> Cut(const EntryList& entries, const SessionTerms& terms,
                                                bool draft) {
  const worker::OpenSessionCommand& room = terms.command;
  TRIBUTARY_RETURN_IF_ERROR(CheckPieces("max_rows", entries.query_rows(), room.max_rows));
  TRIBUTARY_RETURN_IF_ERROR(
      CheckPieces("max_new_tokens", entries.new_tokens(), room.max_new_tokens));
  std::vector<mailbox::EntryRows> rows;
  for (const worker::StepEntry& entry : entries.entries()) {
    rows.push_back({entry.query_rows, entry.new_tokens});
  }
  std::vector<mailbox::Piece> pieces =
      mailbox::CutIntoPieces(rows, room.max_rows, room.max_new_tokens, draft);
  if (pieces.empty()) {
    TRIBUTARY_RETURN_IF_ERROR(CheckRoom("max_rows", entries.query_rows(), room.max_rows));
    TRIBUTARY_RETURN_IF_ERROR(
        CheckRoom("max_new_tokens", entries.new_tokens(), room.max_new_tokens));
  }
  return pieces;
}

absl::Status AddEntry(const v1::SessionStepEntry& entry, bool append_only, bool draft,
                      EntryList* entries, std::vector<EntryChange>* changes) {
  const auto index = static_cast<int>(entries->entries().size());
  if (append_only) {
    if (entry.query_rows() != 0) {
      return InvalidField(EntryField(index, "query_rows"), "must be 0 in an append-only step");
    }
    TRIBUTARY_RETURN_IF_ERROR(entries->AddTokens(entry.sequence_id(), entry.first_position(),
                                                 entry.new_tokens(), "new_tokens"));
  } else {
    TRIBUTARY_RETURN_IF_ERROR(entries->AddRows(entry.sequence_id(), entry.first_position(),
                                               entry.query_rows(), entry.new_tokens(), draft));
  }
  EntryChange change;
  if (entry.has_truncate_to()) {
    if (entry.truncate_to() < 0) {
      return InvalidField(EntryField(index, "truncate_to"), "must be >= 0");
    }
    change.truncate_to = entry.truncate_to();
  }
  if (entry.has_fork_from()) {
    if (entry.sequence_id() == 0) {
      return InvalidField(EntryField(index, "sequence_id"), "must be given with fork_from");
    }
    change.fork_from = entry.fork_from();
  }
  if (entry.has_fork_length()) {
    if (!entry.has_fork_from()) {
      return InvalidField(EntryField(index, "fork_length"), "is given, but fork_from is not");
    }
    if (entry.fork_length() < 0) {
      return InvalidField(EntryField(index, "fork_length"), "must be >= 0");
    }
    change.fork_length = entry.fork_length();
  }
  changes->push_back(change);
  return absl::OkStatus();
}

}  // namespace

std::vector<SequenceId> SessionStepRequest::Sequences() const {
  absl::flat_hash_set<SequenceId> all;
  for (const worker::StepEntry& entry : entries) all.insert(entry.sequence);
  for (const EntryChange& change : changes) {
    if (change.fork_from.has_value()) all.insert(*change.fork_from);
  }
  return {all.begin(), all.end()};
}

absl::StatusOr<SessionStepRequest> CheckSessionStep(const v1::SubmitStep& message,
                                                    const SessionTerms& terms,
                                                    const worker::CacheSpec& spec,
                                                    const CacheTerms& cache_terms,
                                                    const worker::CacheBackends& backends) {
  TRIBUTARY_RETURN_IF_ERROR(CheckLayers(message, static_cast<int32_t>(spec.layers.size())));
  TRIBUTARY_ASSIGN_OR_RETURN(const worker::AttentionMode mode, ReadMode(message.mode(), "mode"));
  TRIBUTARY_RETURN_IF_ERROR(CheckMode(mode, cache_terms, backends));
  if (message.entries().empty()) return InvalidField("entries", "must not be empty");
  const bool draft = message.mode() == v1::ATTEND_MODE_DFLASH;
  if (draft && message.append_only()) {
    return InvalidField("append_only", "a draft's tokens are not kept");
  }
  SessionStepRequest request{.step_id = message.step_id(),
                             .range = {message.first_layer(), message.layers()}};
  EntryList entries;
  for (const v1::SessionStepEntry& entry : message.entries()) {
    TRIBUTARY_RETURN_IF_ERROR(
        AddEntry(entry, message.append_only(), draft, &entries, &request.changes));
  }
  const bool changes =
      std::any_of(request.changes.begin(), request.changes.end(), [](const EntryChange& change) {
        return change.fork_from.has_value() || change.truncate_to.has_value();
      });
  if (!changes) request.changes.clear();
  TRIBUTARY_ASSIGN_OR_RETURN(request.pieces, Cut(entries, terms, draft));
  request.entries = entries.entries();
  request.kind = draft ? worker::StepKind::kDflash : entries.Kind();
  return request;
}

}  // namespace tributary::service
