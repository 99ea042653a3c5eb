// The bytes of a cache in the order of the CPU backend, made from those in the order of the
// reference.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

#include "kernels/cpu/page_layout.h"
#include "kernels/paged_kv.h"

namespace tributary::test {

// Where an element lies from the start of the cache.
inline size_t CpuOffset(const PagedKv& kv, bool value, int32_t page, int32_t head, int32_t token,
                        int32_t d) {
  return size_t(page) * PageBytes(kv) +
         (value ? cpu::ValueOffset : cpu::KeyOffset)(kv, head, token, d);
}

// `kv` says the shape; its base is not looked at. Padding is filled with `padding`.
inline std::vector<std::byte> CpuOrder(PagedKv kv, std::span<std::byte> plain,
                                       std::byte padding = {}) {
  std::vector<std::byte> bytes(plain.size(), padding);
  kv.base = plain.data();
  const size_t element = BytesOf(kv.geometry.dtype, 1);
  for (const bool value : {false, true}) {
    const int32_t dim = value ? kv.geometry.value_dim : kv.geometry.key_dim;
    // How far a token's channels lie from its first is the same for every page and head.
    std::vector<ptrdiff_t> from_first;
    for (int32_t token = 0; token < kv.page_size; ++token) {
      for (int32_t d = 0; d < dim; ++d) {
        from_first.push_back(static_cast<ptrdiff_t>(CpuOffset(kv, value, 0, 0, token, d)) -
                             static_cast<ptrdiff_t>(CpuOffset(kv, value, 0, 0, token, 0)));
      }
    }
    for (int32_t page = 0; page < kv.num_pages; ++page) {
      for (int32_t head = 0; head < kv.geometry.kv_heads; ++head) {
        for (int32_t token = 0; token < kv.page_size; ++token) {
          const std::byte* from = (value ? ValueRow : KeyRow)(kv, page, head, token);
          std::byte* const to = bytes.data() + CpuOffset(kv, value, page, head, token, 0);
          for (int32_t d = 0; d < dim; ++d, from += element) {
            std::memcpy(to + from_first[static_cast<size_t>(token * dim + d)], from, element);
          }
        }
      }
    }
  }
  return bytes;
}

}  // namespace tributary::test
