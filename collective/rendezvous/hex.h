// Bytes as text, for stores that hold text.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace tributary::collective {

inline std::string ToHex(const void* data, size_t bytes) {
  static constexpr char kDigits[] = "0123456789abcdef";
  std::string text;
  for (size_t i = 0; i < bytes; ++i) {
    const auto byte = static_cast<const uint8_t*>(data)[i];
    text += kDigits[byte >> 4];
    text += kDigits[byte & 15];
  }
  return text;
}

// False when the text is not exactly `bytes` bytes of lower-case hexadecimal digits.
inline bool FromHex(const std::string& text, void* data, size_t bytes) {
  if (text.size() != 2 * bytes) return false;
  const auto digit = [](char c) {
    return c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
  };
  for (size_t i = 0; i < bytes; ++i) {
    const int high = digit(text[2 * i]), low = digit(text[2 * i + 1]);
    if (high < 0 || low < 0) return false;
    static_cast<uint8_t*>(data)[i] = static_cast<uint8_t>(high << 4 | low);
  }
  return true;
}

}  // namespace tributary::collective
