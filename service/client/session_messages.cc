#include "service/client/session_messages.h"

#include <cstddef>

namespace tributary::client {

v1::SubmitStep MessageOf(const SessionStep& step, uint64_t step_id) {
  v1::SubmitStep message;
  message.set_step_id(step_id);
  message.set_mode(step.mode);
  message.set_first_layer(step.first_layer);
  message.set_layers(step.layers);
  message.set_append_only(step.append_only);
  for (const SessionEntry& entry : step.entries) {
    v1::SessionStepEntry* out = message.add_entries();
    out->set_sequence_id(entry.sequence_id);
    out->set_first_position(entry.first_position);
    out->set_query_rows(entry.query_rows);
    out->set_new_tokens(entry.new_tokens);
    if (entry.truncate_to.has_value()) out->set_truncate_to(*entry.truncate_to);
    if (entry.fork_from.has_value()) out->set_fork_from(*entry.fork_from);
    if (entry.fork_length.has_value()) out->set_fork_length(*entry.fork_length);
  }
  return message;
}

std::vector<mailbox::Piece> PiecesOf(const SessionStep& step, int32_t max_rows,
                                     int32_t max_new_tokens) {
  std::vector<mailbox::EntryRows> rows;
  rows.reserve(step.entries.size());
  for (const SessionEntry& entry : step.entries) {
    rows.push_back({entry.query_rows, entry.new_tokens});
  }
  return mailbox::CutIntoPieces(rows, max_rows, max_new_tokens,
                                step.mode == v1::ATTEND_MODE_DFLASH);
}

SessionLayer PartOf(const SessionLayer& layer, const mailbox::Piece& piece, ElementBytes bytes) {
  const auto cut = [](HeadRows rows, int32_t first, int32_t count, int32_t element_bytes) {
    if (rows.data == nullptr) return rows;
    rows.data = static_cast<std::byte*>(rows.data) + first * RowStride(rows) * element_bytes;
    rows.rows = count;
    return rows;
  };
  SessionLayer part{.q = cut(layer.q, piece.first_row, piece.rows, bytes.inputs),
                    .k = cut(layer.k, piece.first_token, piece.tokens, bytes.inputs),
                    .v = cut(layer.v, piece.first_token, piece.tokens, bytes.inputs),
                    .output = cut(layer.output, piece.first_row, piece.rows, bytes.output)};
  if (layer.lse != nullptr) {
    part.lse = layer.lse + static_cast<size_t>(piece.first_row) * layer.q.heads;
  }
  return part;
}

}  // namespace tributary::client
