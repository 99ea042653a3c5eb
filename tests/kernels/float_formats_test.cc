// Conversions, over every bit pattern of the 8- and 16-bit types.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <span>
#include <vector>

#include "kernels/cpu/backend.h"
#include "kernels/cpu/quantize.h"
#include "kernels/element.h"
#include "kernels/fp8_queries.h"
#include "tests/kernels/dispatch.h"

namespace tributary::test {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

// A format by its definition, apart from the code under test.
struct Format {
  DType type;
  int exponent_bits;
  int mantissa_bits;
  bool saturates;       // to max, where others overflow to infinity
  bool has_infinities;  // the highest exponent is for infinities and NaN alone
};
constexpr Format kFormats[] = {
    {DType::kFp8E4M3, 4, 3, true, false},
    {DType::kFp8E5M2, 5, 2, true, true},
    {DType::kF16, 5, 10, false, true},
    {DType::kBf16, 8, 7, false, true},
};

int Bits(const Format& f) { return 1 + f.exponent_bits + f.mantissa_bits; }

double Decode(const Format& f, uint32_t code) {
  const int bias = (1 << (f.exponent_bits - 1)) - 1;
  const uint32_t mantissa = code & ((1u << f.mantissa_bits) - 1);
  const uint32_t exponent = code >> f.mantissa_bits & ((1u << f.exponent_bits) - 1);
  const double sign = code >> (Bits(f) - 1) ? -1.0 : 1.0;
  const bool highest = exponent == (1u << f.exponent_bits) - 1;
  if (f.has_infinities && highest) {
    return mantissa == 0 ? sign * kInf : std::numeric_limits<double>::quiet_NaN();
  }
  if (highest && mantissa == (1u << f.mantissa_bits) - 1) {
    return std::numeric_limits<double>::quiet_NaN();
  }
  const double unit = std::ldexp(1.0, 1 - bias - f.mantissa_bits);
  if (exponent == 0) return sign * mantissa * unit;
  return sign * std::ldexp((mantissa + (1u << f.mantissa_bits)) * unit, int(exponent) - 1);
}

uint32_t Code(DType type, const void* data) {
  if (SizeOf(type) == 1) return *static_cast<const uint8_t*>(data);
  uint16_t code;
  std::memcpy(&code, data, sizeof(code));
  return code;
}

uint32_t Encode(DType type, float x) {
  std::byte data[4] = {};
  StoreElement(type, data, 0, x);
  return Code(type, data);
}

// Codes of the finite numbers >= 0 in order; codes of such formats count upwards with the number.
uint32_t MaxFiniteCode(const Format& f) {
  uint32_t code = (1u << (Bits(f) - 1)) - 1;
  while (!std::isfinite(Decode(f, code))) --code;
  return code;
}

TEST(FloatFormatsTest, DecodingIsExactForEveryCode) {
  for (const Format& f : kFormats) {
    for (uint32_t code = 0; code < 1u << Bits(f); ++code) {
      const uint16_t half[2] = {static_cast<uint16_t>(code), 0};
      const uint8_t byte[4] = {static_cast<uint8_t>(code)};
      const void* data = SizeOf(f.type) == 1 ? static_cast<const void*>(byte) : half;
      const float got = LoadElement(f.type, data, 0);
      const double expected = Decode(f, code);
      if (std::isnan(expected)) {
        ASSERT_TRUE(std::isnan(got)) << Name(f.type) << " " << code;
      } else {
        ASSERT_EQ(got, expected) << Name(f.type) << " " << code;
      }
      ASSERT_EQ(std::signbit(got), code >> (Bits(f) - 1) != 0) << Name(f.type) << " " << code;
    }
  }
}

TEST(FloatFormatsTest, EveryNumberEncodesToItself) {
  for (const Format& f : kFormats) {
    for (uint32_t code = 0; code < 1u << Bits(f); ++code) {
      const double x = Decode(f, code);
      if (std::isnan(x) || (std::isinf(x) && f.saturates)) continue;
      ASSERT_EQ(Encode(f.type, static_cast<float>(x)), code) << Name(f.type);
    }
  }
}

// Between two neighbours: the tie goes to the even one, and a hair off the tie to the nearer one.
TEST(FloatFormatsTest, RoundsToNearestEvenBetweenAllNeighbours) {
  for (const Format& f : kFormats) {
    const uint32_t last = MaxFiniteCode(f);
    const uint32_t sign_bit = 1u << (Bits(f) - 1);
    for (uint32_t code = 0; code < last; ++code) {
      const double middle = (Decode(f, code) + Decode(f, code + 1)) / 2;
      const float tie = static_cast<float>(middle);
      ASSERT_EQ(tie, middle);  // exact in float
      const uint32_t even = code % 2 == 0 ? code : code + 1;
      ASSERT_EQ(Encode(f.type, tie), even) << Name(f.type) << " " << code;
      ASSERT_EQ(Encode(f.type, -tie), even | sign_bit) << Name(f.type) << " " << code;
      ASSERT_EQ(Encode(f.type, std::nextafter(tie, 0.0f)), code) << Name(f.type) << " " << code;
      ASSERT_EQ(Encode(f.type, std::nextafter(tie, kInf)), code + 1) << Name(f.type) << " " << code;
    }
  }
}

TEST(FloatFormatsTest, WhatIsTooLargeSaturatesOrOverflows) {
  for (const Format& f : kFormats) {
    const uint32_t last = MaxFiniteCode(f);
    const uint32_t sign_bit = 1u << (Bits(f) - 1);
    const uint32_t beyond = f.saturates ? last : last + 1;  // infinity follows the largest number
    const double max = Decode(f, last);
    const double tie = max + (max - Decode(f, last - 1)) / 2;
    for (const float x : {static_cast<float>(tie), std::numeric_limits<float>::max(), kInf}) {
      EXPECT_EQ(Encode(f.type, x), beyond) << Name(f.type) << " " << x;
      EXPECT_EQ(Encode(f.type, -x), beyond | sign_bit) << Name(f.type) << " " << x;
    }
    EXPECT_EQ(Encode(f.type, std::nextafter(static_cast<float>(tie), 0.0f)), last) << Name(f.type);
  }
}

TEST(FloatFormatsTest, NanStaysNan) {
  for (const Format& f : kFormats) {
    for (const uint32_t bits : {0x7fc00000u, 0xffc00000u, 0x7f800001u, 0x7fffffffu, 0xff800001u}) {
      const float x = std::bit_cast<float>(bits);
      EXPECT_TRUE(std::isnan(Decode(f, Encode(f.type, x)))) << Name(f.type) << " " << bits;
    }
  }
}

// The vector forms, on every instruction set: the same bits as the scalar ones.
class QuantizeTest : public ::testing::TestWithParam<int64_t> {
 protected:
  ForcedTarget target_{GetParam()};
};
INSTANTIATE_TEST_SUITE_P(Targets, QuantizeTest, ::testing::ValuesIn(Targets()), TargetName);

// Every bf16 number, every number and tie of the narrow formats, and a million bit patterns.
std::vector<float> Samples() {
  std::vector<float> samples;
  for (uint32_t code = 0; code < 1u << 16; ++code) samples.push_back(FloatFromBf16(code));
  for (const Format& f : kFormats) {
    for (uint32_t code = 0; code < MaxFiniteCode(f); ++code) {
      const float tie = static_cast<float>((Decode(f, code) + Decode(f, code + 1)) / 2);
      for (const float x : {tie, std::nextafter(tie, 0.0f), std::nextafter(tie, kInf)}) {
        samples.push_back(x);
        samples.push_back(-x);
      }
    }
  }
  std::mt19937 generator(1);
  for (int i = 0; i < 1 << 20; ++i) samples.push_back(std::bit_cast<float>(uint32_t(generator())));
  samples.resize(samples.size() / 64 * 64 + 37, 1.0f);  // a tail shorter than a vector
  return samples;
}

TEST_P(QuantizeTest, SameBitsAsOneElementAtATime) {
  const std::vector<float> samples = Samples();
  for (const DType to :
       {DType::kF32, DType::kBf16, DType::kF16, DType::kFp8E4M3, DType::kFp8E5M2}) {
    for (const float scale : {1.0f, 0.37f}) {
      std::vector<std::byte> got(samples.size() * SizeOf(to)), expected(got.size());
      cpu::QuantizeRow(DType::kF32, samples.data(), scale, to, got.data(), samples.size());
      for (size_t i = 0; i < samples.size(); ++i) {
        StoreElement(to, expected.data(), i, samples[i] / scale);
      }
      // f32 to f32 keeps signalling NaNs when nothing is computed; the others make them quiet.
      for (size_t i = 0; i < samples.size(); ++i) {
        if (to == DType::kF32 && std::isnan(samples[i])) continue;
        ASSERT_EQ(
            std::memcmp(got.data() + i * SizeOf(to), expected.data() + i * SizeOf(to), SizeOf(to)),
            0)
            << samples[i] << " / " << scale << " to " << Name(to);
      }
    }
  }
}

TEST_P(QuantizeTest, ConvertsBetweenAllInputTypes) {
  for (const DType from : {DType::kBf16, DType::kF16}) {
    std::vector<uint16_t> codes(1u << 16);
    for (size_t i = 0; i < codes.size(); ++i) codes[i] = static_cast<uint16_t>(i);
    for (const DType to : {DType::kF32, DType::kBf16, DType::kF16}) {
      std::vector<std::byte> got(codes.size() * SizeOf(to));
      cpu::Convert(from, codes.data(), to, got.data(), codes.size());
      for (size_t i = 0; i < codes.size(); ++i) {
        const float value = LoadElement(from, codes.data(), i);
        std::byte one[4] = {};
        StoreElement(to, one, 0, value);
        const float expected = LoadElement(to, one, 0);
        const float result = LoadElement(to, got.data(), i);
        if (std::isnan(expected)) {
          ASSERT_TRUE(std::isnan(result)) << Name(from) << " " << i << " to " << Name(to);
        } else {
          ASSERT_EQ(result, expected) << Name(from) << " " << i << " to " << Name(to);
        }
      }
    }
  }
}

std::vector<float> RoundQuery(const std::vector<float>& query) {
  std::vector<float> rounded(query.size());
  RoundQueriesToFp8(DType::kF32, static_cast<int32_t>(query.size()),
                    std::as_bytes(std::span(query)), rounded.data());
  return rounded;
}

TEST(Fp8QueriesTest, ElementsKeepFourBitsBelowTheLargest) {
  // The largest decides: 13 becomes 208, just below 2^8, and 2^-13 the smallest number of e4m3.
  EXPECT_EQ(RoundQuery({13.0f, 1.1875f, -1.0625f, 0.0f, 0x1p-13f, 0x1p-15f}),
            (std::vector<float>{13.0f, 1.25f, -1.0f, 0.0f, 0x1p-13f, 0.0f}));
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  std::vector<float> query(128);
  for (float& x : query) x = normal(random);
  const std::vector<float> rounded = RoundQuery(query);
  for (size_t i = 0; i < query.size(); ++i) {
    EXPECT_NEAR(rounded[i], query[i], std::max(0x1p-4f * std::abs(query[i]), 0x1p-14f));
  }
  // A power of two changes nothing but the scale.
  for (const float scale : {0x1p-90f, 0x1p-10f, 0x1p10f, 0x1p90f}) {
    std::vector<float> scaled = query;
    for (float& x : scaled) x *= scale;
    scaled = RoundQuery(scaled);
    for (size_t i = 0; i < query.size(); ++i) EXPECT_EQ(scaled[i], rounded[i] * scale);
  }
}

TEST(Fp8QueriesTest, EveryHeadHasItsOwnScale) {
  std::vector<uint16_t> queries;  // [2, 2]
  for (const float x : {240.0f, 17.0f, 0x1p-120f, 0x1.1p-120f}) queries.push_back(Bf16FromFloat(x));
  std::vector<float> rounded(queries.size());
  RoundQueriesToFp8(DType::kBf16, 2, std::as_bytes(std::span(queries)), rounded.data());
  EXPECT_EQ(rounded, (std::vector<float>{240.0f, 16.0f, 0x1p-120f, 0x1p-120f}));
}

TEST(Fp8QueriesTest, NothingFiniteComesOfInfinity) {
  for (const float x : RoundQuery({1.0f, kInf, 0.0f})) EXPECT_TRUE(std::isnan(x));
  const std::vector<float> one = RoundQuery({1.0f, std::nanf(""), 0.0f});
  EXPECT_EQ(one[0], 1.0f);
  EXPECT_TRUE(std::isnan(one[1]));
}

}  // namespace
}  // namespace tributary::test
