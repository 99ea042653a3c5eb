#include "kernels/cpu/page_layout.h"

#include <gtest/gtest.h>

#include <cstring>
#include <span>
#include <vector>

#include "kernels/cpu/page_rows.h"

namespace tributary::cpu {
namespace {

constexpr DType kPairedTypes[] = {DType::kBf16, DType::kF16, DType::kFp8E4M3, DType::kFp8E5M2};
constexpr DType kRowTypes[] = {DType::kF32, DType::kNvfp4};

PagedKv Shape(DType dtype, int32_t page_size, const HeadDims& dims) {
  return {.num_pages = 1,
          .page_size = page_size,
          .geometry = {
              .kv_heads = 3, .key_dim = dims.key_dim, .value_dim = dims.value_dim, .dtype = dtype}};
}

// Calls body(shape) for every shape of a page of these types.
template <typename Body>
void ForEachShape(std::span<const DType> types, const Body& body) {
  for (const DType dtype : types) {
    for (const int32_t page_size : {16, 32, 64, 128}) {
      for (const HeadDims& dims : kHeadDims) body(Shape(dtype, page_size, dims));
    }
  }
}

TEST(PageLayoutTest, EveryElementHasAPlaceOfItsOwnAndTheRestIsPaddingOfKeys) {
  ForEachShape(kPairedTypes, [](const PagedKv& kv) {
    std::vector<char> taken(PageBytes(kv));
    const auto take = [&](size_t offset) {
      for (size_t i = 0; i < BytesOf(kv.geometry.dtype, 1); ++i) {
        ASSERT_LT(offset + i, taken.size());
        EXPECT_EQ(taken[offset + i]++, 0);
      }
    };
    for (int32_t head = 0; head < kv.geometry.kv_heads; ++head) {
      for (int32_t token = 0; token < kv.page_size; ++token) {
        for (int32_t d = 0; d < kv.geometry.key_dim; ++d) take(KeyOffset(kv, head, token, d));
        for (int32_t d = 0; d < kv.geometry.value_dim; ++d) take(ValueOffset(kv, head, token, d));
      }
    }
    const size_t padding = KeyRowBytes(kv.geometry) - KeyBytes(kv.geometry);
    EXPECT_EQ(static_cast<size_t>(std::count(taken.begin(), taken.end(), 0)),
              padding * kv.page_size * kv.geometry.kv_heads);
  });
}

TEST(PageLayoutTest, PairsAreSideBySide) {
  ForEachShape(kPairedTypes, [](const PagedKv& kv) {
    const size_t bytes = BytesOf(kv.geometry.dtype, 1);
    EXPECT_EQ(KeyOffset(kv, 1, 5, 7), KeyOffset(kv, 1, 5, 6) + bytes);            // channels
    EXPECT_EQ(KeyOffset(kv, 1, 5, 6), KeyOffset(kv, 1, 4, 6) + 2 * bytes);        // tokens
    EXPECT_EQ(ValueOffset(kv, 2, 9, 33), ValueOffset(kv, 2, 8, 33) + bytes);      // tokens
    EXPECT_EQ(ValueOffset(kv, 2, 8, 33), ValueOffset(kv, 2, 8, 32) + 2 * bytes);  // channels
  });
}

// What the dot products rely on: joining low and high bytes within 128 bits, as unpack does, gives
// the 16 columns of the first pair, then those of the second.
TEST(PageLayoutTest, UnpackingACellOfBytesPutsColumnsInOrder) {
  for (int32_t pair = 0; pair < 2; ++pair) {
    for (int32_t column = 0; column < kCellColumns; ++column) {
      for (int32_t half = 0; half < 2; ++half) {
        const int32_t wanted = column * 2 + half;  // word of the unpacked vector
        const int32_t lane = wanted / 8, word = wanted % 8;
        EXPECT_EQ(PairOffset(1, kCellColumns, pair, column, half),
                  static_cast<size_t>(lane * 16 + pair * 8 + word));
      }
    }
  }
}

TEST(PageLayoutTest, ATokensHeadsAreReadInTheOrderOfMemory) {
  ForEachShape(kPairedTypes, [](const PagedKv& kv) {
    size_t last = 0;
    for (int32_t block = 0; block < kv.page_size; block += BlockTokens(kv.page_size)) {
      for (const bool value : {false, true}) {
        for (int32_t head = 0; head < kv.geometry.kv_heads; ++head) {
          const size_t begin = (value ? ValueBlockOffset : KeyBlockOffset)(kv, head, block);
          EXPECT_EQ(begin, last);
          last = begin + (value ? ValueBlockBytes : KeyBlockBytes)(kv);
        }
      }
    }
    EXPECT_EQ(last, PageBytes(kv));
  });
}

TEST(PageRowsTest, ARowIsStoredElementByElementWhereTheLayoutSays) {
  ForEachShape(kPairedTypes, [](PagedKv kv) {
    const size_t bytes = BytesOf(kv.geometry.dtype, 1);
    for (const RowKind kind : {RowKind::kKey, RowKind::kValue}) {
      const int32_t dim = kind == RowKind::kKey ? kv.geometry.key_dim : kv.geometry.value_dim;
      std::vector<std::byte> row(dim * bytes);
      for (size_t i = 0; i < row.size(); ++i) row[i] = static_cast<std::byte>(1 + i % 251);
      for (const int32_t token : {0, 5, kv.page_size - 1}) {
        std::vector<std::byte> page(PageBytes(kv));
        kv.base = page.data();
        const RowPlace place{kind, 0, 2, token};
        EXPECT_FALSE(HoldsRow(kv, place, row.data()));
        StoreRow(kv, place, row.data());
        EXPECT_TRUE(HoldsRow(kv, place, row.data()));
        for (int32_t d = 0; d < dim; ++d) {
          const size_t at = (kind == RowKind::kKey ? KeyOffset : ValueOffset)(kv, 2, token, d);
          EXPECT_EQ(std::memcmp(&page[at], &row[d * bytes], bytes), 0);
          std::memset(&page[at], 0, bytes);
        }
        EXPECT_EQ(page, std::vector<std::byte>(page.size()));  // nothing else was touched
      }
    }
  });
}

TEST(PageRowsTest, ARowAndItsScalesHaveAPlaceOfTheirOwnAndNothingElseIsTouched) {
  ForEachShape(kRowTypes, [](PagedKv kv) {
    const KvGeometry& g = kv.geometry;
    std::vector<std::byte> page(PageBytes(kv));
    kv.base = page.data();
    size_t written = 0;
    for (int32_t token = 0; token < kv.page_size; ++token) {
      for (int32_t head = 0; head < g.kv_heads; ++head) {
        for (const RowKind kind : {RowKind::kKey, RowKind::kValue}) {
          const int32_t dim = kind == RowKind::kKey ? g.key_dim : g.value_dim;
          const size_t bytes = BytesOf(g.dtype, dim) + BlockScaleBytes(g.dtype, dim);
          const std::vector<std::byte> row(bytes, std::byte{1});
          const RowPlace place{kind, 0, head, token};
          EXPECT_FALSE(HoldsRow(kv, place, row.data()));
          StoreRow(kv, place, row.data());
          EXPECT_TRUE(HoldsRow(kv, place, row.data()));
          written += bytes;
        }
      }
    }
    // No two rows share a byte, so each kept what it was given.
    EXPECT_EQ(static_cast<size_t>(std::count(page.begin(), page.end(), std::byte{1})), written);
    const size_t padding = (KeyRowBytes(g) - KeyBytes(g)) * g.kv_heads * kv.page_size;
    EXPECT_EQ(written + padding, page.size());
  });
}

TEST(PageRowsTest, Nvfp4Takes36BitsForEachOf16Elements) {
  const KvGeometry g = SquareGeometry(8, 128, DType::kNvfp4);
  EXPECT_EQ(PageBytes(g, 16), size_t{2} * 16 * 8 * 128 * 9 / 16);
}

}  // namespace
}  // namespace tributary::cpu
