#include "kernels/cpu/page_rows.h"

#include <cstring>
#include <type_traits>

#include "kernels/cpu/page_layout.h"

namespace tributary::cpu {
namespace {

// Calls visit(where the pair (2 * i, 2 * i + 1) of channels lies) in order.
template <size_t kBytes, typename Visit>
void ForEachKeyPair(const PagedKv& kv, RowPlace place, std::byte* page, const Visit& visit) {
  const int32_t columns = BlockTokens(kv.page_size);
  const int32_t column = place.token % columns;
  std::byte* plane = page + KeyBlockOffset(kv, place.head, place.token);
  for (int32_t pair = 0; pair < kv.geometry.key_dim / 2; ++pair) {
    visit(plane + PairOffset(kBytes, columns, pair, column, 0));
  }
}

// Calls visit(where channel i lies) in order.
template <size_t kBytes, typename Visit>
void ForEachValueElement(const PagedKv& kv, RowPlace place, std::byte* page, const Visit& visit) {
  const int32_t tokens = BlockTokens(kv.page_size);
  const int32_t token = place.token % tokens;
  std::byte* plane = page + ValueBlockOffset(kv, place.head, place.token);
  for (int32_t d = 0; d < kv.geometry.value_dim; d += kValueColumns) {
    const int32_t columns = ValuePlaneColumns(kv.geometry.value_dim, d);
    for (int32_t column = 0; column < columns; ++column) {
      visit(plane + PairOffset(kBytes, columns, token / 2, column, token % 2));
    }
    plane += size_t(tokens) * kValueColumns * kBytes;
  }
}

// Calls visit(where it lies, bytes as a constant) for the pieces of a row that lie together.
template <size_t kBytes, typename Visit>
void ForEachPiece(const PagedKv& kv, RowPlace place, const Visit& visit) {
  std::byte* page = kv.base + size_t(place.page) * PageBytes(kv);
  if (place.kind == RowKind::kKey) {
    ForEachKeyPair<kBytes>(kv, place, page, [&](std::byte* at) {
      visit(at, std::integral_constant<size_t, 2 * kBytes>());
    });
  } else {
    ForEachValueElement<kBytes>(kv, place, page, [&](std::byte* at) {
      visit(at, std::integral_constant<size_t, kBytes>());
    });
  }
}

// The same for a type that lies in rows: its elements, then its block scales.
template <typename Visit>
void ForEachRowPiece(const PagedKv& kv, RowPlace place, const Visit& visit) {
  const KvGeometry& g = kv.geometry;
  const int32_t tokens = BlockTokens(kv.page_size);
  const int32_t token = place.token % tokens;
  std::byte* page = kv.base + size_t(place.page) * PageBytes(kv);
  if (place.kind == RowKind::kKey) {
    std::byte* plane = page + KeyBlockOffset(kv, place.head, place.token);
    visit(plane + KeyRowOffset(g, token), KeyBytes(g));
    visit(plane + KeyScalesOffset(g, tokens, token), KeyScaleBytes(g));
  } else {
    std::byte* plane = page + ValueBlockOffset(kv, place.head, place.token);
    visit(plane + ValueRowOffset(g, token), ValueBytes(g));
    visit(plane + ValueScalesOffset(g, tokens, token), ValueScaleBytes(g));
  }
}

template <typename Visit>
void ForEachPiece(const PagedKv& kv, RowPlace place, const Visit& visit) {
  if (!IsPaired(kv.geometry.dtype)) {
    ForEachRowPiece(kv, place, visit);
  } else if (BitsOf(kv.geometry.dtype) == 8) {
    ForEachPiece<1>(kv, place, visit);
  } else {
    ForEachPiece<2>(kv, place, visit);
  }
}

}  // namespace

void StoreRow(const PagedKv& kv, RowPlace place, const std::byte* row) {
  ForEachPiece(kv, place, [&](std::byte* at, auto bytes) {
    std::memcpy(at, row, bytes);
    row += bytes;
  });
}

void LoadRow(const PagedKv& kv, RowPlace place, std::byte* row) {
  ForEachPiece(kv, place, [&](const std::byte* at, auto bytes) {
    std::memcpy(row, at, bytes);
    row += bytes;
  });
}

bool HoldsRow(const PagedKv& kv, RowPlace place, const std::byte* row) {
  bool same = true;
  ForEachPiece(kv, place, [&](const std::byte* at, auto bytes) {
    same &= std::memcmp(at, row, bytes) == 0;
    row += bytes;
  });
  return same;
}

}  // namespace tributary::cpu
