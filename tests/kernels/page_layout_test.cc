#include "kernels/cpu/page_layout.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <span>
#include <vector>

#include "kernels/cpu/nvfp4_layout.h"
#include "kernels/cpu/page_rows.h"

namespace tributary::cpu {
namespace {

constexpr DType kPairedTypes[] = {DType::kBf16, DType::kF16, DType::kFp8E4M3, DType::kFp8E5M2};
constexpr DType kOtherTypes[] = {DType::kF32, DType::kNvfp4};
constexpr DType kWholeBytes[] = {DType::kBf16, DType::kF16, DType::kFp8E4M3, DType::kFp8E5M2,
                                 DType::kF32};
constexpr DType kAllTypes[] = {DType::kBf16,    DType::kF16, DType::kFp8E4M3,
                               DType::kFp8E5M2, DType::kF32, DType::kNvfp4};

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
  ForEachShape(kWholeBytes, [](const PagedKv& kv) {
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
  ForEachShape(kAllTypes, [](const PagedKv& kv) {
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
  ForEachShape(kWholeBytes, [](PagedKv kv) {
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
  ForEachShape(kOtherTypes, [](PagedKv kv) {
    const KvGeometry& g = kv.geometry;
    std::vector<std::byte> page(PageBytes(kv));
    kv.base = page.data();
    size_t written = 0;
    for (int32_t token = 0; token < kv.page_size; ++token) {
      for (int32_t head = 0; head < g.kv_heads; ++head) {
        for (const RowKind kind : {RowKind::kKey, RowKind::kValue}) {
          const int32_t dim = kind == RowKind::kKey ? g.key_dim : g.value_dim;
          const size_t bytes = BytesOf(g.dtype, dim) + BlockScaleBytes(g.dtype, dim);
          const std::vector<std::byte> row(bytes, std::byte{0x11});
          const RowPlace place{kind, 0, head, token};
          EXPECT_FALSE(HoldsRow(kv, place, row.data()));
          StoreRow(kv, place, row.data());
          EXPECT_TRUE(HoldsRow(kv, place, row.data()));
          written += bytes;
        }
      }
    }
    // No two rows share a byte, so each kept what it was given.
    EXPECT_EQ(static_cast<size_t>(std::count(page.begin(), page.end(), std::byte{0x11})), written);
    const size_t padding = (KeyRowBytes(g) - KeyBytes(g)) * g.kv_heads * kv.page_size;
    EXPECT_EQ(written + padding, page.size());
  });
}

TEST(PageRowsTest, WhatIsReadBackIsTheRowThatWasStored) {
  ForEachShape(kAllTypes, [](PagedKv kv) {
    const KvGeometry& g = kv.geometry;
    std::vector<std::byte> page(PageBytes(kv));
    kv.base = page.data();
    const auto row_of = [&](RowKind kind, int32_t token) {
      std::vector<std::byte> row(kind == RowKind::kKey ? StoredKeyBytes(g) : StoredValueBytes(g));
      for (size_t i = 0; i < row.size(); ++i) {
        row[i] = static_cast<std::byte>((i * 37 + static_cast<size_t>(token) * 11) % 256);
      }
      return row;
    };
    for (const RowKind kind : {RowKind::kKey, RowKind::kValue}) {
      for (int32_t token = 0; token < kv.page_size; ++token) {
        StoreRow(kv, {kind, 0, 2, token}, row_of(kind, token).data());
      }
      for (int32_t token = 0; token < kv.page_size; ++token) {
        const std::vector<std::byte> stored = row_of(kind, token);
        std::vector<std::byte> read(stored.size());
        LoadRow(kv, {kind, 0, 2, token}, read.data());
        ASSERT_EQ(read, stored) << Name(g.dtype) << ", token " << token;
      }
    }
  });
}

// Calls body(tokens of a block, columns of a plane of values).
template <typename Body>
void ForEachPlane(const Body& body) {
  for (const int32_t tokens : {16, 32, 64}) {
    for (const int32_t columns : {16, 32, 64}) body(tokens, columns);
  }
}

TEST(Nvfp4LayoutTest, EveryElementHasAPlaceOfItsOwn) {
  const auto check = [](int32_t tokens, int32_t dim, const auto& place_of) {
    std::vector<char> taken(BytesOf(DType::kNvfp4, int64_t{tokens} * dim) * 2);
    for (int32_t token = 0; token < tokens; ++token) {
      for (int32_t d = 0; d < dim; ++d) {
        const NibblePlace place = place_of(token, d);
        const size_t at = place.byte * 2 + static_cast<size_t>(place.half);
        ASSERT_LT(at, taken.size());
        EXPECT_EQ(taken[at]++, 0);
      }
    }
  };
  ForEachPlane([&](int32_t tokens, int32_t columns) {
    check(tokens, columns,
          [&](int32_t token, int32_t column) { return Nvfp4ValuePlace(columns, token, column); });
  });
  for (const int32_t tokens : {16, 32, 64}) {
    for (const HeadDims& dims : kHeadDims) {
      check(tokens, dims.key_dim,
            [&](int32_t token, int32_t d) { return Nvfp4KeyPlace(tokens, token, d); });
    }
  }
}

// So that tokens may be written at the same time.
TEST(Nvfp4LayoutTest, AByteIsOneTokensAlone) {
  ForEachPlane([](int32_t tokens, int32_t columns) {
    std::vector<int32_t> token_of(Nvfp4PlaneBytes(tokens, columns), -1);
    for (int32_t token = 0; token < tokens; ++token) {
      for (int32_t column = 0; column < columns; ++column) {
        int32_t& owner = token_of[Nvfp4ValuePlace(columns, token, column).byte];
        EXPECT_TRUE(owner == -1 || owner == token);
        owner = token;
      }
    }
  });
}

// What the dot products rely on: words are [column][half of the pair], and a shift by four bits
// brings the next pair of channels, or the channels 16 on.
TEST(Nvfp4LayoutTest, WordsOfACellAreColumnsAndHalvesOfPairs) {
  for (const int32_t d : {0, 1, 2, 7, 8, 25}) {
    const NibblePlace place = Nvfp4KeyPlace(64, 21, d);
    EXPECT_EQ(place.byte / kCellBytes, static_cast<size_t>(d / 8 * 4 + 1));
    EXPECT_EQ(place.byte % kCellBytes / 2, static_cast<size_t>(5 * 2 + d % 2));
    EXPECT_EQ(place.byte % 2 * 2 + static_cast<size_t>(place.half), static_cast<size_t>(d % 8 / 2));
  }
  for (const int32_t d : {0, 5, 16, 33, 63}) {
    const NibblePlace place = Nvfp4ValuePlace(64, 9, d);
    EXPECT_EQ(place.byte / kCellBytes, 4u);
    EXPECT_EQ(place.byte % kCellBytes / 2, static_cast<size_t>(d % 16 * 2 + 1));
    EXPECT_EQ(place.byte % 2 * 2 + static_cast<size_t>(place.half), static_cast<size_t>(d / 16));
  }
}

TEST(PageRowsTest, Nvfp4Takes36BitsForEachOf16Elements) {
  const KvGeometry g = SquareGeometry(8, 128, DType::kNvfp4);
  EXPECT_EQ(PageBytes(g, 16), size_t{2} * 16 * 8 * 128 * 9 / 16);
}

}  // namespace
}  // namespace tributary::cpu
