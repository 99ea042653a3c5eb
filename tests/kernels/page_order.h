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

// Where an element lies from the start of the cache; of NVFP4, the byte that it shares.
inline size_t CpuOffset(const PagedKv& kv, bool value, int32_t page, int32_t head, int32_t token,
                        int32_t d) {
  const size_t begin = size_t(page) * PageBytes(kv);
  if (cpu::IsPaired(kv.geometry.dtype)) {
    return begin + (value ? cpu::ValueOffset : cpu::KeyOffset)(kv, head, token, d);
  }
  const size_t block = (value ? cpu::ValueBlockOffset : cpu::KeyBlockOffset)(kv, head, token);
  const int32_t in_block = token % cpu::BlockTokens(kv.page_size);
  const size_t row = (value ? cpu::ValueRowOffset : cpu::KeyRowOffset)(kv.geometry, in_block);
  return begin + block + row + size_t(d) * static_cast<size_t>(BitsOf(kv.geometry.dtype)) / 8;
}

// Where a token's block scales lie from the start of the cache.
inline size_t CpuScalesOffset(const PagedKv& kv, bool value, int32_t page, int32_t head,
                              int32_t token) {
  const int32_t tokens = cpu::BlockTokens(kv.page_size);
  return size_t(page) * PageBytes(kv) +
         (value ? cpu::ValueBlockOffset : cpu::KeyBlockOffset)(kv, head, token) +
         (value ? cpu::ValueScalesOffset : cpu::KeyScalesOffset)(kv.geometry, tokens,
                                                                 token % tokens);
}

// `kv` says the shape; its base is not looked at. Padding is filled with `padding`.
inline std::vector<std::byte> CpuOrder(PagedKv kv, std::span<std::byte> plain,
                                       std::byte padding = {}) {
  std::vector<std::byte> bytes(plain.size(), padding);
  kv.base = plain.data();
  const size_t element = BytesOf(kv.geometry.dtype, 1);
  const int32_t together =
      kv.geometry.dtype == DType::kNvfp4 ? 2 : 1;  // elements of `element` bytes
  for (const bool value : {false, true}) {
    const int32_t dim = value ? kv.geometry.value_dim : kv.geometry.key_dim;
    // How far a token's channels lie from its first is the same for every page and head.
    std::vector<ptrdiff_t> from_first;
    for (int32_t token = 0; token < kv.page_size; ++token) {
      for (int32_t d = 0; d < dim; d += together) {
        from_first.push_back(static_cast<ptrdiff_t>(CpuOffset(kv, value, 0, 0, token, d)) -
                             static_cast<ptrdiff_t>(CpuOffset(kv, value, 0, 0, token, 0)));
      }
    }
    for (int32_t page = 0; page < kv.num_pages; ++page) {
      for (int32_t head = 0; head < kv.geometry.kv_heads; ++head) {
        for (int32_t token = 0; token < kv.page_size; ++token) {
          const std::byte* from = (value ? ValueRow : KeyRow)(kv, page, head, token);
          std::byte* const to = bytes.data() + CpuOffset(kv, value, page, head, token, 0);
          const int32_t count = dim / together;
          for (int32_t i = 0; i < count; ++i, from += element) {
            std::memcpy(to + from_first[static_cast<size_t>(token * count + i)], from, element);
          }
          const std::byte* scales = (value ? ValueScales : KeyScales)(kv, page, head, token);
          const size_t scale_bytes = BlockScaleBytes(kv.geometry.dtype, dim);
          if (scale_bytes == 0) continue;
          std::memcpy(bytes.data() + CpuScalesOffset(kv, value, page, head, token), scales,
                      scale_bytes);
        }
      }
    }
  }
  return bytes;
}

}  // namespace tributary::test
