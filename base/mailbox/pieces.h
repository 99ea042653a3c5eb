// How steps of sessions that have more rows than a slot are cut. Host and service cut alike.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

namespace tributary::mailbox {

// One sequence of a step. It has as many rows as new tokens, or none of one of them.
struct EntryRows {
  int32_t rows = 0;
  int32_t tokens = 0;
};

// What a piece takes of an entry: `rows` rows and `tokens` tokens from number `offset` on.
struct PiecePart {
  int32_t entry = 0;
  int32_t offset = 0;
  int32_t rows = 0;
  int32_t tokens = 0;
};

// What goes through a slot at a time: rows [first_row, first_row + rows) and tokens [first_token,
// first_token + tokens) of the step, in their order.
struct Piece {
  int32_t first_row = 0;
  int32_t rows = 0;
  int32_t first_token = 0;
  int32_t tokens = 0;
  std::vector<PiecePart> parts;
};

// Cuts the entries in their order, each piece as large as the slot allows. `whole`: no entry is
// cut, as for drafts, whose rows see each other. The result is empty where an entry does not fit
// into a slot and may not be cut.
inline std::vector<Piece> CutIntoPieces(std::span<const EntryRows> entries, int32_t max_rows,
                                        int32_t max_tokens, bool whole = false) {
  std::vector<Piece> pieces(1);
  const auto next = [&pieces] {
    const Piece& last = pieces.back();
    pieces.push_back(
        {.first_row = last.first_row + last.rows, .first_token = last.first_token + last.tokens});
  };
  for (int32_t i = 0; i < static_cast<int32_t>(entries.size()); ++i) {
    const EntryRows& entry = entries[static_cast<size_t>(i)];
    const int32_t count = std::max(entry.rows, entry.tokens);
    for (int32_t done = 0; done < count;) {
      const Piece& piece = pieces.back();
      int32_t room = count - done;
      if (entry.rows > 0) room = std::min(room, max_rows - piece.rows);
      if (entry.tokens > 0) room = std::min(room, max_tokens - piece.tokens);
      if (room < (whole ? count : 1)) {
        if (piece.parts.empty()) return {};
        next();
        continue;
      }
      Piece& to = pieces.back();
      const int32_t rows = entry.rows > 0 ? room : 0;
      const int32_t tokens = entry.tokens > 0 ? room : 0;
      to.parts.push_back({.entry = i, .offset = done, .rows = rows, .tokens = tokens});
      to.rows += rows;
      to.tokens += tokens;
      done += room;
    }
  }
  return pieces;
}

}  // namespace tributary::mailbox
