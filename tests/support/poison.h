// Poison for what must never be read: a stray read shows as NaN in a result, or as a crash.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <span>

namespace tributary::test {

// For dead entries of page tables: far outside any cache.
inline constexpr int32_t kWildPage = 2147480000;

// All bits set are a NaN in every element type: f32, bf16, f16, fp8_e4m3 and fp8_e5m2.
inline void Poison(std::span<std::byte> memory) {
  if (!memory.empty()) std::memset(memory.data(), 0xff, memory.size());
}
template <typename T>
void Poison(std::span<T> memory) {
  Poison(std::as_writable_bytes(memory));
}

}  // namespace tributary::test
