// FP8 to bf16 by table: the magnitude's seven bits index the two bytes of the result.
#pragma once

#include <cstdint>

#include "kernels/float8.h"
#include "kernels/half.h"

namespace tributary::cpu {

struct Float8Table {
  alignas(64) uint8_t low[128];
  alignas(64) uint8_t high[128];
};

// Every FP8 number is a bf16 number, so the tables are exact.
template <float (*kDecode)(uint8_t)>
constexpr Float8Table MakeFloat8Table() {
  Float8Table table{};
  for (int i = 0; i < 128; ++i) {
    const uint16_t bits = Bf16FromFloat(kDecode(static_cast<uint8_t>(i)));
    table.low[i] = static_cast<uint8_t>(bits & 0xff);
    table.high[i] = static_cast<uint8_t>(bits >> 8);
  }
  return table;
}

inline constexpr Float8Table kFloat8E4M3Table = MakeFloat8Table<FloatFromFloat8E4M3>();
inline constexpr Float8Table kFloat8E5M2Table = MakeFloat8Table<FloatFromFloat8E5M2>();

}  // namespace tributary::cpu
