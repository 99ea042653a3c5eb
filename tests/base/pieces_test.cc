// How steps are cut into pieces of a slot.
#include "base/mailbox/pieces.h"

#include <gtest/gtest.h>

#include <random>
#include <vector>

namespace tributary::mailbox {
namespace {

TEST(Pieces, WhatFitsIsOne) {
  const std::vector<EntryRows> entries = {{4, 4}, {3, 0}, {1, 1}};
  const std::vector<Piece> pieces = CutIntoPieces(entries, 8, 5);
  ASSERT_EQ(pieces.size(), 1u);
  EXPECT_EQ(pieces[0].rows, 8);
  EXPECT_EQ(pieces[0].tokens, 5);
  EXPECT_EQ(pieces[0].parts.size(), 3u);
}

TEST(Pieces, EveryRowAndTokenGoesOnceInOrderAndNoPieceIsTooLarge) {
  std::mt19937 dice(3);
  const auto up_to = [&dice](int32_t most) {
    return std::uniform_int_distribution<int32_t>(1, most)(dice);
  };
  for (int run = 0; run < 500; ++run) {
    const int32_t max_rows = up_to(20), max_tokens = up_to(20);
    std::vector<EntryRows> entries(static_cast<size_t>(up_to(6)));
    for (EntryRows& entry : entries) {
      const int32_t count = up_to(70);
      entry = {run % 3 == 2 ? 0 : count, up_to(2) == 1 || run % 3 == 2 ? count : 0};
    }
    std::vector<EntryRows> seen(entries.size());
    int32_t row = 0, token = 0;
    for (const Piece& piece : CutIntoPieces(entries, max_rows, max_tokens)) {
      EXPECT_EQ(piece.first_row, row);
      EXPECT_EQ(piece.first_token, token);
      EXPECT_LE(piece.rows, max_rows);
      EXPECT_LE(piece.tokens, max_tokens);
      EXPECT_GT(piece.rows + piece.tokens, 0);
      int32_t rows = 0, tokens = 0;
      for (const PiecePart& part : piece.parts) {
        EntryRows& of = seen[static_cast<size_t>(part.entry)];
        EXPECT_EQ(part.offset, std::max(of.rows, of.tokens));
        of.rows += part.rows;
        of.tokens += part.tokens;
        rows += part.rows;
        tokens += part.tokens;
      }
      EXPECT_EQ(rows, piece.rows);
      EXPECT_EQ(tokens, piece.tokens);
      row += rows;
      token += tokens;
    }
    for (size_t i = 0; i < entries.size(); ++i) {
      EXPECT_EQ(seen[i].rows, entries[i].rows);
      EXPECT_EQ(seen[i].tokens, entries[i].tokens);
    }
  }
}

TEST(Pieces, DraftsAreNotCut) {
  const std::vector<EntryRows> entries = {{5, 5}, {4, 4}, {2, 2}};
  const std::vector<Piece> pieces = CutIntoPieces(entries, 6, 6, /*whole=*/true);
  ASSERT_EQ(pieces.size(), 2u);
  EXPECT_EQ(pieces[0].rows, 5);
  EXPECT_EQ(pieces[1].rows, 6);
  EXPECT_TRUE(CutIntoPieces(entries, 4, 6, /*whole=*/true).empty());
}

TEST(Pieces, TokensWithoutRoomForAnyAreNone) {
  const std::vector<EntryRows> entries = {{5, 5}};
  EXPECT_TRUE(CutIntoPieces(entries, 6, 0).empty());
}

}  // namespace
}  // namespace tributary::mailbox
