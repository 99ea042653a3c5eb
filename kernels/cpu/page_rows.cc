#include "kernels/cpu/page_rows.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <type_traits>

#include "kernels/cpu/nvfp4_layout.h"
#include "kernels/cpu/page_layout.h"
#include "kernels/dtype.h"
#include "kernels/head_dims.h"

namespace tributary::cpu {
namespace {

// Channels of a key that lie side by side in a cell: the pairs of a column.
constexpr int kColumnElements = 2 * kWordElements;
// Bytes from one column of a cell to the next.
constexpr size_t kPairBytes = kCellBytes / kCellColumns;

// The most bytes that a row of NVFP4 has, its block scales included.
constexpr size_t kMaxNvfp4RowBytes = [] {
  size_t most = 0;
  for (const HeadDims& dims : kHeadDims) {
    const int32_t dim = std::max(dims.key_dim, dims.value_dim);
    most = std::max(most, BytesOf(DType::kNvfp4, dim) + BlockScaleBytes(DType::kNvfp4, dim));
  }
  return most;
}();

// A number of bytes that is known when this is compiled.
template <size_t kBytes>
inline constexpr std::integral_constant<size_t, kBytes> kPieceBytes{};

// Of the pairs (2 * i, 2 * i + 1) of channels.
template <size_t kBytes, typename Visit>
void ForEachKeyPair(const PagedKv& kv, RowPlace place, std::byte* page, const Visit& visit) {
  const int32_t columns = BlockTokens(kv.page_size);
  const int32_t column = place.token % columns;
  std::byte* plane = page + KeyBlockOffset(kv, place.head, place.token);
  for (int32_t pair = 0; pair < kv.geometry.key_dim / 2; ++pair) {
    visit(plane + PairOffset(kBytes, columns, pair, column, 0), size_t(pair) * 2 * kBytes,
          kPieceBytes<2 * kBytes>);
  }
}

// Of every channel.
template <size_t kBytes, typename Visit>
void ForEachValueElement(const PagedKv& kv, RowPlace place, std::byte* page, const Visit& visit) {
  const int32_t tokens = BlockTokens(kv.page_size);
  const int32_t token = place.token % tokens;
  std::byte* plane = page + ValueBlockOffset(kv, place.head, place.token);
  for (int32_t d = 0; d < kv.geometry.value_dim; d += kValueColumns) {
    const int32_t columns = ValuePlaneColumns(kv.geometry.value_dim, d);
    for (int32_t column = 0; column < columns; ++column) {
      visit(plane + PairOffset(kBytes, columns, token / 2, column, token % 2),
            size_t(d + column) * kBytes, kPieceBytes<kBytes>);
    }
    plane += size_t(tokens) * kValueColumns * kBytes;
  }
}

// Calls visit(where it lies, where it is in the row, bytes as a constant) for the pieces of a row
// that lie together.
template <size_t kBytes, typename Visit>
void ForEachPiece(const PagedKv& kv, RowPlace place, const Visit& visit) {
  std::byte* page = kv.base + size_t(place.page) * PageBytes(kv);
  if (place.kind == RowKind::kKey) {
    ForEachKeyPair<kBytes>(kv, place, page, visit);
  } else {
    ForEachValueElement<kBytes>(kv, place, page, visit);
  }
}

// The same of f32, whose pieces are single elements of keys and whole values.
template <typename Visit>
void ForEachFloatPiece(const PagedKv& kv, RowPlace place, const Visit& visit) {
  std::byte* page = kv.base + size_t(place.page) * PageBytes(kv);
  if (place.kind == RowKind::kValue) {
    return visit(page + ValueOffset(kv, place.head, place.token, 0), size_t{0},
                 ValueBytes(kv.geometry));
  }
  std::byte* const first = page + KeyOffset(kv, place.head, place.token, 0);
  const size_t stride = size_t(BlockTokens(kv.page_size)) * sizeof(float);
  for (int32_t d = 0; d < kv.geometry.key_dim; ++d) {
    visit(first + d * stride, d * sizeof(float), kPieceBytes<sizeof(float)>);
  }
}

// Calls visit for `count` pieces, `stride` bytes apart, that are side by side in the row.
template <size_t kBytes, typename Visit>
void ForEachOf(std::byte* at, size_t stride, int32_t count, size_t in_row, const Visit& visit) {
  for (int32_t i = 0; i < count; ++i) {
    visit(at + i * stride, in_row + i * kBytes, kPieceBytes<kBytes>);
  }
}

// The same of NVFP4, for a row in the page's order: the elements (OrderElements), then the block
// scales.
template <typename Visit>
void ForEachNvfp4Piece(const PagedKv& kv, RowPlace place, const Visit& visit) {
  const bool key = place.kind == RowKind::kKey;
  const int32_t dim = key ? kv.geometry.key_dim : kv.geometry.value_dim;
  const int32_t tokens = BlockTokens(kv.page_size);
  const int32_t token = place.token % tokens;
  std::byte* const block = kv.base + size_t(place.page) * PageBytes(kv) +
                           (key ? KeyBlockOffset : ValueBlockOffset)(kv, place.head, place.token);
  if (key) {
    ForEachOf<kColumnElements / 2>(block + Nvfp4KeyPlace(tokens, token, 0).byte,
                                   CellRowBytes(tokens), dim / kColumnElements, 0, visit);
  }
  for (int32_t d = 0; d < dim && !key; d += kValueColumns) {
    const int32_t columns = ValuePlaneColumns(dim, d);
    std::byte* const first =
        block + Nvfp4PlaneBytes(tokens, d) + Nvfp4ValuePlace(columns, token, 0).byte;
    if (columns == kValueColumns) {
      ForEachOf<2>(first, kPairBytes, kCellColumns, size_t(d) / 2, visit);
    } else {
      ForEachOf<1>(first, kPairBytes, columns / 2, size_t(d) / 2, visit);
    }
  }
  ForEachOf<1>(block + BlockScalesOffset(tokens, dim) + BlockScaleOffset(tokens, token, 0),
               BlockScaleOffset(tokens, 0, 1), dim / kNvfp4Block, size_t(dim) / 2, visit);
}

template <typename Visit>
void ForEachPiece(const PagedKv& kv, RowPlace place, const Visit& visit) {
  switch (BitsOf(kv.geometry.dtype)) {
    case 4:
      return ForEachNvfp4Piece(kv, place, visit);
    case 8:
      return ForEachPiece<1>(kv, place, visit);
    case 16:
      return ForEachPiece<2>(kv, place, visit);
    default:
      return ForEachFloatPiece(kv, place, visit);
  }
}

// `from` has kRows rows of kColumns elements of four bits; `to` gets them column by column.
template <int kRows, int kColumns>
void TransposeNibbles(const std::byte* from, std::byte* to) {
  constexpr int kCount = kRows * kColumns;
  uint8_t codes[kCount];
  for (int i = 0; i < kCount / 2; ++i) {
    const auto two = std::to_integer<uint8_t>(from[i]);
    codes[2 * i] = two & 0x0f;
    codes[2 * i + 1] = two >> 4;
  }
  const auto code = [&](int i) { return codes[i % kRows * kColumns + i / kRows]; };
  for (int i = 0; i < kCount / 2; ++i) {
    to[i] = static_cast<std::byte>(code(2 * i) | code(2 * i + 1) << 4);
  }
}

// TransposeNibbles, or what undoes it.
template <int kRows, int kColumns>
void TransposeNibbles(bool undo, const std::byte* from, std::byte* to) {
  undo ? TransposeNibbles<kColumns, kRows>(from, to) : TransposeNibbles<kRows, kColumns>(from, to);
}

// The elements of an NVFP4 row in the order of the page, so that those of a piece are side by side;
// or back.
void OrderElements(RowKind kind, int32_t dim, bool undo, const std::byte* from, std::byte* to) {
  if (kind == RowKind::kKey) {  // the first channel of four pairs, then the second
    constexpr int kBytes = kColumnElements / 2;
    for (int32_t i = 0; i < dim / kColumnElements; ++i) {
      TransposeNibbles<kColumnElements / 2, 2>(undo, from + i * kBytes, to + i * kBytes);
    }
    return;
  }
  for (int32_t d = 0; d < dim; d += kValueColumns) {
    const int32_t columns = ValuePlaneColumns(dim, d);
    const std::byte* plane = from + d / 2;
    if (columns == kValueColumns) {
      TransposeNibbles<4, kCellColumns>(undo, plane, to + d / 2);
    } else if (columns == 2 * kCellColumns) {
      TransposeNibbles<2, kCellColumns>(undo, plane, to + d / 2);
    } else {
      TransposeNibbles<2, kCellColumns / 2>(undo, plane, to + d / 2);
    }
  }
}

// Room for an NVFP4 row in the order of the page.
struct OrderedRow {
  const std::byte* From(const PagedKv& kv, RowPlace place, const std::byte* row) {
    Order(kv, place, /*undo=*/false, row, bytes.data());
    return bytes.data();
  }
  void To(const PagedKv& kv, RowPlace place, std::byte* row) const {
    Order(kv, place, /*undo=*/true, bytes.data(), row);
  }

  std::array<std::byte, kMaxNvfp4RowBytes> bytes;

 private:
  static void Order(const PagedKv& kv, RowPlace place, bool undo, const std::byte* from,
                    std::byte* to) {
    const KvGeometry& g = kv.geometry;
    const int32_t dim = place.kind == RowKind::kKey ? g.key_dim : g.value_dim;
    OrderElements(place.kind, dim, undo, from, to);
    const size_t elements = BytesOf(DType::kNvfp4, dim);
    std::memcpy(to + elements, from + elements, BlockScaleBytes(DType::kNvfp4, dim));
  }
};

}  // namespace

void StoreRow(const PagedKv& kv, RowPlace place, const std::byte* row) {
  OrderedRow ordered;
  if (kv.geometry.dtype == DType::kNvfp4) row = ordered.From(kv, place, row);
  ForEachPiece(kv, place, [row](std::byte* at, size_t in_row, auto bytes) {
    std::memcpy(at, row + in_row, bytes);
  });
}

void LoadRow(const PagedKv& kv, RowPlace place, std::byte* row) {
  OrderedRow ordered;
  const bool nvfp4 = kv.geometry.dtype == DType::kNvfp4;
  std::byte* const to = nvfp4 ? ordered.bytes.data() : row;
  ForEachPiece(kv, place, [to](const std::byte* at, size_t in_row, auto bytes) {
    std::memcpy(to + in_row, at, bytes);
  });
  if (nvfp4) ordered.To(kv, place, row);
}

bool HoldsRow(const PagedKv& kv, RowPlace place, const std::byte* row) {
  OrderedRow ordered;
  if (kv.geometry.dtype == DType::kNvfp4) row = ordered.From(kv, place, row);
  bool same = true;
  ForEachPiece(kv, place, [row, &same](const std::byte* at, size_t in_row, auto bytes) {
    same &= std::memcmp(at, row + in_row, bytes) == 0;
  });
  return same;
}

}  // namespace tributary::cpu
