// Calls cut into what a step may take.
#include "service/schedule/step_split.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>
#include <vector>

#include "base/status/errors.h"
#include "kernels/output_format.h"

namespace tributary::service {
namespace {

using ::testing::SizeIs;

constexpr int64_t kRowBytes = 4 * (64 + 64) * (4 + 2);  // a row and its token, in f32

worker::LayerGeometry FourHeads() {
  worker::LayerGeometry geometry;
  geometry.q_heads = 4;
  geometry.kv.kv_heads = 2;
  geometry.kv.key_dim = geometry.kv.value_dim = 64;
  return geometry;
}

std::vector<StepPiece> Split(const std::vector<worker::StepEntry>& entries, int64_t bytes,
                             double flops = 1e30) {
  const auto pieces = SplitStep(FourHeads(), -1, worker::StepKind::kPrefill, entries,
                                {.bytes = bytes, .flops = flops});
  EXPECT_TRUE(pieces.ok()) << pieces.status();
  return pieces.value_or(std::vector<StepPiece>());
}

TEST(StepSplitTest, WhatFitsIsOnePiece) {
  const auto pieces = Split({{.sequence = 1, .query_rows = 8, .new_tokens = 8},
                             {.sequence = 2, .query_rows = 2, .new_tokens = 2}},
                            10 * kRowBytes);
  ASSERT_THAT(pieces, SizeIs(1));
  EXPECT_THAT(pieces[0].entries, SizeIs(2));
  EXPECT_FALSE(pieces[0].entries[0].more_follows);
}

// Whatever the call: the pieces are the call, row by row, and each is within the limits.
TEST(StepSplitTest, PiecesAreTheWholeCallAndEachFits) {
  std::mt19937 random(7);
  for (int round = 0; round < 300; ++round) {
    std::vector<worker::StepEntry> entries;
    for (uint64_t id = 1; id <= 1 + random() % 5; ++id) {
      const auto rows = static_cast<int32_t>(1 + random() % 400);
      worker::StepEntry entry{.sequence = id,
                              .first_position = static_cast<int64_t>(random() % 5000)};
      const int kind = static_cast<int>(random() % 3);
      if (kind != 0) entry.query_rows = rows;
      if (kind != 1) entry.new_tokens = rows;
      entry.replay = random() % 2 == 0;
      entries.push_back(entry);
    }
    const StepLimits limits{.bytes = static_cast<int64_t>(1 + random() % 300) * kRowBytes,
                            .flops = 1e7 * static_cast<double>(1 + random() % 50)};
    const auto pieces = SplitStep(FourHeads(), -1, worker::StepKind::kPrefill, entries, limits);
    ASSERT_TRUE(pieces.ok()) << pieces.status();
    size_t entry = 0;
    int32_t taken = 0;
    int64_t rows = 0, tokens = 0;
    for (const StepPiece& piece : *pieces) {
      EXPECT_TRUE(CheckCost(CostOf(FourHeads(), -1, piece.entries), limits).ok());
      EXPECT_EQ(piece.first_row, rows);
      EXPECT_EQ(piece.first_token, tokens);
      EXPECT_EQ(static_cast<size_t>(piece.first_entry), entry);
      ASSERT_FALSE(piece.entries.empty());
      for (const worker::StepEntry& cut : piece.entries) {
        ASSERT_LT(entry, entries.size());
        const worker::StepEntry& whole = entries[entry];
        EXPECT_EQ(cut.sequence, whole.sequence);
        EXPECT_EQ(cut.first_position, whole.first_position + taken);
        EXPECT_EQ(cut.replay, whole.replay);
        EXPECT_EQ(cut.query_rows > 0, whole.query_rows > 0);
        EXPECT_EQ(cut.new_tokens > 0, whole.new_tokens > 0);
        taken += std::max(cut.query_rows, cut.new_tokens);
        rows += cut.query_rows;
        tokens += cut.new_tokens;
        const bool more = taken < std::max(whole.query_rows, whole.new_tokens);
        EXPECT_EQ(cut.more_follows, more);
        if (!more) ++entry, taken = 0;
      }
    }
    EXPECT_EQ(entry, entries.size());
  }
}

// Its rows see the tokens of their piece as they came, in every piece.
TEST(StepSplitTest, APromptIsNotCutSoThatAPieceIsServedInAnotherWay) {
  for (int32_t rows = 65; rows < 1000; ++rows) {
    const auto pieces = Split({{.sequence = 1, .query_rows = 10, .new_tokens = 10},
                               {.sequence = 2, .query_rows = rows, .new_tokens = rows}},
                              200 * kRowBytes);
    for (const StepPiece& piece : pieces) {
      for (const worker::StepEntry& entry : piece.entries) {
        if (entry.sequence != 2) continue;
        EXPECT_GT(entry.new_tokens, 64) << rows;
      }
    }
  }
}

// Turns are the call, row by row. Rows that see tokens as they came have all of them in every turn.
TEST(StepSplitTest, TurnsAreTheWholeCallAndLeaveRowsWhatTheySee) {
  std::mt19937 random(11);
  for (int round = 0; round < 300; ++round) {
    std::vector<worker::StepEntry> entries;
    for (uint64_t id = 1; id <= 1 + random() % 4; ++id) {
      const auto rows = static_cast<int32_t>(1 + random() % 300);
      worker::StepEntry entry{.sequence = id,
                              .first_position = static_cast<int64_t>(random() % 5000)};
      const int kind = static_cast<int>(random() % 3);
      if (kind != 0) entry.query_rows = rows;
      if (kind != 1) entry.new_tokens = rows;
      entries.push_back(entry);
    }
    const double flops = 1e6 * static_cast<double>(1 + random() % 100);
    const auto pieces = CutIntoTurns(FourHeads(), -1, entries, flops);
    size_t entry = 0;
    int32_t taken = 0;
    int64_t rows = 0, tokens = 0;
    for (const StepPiece& piece : pieces) {
      EXPECT_EQ(piece.first_row, rows);
      EXPECT_EQ(piece.first_token, tokens);
      EXPECT_EQ(static_cast<size_t>(piece.first_entry), entry);
      const bool within = CostOf(FourHeads(), -1, piece.entries).flops <= flops;
      EXPECT_TRUE(within || piece.entries.size() == 1);
      for (const worker::StepEntry& cut : piece.entries) {
        ASSERT_LT(entry, entries.size());
        const worker::StepEntry& whole = entries[entry];
        const int32_t units = std::max(whole.query_rows, whole.new_tokens);
        const bool apart = whole.query_rows > 0 && whole.new_tokens > 64;
        EXPECT_EQ(cut.first_row_position(), whole.first_position + taken);
        EXPECT_EQ(cut.first_position, whole.first_position + (apart ? 0 : taken));
        EXPECT_TRUE(!apart || cut.new_tokens == whole.new_tokens);
        const int32_t count = apart ? cut.query_rows : std::max(cut.query_rows, cut.new_tokens);
        taken += count;
        rows += cut.query_rows;
        EXPECT_EQ(cut.more_follows, taken < units);
        if (!apart || !cut.more_follows) tokens += cut.new_tokens;
        EXPECT_TRUE(within || count <= 8);
        if (!cut.more_follows) ++entry, taken = 0;
      }
    }
    EXPECT_EQ(entry, entries.size());
  }
}

TEST(StepSplitTest, WhatCannotBeCutIsRefused) {
  const worker::StepEntry row{.sequence = 1, .query_rows = 3, .new_tokens = 3};
  const auto too_wide = SplitStep(FourHeads(), -1, worker::StepKind::kDecode, {row},
                                  {.bytes = kRowBytes - 1, .flops = 1e30});
  EXPECT_EQ(too_wide.status().code(), absl::StatusCode::kResourceExhausted);
  const auto block = SplitStep(FourHeads(), -1, worker::StepKind::kDflash, {row},
                               {.bytes = 2 * kRowBytes, .flops = 1e30});
  EXPECT_EQ(block.status().code(), absl::StatusCode::kResourceExhausted) << "a draft is one block";
  const worker::StepEntry other{.sequence = 2, .query_rows = 2, .new_tokens = 2};
  const auto blocks = SplitStep(FourHeads(), -1, worker::StepKind::kDflash, {row, other},
                                {.bytes = 3 * kRowBytes, .flops = 1e30});
  ASSERT_TRUE(blocks.ok()) << blocks.status();
  EXPECT_THAT(*blocks, SizeIs(2));
}

// The bytes of a result come together as if it had been stored at once.
TEST(StepSplitTest, ResultsComeTogether) {
  for (const DType dtype : {DType::kF32, DType::kBf16, DType::kFp8E4M3, DType::kNvfp4}) {
    StepRequest request;
    request.entries = {{.sequence = 1, .query_rows = 7, .new_tokens = 7}};
    request.query_rows = request.new_tokens = 7;
    request.output = OutputTensor{.dtype = dtype, .shape = {7, 4, 64}};
    request.output->bytes = OutputBytes(dtype, 7 * 4 * 64);
    // Bytes that say where they are: of elements, and of scales behind them.
    std::string whole(request.output->bytes, '\0');
    for (size_t i = 0; i < whole.size(); ++i) whole[i] = static_cast<char>(i * 37 + i / 251);
    const size_t row = BytesOf(dtype, 4 * 64);
    const size_t scales = dtype == DType::kNvfp4 ? 4 * 64 / 16 : 0;
    std::string region(whole.size(), '\0');
    for (const bool inside : {true, false}) {
      const v1::SharedMemoryReference reference;
      if (!inside) request.output->region = reinterpret_cast<std::byte*>(region.data());
      if (!inside) request.output->reference = &reference;
      v1::AttendReply reply;
      for (const StepPiece& piece : Split(request.entries, 3 * kRowBytes)) {
        const StepRequest cut = PieceOf(request, piece);
        const auto first = static_cast<size_t>(piece.first_row);
        const auto count = static_cast<size_t>(cut.query_rows);
        v1::AttendReply results;
        results.mutable_output()->add_shape(cut.query_rows);
        std::string* bytes = results.mutable_output()->mutable_inline_();
        *bytes = whole.substr(first * row, count * row) +
                 whole.substr(7 * row + first * scales, count * scales);
        EXPECT_EQ(bytes->size(), cut.output->bytes);
        PlacePiece(request, piece, results, &reply);
        if (inside && dtype != DType::kNvfp4) {
          EXPECT_EQ(reply.output().inline_().size(), (first + count) * row)
              << "a piece takes no time for those after it";
        }
      }
      EXPECT_EQ(inside ? reply.output().inline_() : region, whole) << Name(dtype);
      EXPECT_EQ(reply.output().shape(0), 7);
      EXPECT_EQ(reply.output().shape_size(), 3);
    }
  }
}

}  // namespace
}  // namespace tributary::service
