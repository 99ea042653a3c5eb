#include "kernels/cpu/tiling.h"

#include <gtest/gtest.h>

#include "kernels/cpu/bf16_pieces.h"

namespace tributary::cpu {
namespace {

TEST(TilingTest, ChunksCoverTheRangeAndNoMore) {
  for (const int64_t lo :
       {int64_t{0}, int64_t{1}, kChunkKeys - 1, kChunkKeys, 5 * kChunkKeys + 3}) {
    for (const int64_t length : {int64_t{1}, kChunkKeys - 1, kChunkKeys, 3 * kChunkKeys + 1}) {
      const ChunkSpan span = ChunksOf({lo, lo + length});
      EXPECT_LE(span.first * kChunkKeys, lo);
      EXPECT_GT((span.first + 1) * kChunkKeys, lo);
      const int64_t last = span.first + span.count - 1;
      EXPECT_LT(last * kChunkKeys, lo + length);
      EXPECT_GE((last + 1) * kChunkKeys, lo + length);
    }
  }
  EXPECT_EQ(ChunksOf({7, 7}).count, 0);
  EXPECT_EQ(ChunksOf({9, 7}).count, 0);
}

TEST(TilingTest, AChunkIsAWholeNumberOfTiles) { EXPECT_EQ(kChunkKeys % kTileKeys, 0); }

TEST(TilingTest, BlocksOfRowsHoldAtLeastOneRowAndFitTheScratch) {
  for (int32_t group = 1; group <= 16; ++group) {
    EXPECT_GE(RowsPerBlock(group), 1);
    EXPECT_LE(RowsPerBlock(group) * group, kMaxQueryVectors);
  }
}

TEST(TilingTest, Float8IsConvertedOnceWhereManyReadIt) {
  EXPECT_TRUE(ReadsFloat8InPlace(4, 1));    // decode of a group of four
  EXPECT_TRUE(ReadsFloat8InPlace(4, 2));    // with weights of two pieces
  EXPECT_FALSE(ReadsFloat8InPlace(4, 3));   // with queries of three
  EXPECT_FALSE(ReadsFloat8InPlace(64, 1));  // prefill
}

TEST(TilingTest, MemoryIsAskedForWholePlanesAhead) {
  EXPECT_EQ(PlanesAhead(16 << 10, 16), 1);  // 64 keys of 128 bf16
  EXPECT_EQ(PlanesAhead(8 << 10, 16), 2);   // of FP8
  EXPECT_EQ(PlanesAhead(32 << 10, 16), 1);  // more than enough
  EXPECT_EQ(PlanesAhead(4 << 10, 2), 2);    // no further than the next tile
}

TEST(TilingTest, MoreBlocksOfQueriesAskForMoreLines) {
  for (const bool goes_on : {false, true}) {
    EXPECT_EQ(AskedLines(1, goes_on), goes_on ? 1 : 4);
    EXPECT_EQ(AskedLines(4, goes_on), goes_on ? 1 : 4);
    EXPECT_EQ(AskedLines(8, goes_on), 2);   // two blocks: all four
    EXPECT_EQ(AskedLines(16, goes_on), 1);  // four blocks: all four
  }
}

TEST(TilingTest, HeadsShareAJobWhileThreadsStayBusy) {
  EXPECT_EQ(HeadsPerJob(8, 4, 8 * 128, 2), 8);    // decode of one long sequence on few threads
  EXPECT_EQ(HeadsPerJob(8, 4, 8 * 2, 2), 4);      // a short one: tasks enough to end together
  EXPECT_EQ(HeadsPerJob(8, 4, 8 * 4, 64), 1);     // more threads than work
  EXPECT_EQ(HeadsPerJob(8, 4, 8, 1), 8);          // one thread has nobody to wait for
  EXPECT_EQ(HeadsPerJob(8, 4, 0, 2), 1);          // nothing to do
  EXPECT_EQ(HeadsPerJob(8, 64, 1 << 20, 2), 1);   // prefill: a head fills the scratch
  EXPECT_EQ(HeadsPerJob(8, 16, 1 << 20, 2), 4);   // as many as fit
  EXPECT_EQ(HeadsPerJob(1, 100, 1 << 20, 2), 1);  // a group that does not fit is not refused
}

TEST(TilingTest, LoneLongSequencesAreSplitAndManyJobsAreNot) {
  EXPECT_FALSE(ShouldSplit(1000, 1000, 1));     // one thread: nothing to share
  EXPECT_FALSE(ShouldSplit(1, 1, 8));           // one chunk cannot be cut
  EXPECT_TRUE(ShouldSplit(128, 8 * 128, 2));    // eight heads of one sequence
  EXPECT_TRUE(ShouldSplit(1000, 1000, 64));     // one job, many threads
  EXPECT_FALSE(ShouldSplit(64, 256 * 64, 2));   // prefill: jobs enough for all
  EXPECT_TRUE(ShouldSplit(128, 128 + 63, 16));  // a long sequence among short ones
  EXPECT_FALSE(ShouldSplit(2, 512, 16));        // a short one among long ones
}

// Only a host that computes in bf16 itself gets weights of bf16.
TEST(Bf16PiecesTest, FollowTheQueriesPrecision) {
  EXPECT_EQ(WeightPieces(DType::kBf16), 1);
  EXPECT_EQ(WeightPieces(DType::kF16), 2);
  EXPECT_EQ(WeightPieces(DType::kF32), 2);
  EXPECT_EQ(QueryPieces(DType::kBf16), 1);
  EXPECT_EQ(QueryPieces(DType::kF16), 2);
  EXPECT_EQ(QueryPieces(DType::kF32), 3);
}

}  // namespace
}  // namespace tributary::cpu
