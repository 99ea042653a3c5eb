// Where a rank keeps a token.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/key_range.h"
#include "kernels/params.h"
#include "worker/page_tables.h"

namespace tributary::worker {

// The slot of token t in the pages of the layout's rank, or kPadSlot when the token is another
// rank's. The table must cover the token.
inline int64_t SlotOfToken(const DcpLayout& layout, int32_t page_size, int64_t t,
                           const PageTable& table) {
  if (OwnerOf(layout, t) != layout.rank) return kPadSlot;
  const int64_t slot = LocalSlot(layout, t);
  const int64_t page = table.pages()[static_cast<size_t>(slot / page_size)];
  return page * page_size + slot % page_size;
}

}  // namespace tributary::worker
