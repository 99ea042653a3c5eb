// Outputs in FP8 and NVFP4: the bytes that kernels/nvfp4.h and the proto promise, on every
// instruction set.
#include "kernels/output_format.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "kernels/cpu/backend.h"
#include "kernels/element.h"
#include "tests/kernels/dispatch.h"
#include "tests/support/quantized_output.h"

namespace tributary::test {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

TEST(Float4Test, EveryCodeIsItsNumberAndBack) {
  for (uint8_t code = 0; code < 16; ++code) {
    const double magnitude = E2M1Magnitudes()[code & 7];
    const float x = FloatFromFloat4E2M1(code);
    EXPECT_EQ(std::abs(x), magnitude) << int{code};
    EXPECT_EQ(std::signbit(x), code >= 8) << int{code};
    EXPECT_EQ(Float4E2M1FromFloat(x), code);
  }
  EXPECT_EQ(E2M1Magnitudes().back(), 6.0);
}

TEST(Float4Test, RoundsToNearestEvenAndSaturates) {
  for (int code = 0; code < 7; ++code) {
    const auto tie = static_cast<float>((E2M1Magnitudes()[code] + E2M1Magnitudes()[code + 1]) / 2);
    EXPECT_EQ(Float4E2M1FromFloat(tie), code + code % 2);
    EXPECT_EQ(Float4E2M1FromFloat(-tie), 8 + code + code % 2);
    EXPECT_EQ(Float4E2M1FromFloat(std::nextafter(tie, 0.0f)), code);
    EXPECT_EQ(Float4E2M1FromFloat(std::nextafter(tie, kInf)), code + 1);
  }
  for (const float x : {6.0f, 7.0f, 1e30f, kInf}) {
    EXPECT_EQ(Float4E2M1FromFloat(x), 7);
    EXPECT_EQ(Float4E2M1FromFloat(-x), 15);
  }
}

TEST(Float4Test, ElementsLieTwoToAByteTheFirstInTheLowBits) {
  std::byte bytes[2] = {std::byte{0xff}, std::byte{0xff}};
  StoreElement(DType::kNvfp4, bytes, 0, 1.0f);   // code 2
  StoreElement(DType::kNvfp4, bytes, 1, -6.0f);  // code 15
  StoreElement(DType::kNvfp4, bytes, 2, 0.5f);   // code 1
  EXPECT_EQ(bytes[0], std::byte{0xf2});
  EXPECT_EQ(bytes[1], std::byte{0xf1});
  EXPECT_EQ(LoadElement(DType::kNvfp4, bytes, 0), 1.0f);
  EXPECT_EQ(LoadElement(DType::kNvfp4, bytes, 1), -6.0f);
  EXPECT_EQ(LoadElement(DType::kNvfp4, bytes, 2), 0.5f);
}

TEST(OutputFormatTest, BytesCountTheScales) {
  EXPECT_EQ(OutputBytes(DType::kF32, 160), 640u);
  EXPECT_EQ(OutputBytes(DType::kBf16, 160), 320u);
  EXPECT_EQ(OutputBytes(DType::kFp8E4M3, 160), 160u);
  EXPECT_EQ(OutputBytes(DType::kNvfp4, 160), 90u);
  EXPECT_EQ(Nvfp4ScalesOffset(160), 80u);
}

class StoreOutputTest : public ::testing::TestWithParam<int64_t> {
 protected:
  static std::vector<uint8_t> Stored(const OutputFormat& format, const std::vector<float>& values) {
    std::vector<uint8_t> bytes(OutputBytes(format.dtype, static_cast<int64_t>(values.size())));
    cpu::StoreOutput(format, values.data(), values.size(), bytes.data());
    return bytes;
  }
  ForcedTarget target_{GetParam()};
};
INSTANTIATE_TEST_SUITE_P(Targets, StoreOutputTest, ::testing::ValuesIn(Targets()), TargetName);

// Blocks of every size from what vanishes to what saturates, with ties and zeros of both signs.
std::vector<float> Blocks() {
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  std::vector<float> values;
  for (int exponent = -148; exponent < 126; ++exponent) {
    for (int i = 0; i < 64; ++i) values.push_back(std::ldexp(normal(random), exponent));
  }
  for (int i = 0; i < 4096; ++i) values.push_back(normal(random));
  for (int i = 0; i < 64; ++i) {  // with a block scale of 1 all these are ties or nearly so
    for (const float x : {6.0f, 0.25f, -0.75f, 1.25f, -1.75f, 2.5f, 3.5f, -5.0f}) {
      values.push_back(i % 2 == 0 ? x : std::nextafter(x, i % 4 == 1 ? 0.0f : 2 * x));
    }
  }
  for (int i = 0; i < 32; ++i) values.push_back(i % 2 == 0 ? 0.0f : -0.0f);
  for (int i = 0; i < 16; ++i) values.push_back(i == 5 ? -kInf : 1.0f + i);
  return values;
}

TEST_P(StoreOutputTest, GivesTheBytesOfTheDefinition) {
  const std::vector<float> values = Blocks();
  for (const DType dtype : {DType::kFp8E4M3, DType::kNvfp4}) {
    for (const float scale : {1.0f, 0.37f, 0x1p-9f, 3e-4f, 1e30f, 1e-40f}) {
      const OutputFormat format{dtype, scale};
      EXPECT_EQ(Stored(format, values), QuantizedOutput(format, values))
          << Name(dtype) << " scale " << scale;
    }
  }
}

TEST_P(StoreOutputTest, OtherTypesAreStoredAsTheyAre) {
  const std::vector<float> values = {1.0f, -2.5f, 1e-3f, 65504.0f};
  const std::vector<uint8_t> bytes = Stored({DType::kF32}, values);
  for (size_t i = 0; i < values.size(); ++i) {
    EXPECT_EQ(LoadElement(DType::kF32, bytes.data(), i), values[i]);
  }
  EXPECT_EQ(LoadElement(DType::kBf16, Stored({DType::kBf16}, values).data(), 1), -2.5f);
}

TEST_P(StoreOutputTest, NanIsSeenInItsWholeBlockAndNowhereElse) {
  std::vector<float> values(48, 1.0f);
  values[20] = std::nanf("");
  const std::vector<uint8_t> nvfp4 = Stored({DType::kNvfp4}, values);
  EXPECT_EQ(nvfp4[24], nvfp4[26]);
  EXPECT_EQ(nvfp4[25], 0x7f);
  EXPECT_TRUE(std::isnan(FloatFromFloat8E4M3(nvfp4[25])));
  EXPECT_EQ(nvfp4[24], NearestCode(E4M3Magnitudes(), 1.0f / 6.0f));
  const std::vector<uint8_t> fp8 = Stored({DType::kFp8E4M3}, values);
  for (size_t i = 0; i < values.size(); ++i) {
    EXPECT_EQ(std::isnan(FloatFromFloat8E4M3(fp8[i])), i == 20) << i;
  }
}

// What is read back is near what was stored: the block's largest number within 1/16 of itself, all
// others within a quarter of a step of the elements' grid.
TEST_P(StoreOutputTest, WhatIsReadBackIsNear) {
  std::mt19937 random(7);
  std::normal_distribution<float> normal;
  std::vector<float> values(1 << 14);
  for (float& x : values) x = normal(random);
  const float tensor_scale = 5.0f / (6 * 448);
  const std::vector<uint8_t> bytes = Stored({DType::kNvfp4, tensor_scale}, values);
  const size_t scales = Nvfp4ScalesOffset(static_cast<int64_t>(values.size()));
  for (size_t i = 0; i < values.size(); ++i) {
    const float step = FloatFromFloat8E4M3(bytes[scales + i / 16]) * tensor_scale;
    const float read = LoadElement(DType::kNvfp4, bytes.data(), i) * step;
    // The grid is 1 apart up to 4 and 2 apart beyond; a scale rounded down saturates its largest.
    ASSERT_LE(std::abs(read - values[i]), 1.0f * step) << i;
  }
}

}  // namespace
}  // namespace tributary::test
