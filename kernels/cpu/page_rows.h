// Rows of elements (one token's key or value of one head) into and out of pages (page_layout.h).
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/paged_kv.h"

namespace tributary::cpu {

enum class RowKind { kKey, kValue };

// Where a row belongs.
struct RowPlace {
  RowKind kind = RowKind::kKey;
  int32_t page = 0;
  int32_t head = 0;
  int32_t token = 0;  // slot in the page
};

// Writes a row of key_dim or value_dim elements of the cache's type, and behind them its block
// scales (NVFP4). Touches no other element, so that rows of neighbouring tokens may be written at
// the same time.
void StoreRow(const PagedKv& kv, RowPlace place, const std::byte* row);

// The inverse: reads what StoreRow wrote.
void LoadRow(const PagedKv& kv, RowPlace place, std::byte* row);

// Whether the page holds these very bytes.
bool HoldsRow(const PagedKv& kv, RowPlace place, const std::byte* row);

}  // namespace tributary::cpu
