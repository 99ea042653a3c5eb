#include "service/schedule/step_pieces.h"

#include <algorithm>

#include "worker/choose_path.h"

namespace tributary::service {

std::vector<worker::StepEntry> EntriesOf(std::span<const worker::StepEntry> entries,
                                         const mailbox::Piece& piece) {
  std::vector<worker::StepEntry> of_piece;
  of_piece.reserve(piece.parts.size());
  for (const mailbox::PiecePart& part : piece.parts) {
    worker::StepEntry& entry = of_piece.emplace_back(entries[static_cast<size_t>(part.entry)]);
    entry.first_position += part.offset;
    entry.query_rows = part.rows;
    entry.new_tokens = part.tokens;
  }
  return of_piece;
}

worker::StepKind KindOf(worker::StepKind kind, std::span<const mailbox::Piece> pieces,
                        const mailbox::Piece& piece) {
  if (kind == worker::StepKind::kDflash || pieces.size() == 1) return kind;
  int32_t rows = 0;
  int32_t tokens = 0;
  for (const mailbox::PiecePart& part : piece.parts) {
    rows = std::max(rows, part.rows);
    tokens = std::max(tokens, part.tokens);
  }
  return worker::ChoosePath(rows, tokens);
}

}  // namespace tributary::service
