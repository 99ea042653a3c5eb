// The bytes of a cache in the order of the CPU backend, made from those in the order of the
// reference.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

#include "kernels/cpu/nvfp4_layout.h"
#include "kernels/cpu/page_layout.h"
#include "kernels/paged_kv.h"

namespace tributary::test {

// Where an element lies from the start of the cache. Only of NVFP4 does the half say something.
inline cpu::NibblePlace CpuPlace(const PagedKv& kv, bool value, int32_t page, int32_t head,
                                 int32_t token, int32_t d) {
  cpu::NibblePlace place;
  place.byte = size_t(page) * PageBytes(kv);
  if (kv.geometry.dtype != DType::kNvfp4) {
    place.byte += (value ? cpu::ValueOffset : cpu::KeyOffset)(kv, head, token, d);
    return place;
  }
  const int32_t tokens = cpu::BlockTokens(kv.page_size);
  cpu::NibblePlace in_block;
  if (value) {
    const int32_t first = d / cpu::kValueColumns * cpu::kValueColumns;
    const int32_t columns = cpu::ValuePlaneColumns(kv.geometry.value_dim, first);
    in_block = cpu::Nvfp4ValuePlace(columns, token % tokens, d - first);
    place.byte += cpu::ValueBlockOffset(kv, head, token) + cpu::Nvfp4PlaneBytes(tokens, first);
  } else {
    in_block = cpu::Nvfp4KeyPlace(tokens, token % tokens, d);
    place.byte += cpu::KeyBlockOffset(kv, head, token);
  }
  return {place.byte + in_block.byte, in_block.half};
}

// Where the block scale of a token's channels [16 * group, 16 * group + 16) lies from the start of
// the cache.
inline size_t CpuBlockScale(const PagedKv& kv, bool value, int32_t page, int32_t head,
                            int32_t token, int32_t group) {
  const int32_t tokens = cpu::BlockTokens(kv.page_size);
  const int32_t dim = value ? kv.geometry.value_dim : kv.geometry.key_dim;
  return size_t(page) * PageBytes(kv) +
         (value ? cpu::ValueBlockOffset : cpu::KeyBlockOffset)(kv, head, token) +
         cpu::BlockScalesOffset(tokens, dim) + cpu::BlockScaleOffset(tokens, token % tokens, group);
}

// Where elements of a token's key or value lie, from its first. Of all pages and heads alike.
struct PlacesOfRows {
  PlacesOfRows(const PagedKv& kv, bool value) {
    dim = value ? kv.geometry.value_dim : kv.geometry.key_dim;
    for (int32_t token = 0; token < kv.page_size; ++token) {
      const size_t first = CpuPlace(kv, value, 0, 0, token, 0).byte;
      for (int32_t d = 0; d < dim; ++d) {
        places.push_back(CpuPlace(kv, value, 0, 0, token, d));
        places.back().byte -= first;
      }
    }
  }
  const cpu::NibblePlace& of(int32_t token, int32_t d) const {
    return places[static_cast<size_t>(token * dim + d)];
  }

  int32_t dim = 0;
  std::vector<cpu::NibblePlace> places;
};

// `kv` says the shape; its base is not looked at. Padding is filled with `padding`.
inline std::vector<std::byte> CpuOrder(PagedKv kv, std::span<std::byte> plain,
                                       std::byte padding = {}) {
  std::vector<std::byte> bytes(plain.size(), padding);
  kv.base = plain.data();
  const DType dtype = kv.geometry.dtype;
  const auto copy_row = [&](bool value, int32_t page, int32_t head, int32_t token,
                            const PlacesOfRows& places) {
    const std::byte* from = (value ? ValueRow : KeyRow)(kv, page, head, token);
    std::byte* const to = &bytes[CpuPlace(kv, value, page, head, token, 0).byte];
    if (dtype != DType::kNvfp4) {
      const size_t element = BytesOf(dtype, 1);
      for (int32_t d = 0; d < places.dim; ++d, from += element) {
        std::memcpy(to + places.of(token, d).byte, from, element);
      }
      return;
    }
    for (int32_t d = 0; d < places.dim; ++d) {
      const auto code = std::to_integer<uint32_t>(from[d / 2]) >> (d % 2 * 4) & 0xfu;
      const cpu::NibblePlace& place = places.of(token, d);
      std::byte& byte = to[place.byte];
      const std::byte other = byte & (place.half == 0 ? std::byte{0xf0} : std::byte{0x0f});
      byte = other | static_cast<std::byte>(code << (4 * place.half));
    }
    const std::byte* scales = (value ? ValueScales : KeyScales)(kv, page, head, token);
    for (int32_t group = 0; group < places.dim / kNvfp4Block; ++group) {
      bytes[CpuBlockScale(kv, value, page, head, token, group)] = scales[group];
    }
  };
  for (const bool value : {false, true}) {
    const PlacesOfRows places(kv, value);
    for (int32_t page = 0; page < kv.num_pages; ++page) {
      for (int32_t head = 0; head < kv.geometry.kv_heads; ++head) {
        for (int32_t token = 0; token < kv.page_size; ++token) {
          copy_row(value, page, head, token, places);
        }
      }
    }
  }
  return bytes;
}

}  // namespace tributary::test
