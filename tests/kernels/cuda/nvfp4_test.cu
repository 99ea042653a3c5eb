// Where NVFP4 lies in a page on the GPU, and that every code becomes f16 exactly there.
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <set>
#include <vector>

#include "kernels/cuda/layout/nvfp4_layout.h"
#include "kernels/cuda/ptx/widen_nvfp4.cuh"
#include "kernels/float4.h"
#include "kernels/float8.h"
#include "kernels/head_dims.h"
#include "tests/kernels/cuda/gpu_cache.h"

namespace tributary::cuda {
namespace {

constexpr int kTokens = 32;  // two strips

// Every code has a place, every scale has one, and together they fill the plane.
template <typename PlaceOf, typename ScaleOf>
void ExpectPlaneIsFull(int dims, PlaceOf place_of, ScaleOf scale_of) {
  std::set<size_t> taken;  // in halves of bytes
  for (int token = 0; token < kTokens; ++token) {
    for (int d = 0; d < dims; ++d) {
      const CodePlace place = place_of(token, d);
      EXPECT_TRUE(taken.insert(place.byte * 2 + (place.high ? 1 : 0)).second)
          << "token " << token << ", dimension " << d;
      if (d % kNvfp4Block != 0) continue;
      const size_t scale = scale_of(token, d);
      EXPECT_TRUE(taken.insert(scale * 2).second && taken.insert(scale * 2 + 1).second)
          << "scale of token " << token << ", dimension " << d;
      EXPECT_EQ(scale_of(token, d + kNvfp4Block - 1), scale);
    }
  }
  const size_t bytes = size_t(kTokens / kStripSlots) * Nvfp4StripBytes(dims);
  EXPECT_EQ(taken.size(), bytes * 2);
  EXPECT_EQ(*taken.rbegin(), bytes * 2 - 1);
}

TEST(Nvfp4LayoutTest, EveryElementHasAPlaceOfItsOwn) {
  for (const HeadDims& dims : kHeadDims) {
    SCOPED_TRACE(NameOf(dims));
    ExpectPlaneIsFull(
        dims.key_dim, [&](int token, int d) { return Nvfp4KeyPlace(token, d, dims.key_dim); },
        [&](int token, int d) { return Nvfp4KeyScale(token, d, dims.key_dim); });
    ExpectPlaneIsFull(
        dims.value_dim, [&](int token, int d) { return Nvfp4ValuePlace(token, d, dims.value_dim); },
        [&](int token, int d) { return Nvfp4ValueScale(token, d, dims.value_dim); });
  }
}

// So that tokens can be written side by side.
TEST(Nvfp4LayoutTest, AByteIsOneTokensAlone) {
  for (const HeadDims& dims : kHeadDims) {
    std::vector<int> key_owner(size_t(2) * Nvfp4StripBytes(dims.key_dim), -1);
    std::vector<int> value_owner(size_t(2) * Nvfp4StripBytes(dims.value_dim), -1);
    const auto expect_owner = [](int& owner, int token) {
      if (owner < 0) owner = token;
      EXPECT_EQ(owner, token);
    };
    for (int token = 0; token < kTokens; ++token) {
      for (int d = 0; d < dims.key_dim; ++d) {
        expect_owner(key_owner[Nvfp4KeyPlace(token, d, dims.key_dim).byte], token);
      }
      for (int d = 0; d < dims.value_dim; ++d) {
        expect_owner(value_owner[Nvfp4ValuePlace(token, d, dims.value_dim).byte], token);
      }
    }
  }
}

TEST(Nvfp4LayoutTest, CodesSurviveTheirPlace) {
  for (uint32_t low = 0; low < 16; ++low) {
    for (uint32_t high = 0; high < 16; ++high) {
      const uint32_t byte = PlacedCode(low, false) | PlacedCode(high, true);
      EXPECT_LT(byte, 256u);
      EXPECT_EQ(CodeOfByte(byte, false), low);
      EXPECT_EQ(CodeOfByte(byte, true), high);
    }
  }
}

// Thread (b, t): the word whose bytes are all t, with scale b in both halves.
__global__ void WidenAll(uint32_t* pairs) {
  uint32_t words[4];
  WidenCodes(threadIdx.x * 0x01010101u, words);
  const uint32_t scales = WidenE4M3<false>(blockIdx.x * 0x0101u);
  for (int i = 0; i < 4; ++i) {
    pairs[(blockIdx.x * 256 + threadIdx.x) * 4 + i] = MultiplyPairs(words[i], scales);
  }
}

TEST(Nvfp4WidenTest, EveryCodeAndScaleIsExact) {
  TRIBUTARY_SKIP_WITHOUT_GPU();
  constexpr int kScales = 128;
  const DeviceArray<uint32_t> device(size_t(kScales) * 256 * 4);
  WidenAll<<<kScales, 256>>>(device.data());
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  const std::vector<uint32_t> pairs = device.Get();
  for (uint32_t scale = 0; scale < kScales; ++scale) {
    for (uint32_t byte = 0; byte < 256; ++byte) {
      for (uint32_t i = 0; i < 4; ++i) {
        const uint32_t code = CodeOfByte(byte, i >= 2);
        const float expected = FloatFromFloat4E2M1(static_cast<uint8_t>(code)) *
                               FloatFromFloat8E4M3(static_cast<uint8_t>(scale));
        const uint32_t pair = pairs[(scale * 256 + byte) * 4 + i];
        for (const uint32_t half : {pair & 0xffffu, pair >> 16}) {
          const float actual =
              FloatFromF16(static_cast<uint16_t>(half)) * ElementUnit(DType::kNvfp4);
          if (std::isnan(expected)) {
            ASSERT_TRUE(std::isnan(actual)) << scale << " " << byte << " " << i;
          } else {
            ASSERT_EQ(actual, expected) << scale << " " << byte << " " << i;
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace tributary::cuda
