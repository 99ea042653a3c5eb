// The checksum is the one that every zlib has, however the bytes lie and are cut.
#include "kernels/cpu/crc32.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <random>
#include <string>
#include <vector>

namespace tributary::cpu {
namespace {

// Bit by bit.
uint32_t Slow(uint32_t crc, const std::byte* data, size_t bytes) {
  crc = ~crc;
  for (size_t i = 0; i < bytes; ++i) {
    crc ^= static_cast<uint32_t>(data[i]);
    for (int bit = 0; bit < 8; ++bit) crc = crc >> 1 ^ (crc & 1 ? 0xedb88320u : 0);
  }
  return ~crc;
}

TEST(Crc32, OfTheDigits) {
  const std::string digits = "123456789";
  EXPECT_EQ(Crc32(0, reinterpret_cast<const std::byte*>(digits.data()), digits.size()),
            0xcbf43926u);
  EXPECT_EQ(Crc32(7, nullptr, 0), 7u);
}

TEST(Crc32, OfEveryLengthAndPlace) {
  std::mt19937 random(5);
  std::vector<std::byte> data(5000);
  for (std::byte& byte : data) byte = static_cast<std::byte>(random());
  for (size_t bytes = 0; bytes < 300; ++bytes) {
    const size_t begin = bytes % 17;
    const uint32_t crc = random();
    EXPECT_EQ(Crc32(crc, data.data() + begin, bytes), Slow(crc, data.data() + begin, bytes))
        << bytes;
  }
  for (const size_t bytes : {1023, 1024, 4096, 4999}) {
    EXPECT_EQ(Crc32(1, data.data(), bytes), Slow(1, data.data(), bytes)) << bytes;
    const size_t cut = bytes / 3;
    EXPECT_EQ(Crc32(Crc32(1, data.data(), cut), data.data() + cut, bytes - cut),
              Slow(1, data.data(), bytes));
  }
}

}  // namespace
}  // namespace tributary::cpu
