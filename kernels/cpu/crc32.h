// The CRC-32 of gzip and zlib, at the speed of carry-less multiplication.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tributary::cpu {

// As zlib's crc32_z: of bytes that follow others whose CRC is `crc`, or 0 at first.
uint32_t Crc32(uint32_t crc, const std::byte* data, size_t bytes);

}  // namespace tributary::cpu
