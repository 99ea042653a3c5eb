// What the GPU does with a cache besides attending and appending: comparing and copying pages.
#include <gmock/gmock.h>

#include <limits>
#include <vector>

#include "kernels/cuda/append/append.h"
#include "kernels/cuda/append/copy_page.h"
#include "kernels/cuda/append/matches_cache.h"
#include "kernels/params.h"
#include "tests/kernels/cuda/gpu_cache.h"

namespace tributary::cuda {
namespace {

using ::testing::ElementsAre;

// Appends a few tokens, then asks about them; `spoil` changes one element of what is asked.
class Comparison {
 public:
  Comparison(DType kv, DType input, const HeadDims& dims)
      : cache_({.geometry = GeometryOf(kKvHeads, dims, kv), .num_pages = 2}, true),
        input_(input),
        device_cache_(cache_.bytes()),
        k_scale_(cache_.k_scale()),
        v_scale_(cache_.v_scale()),
        slots_(std::vector<int64_t>{16, 17, 18, 19, 5, kPadSlot, 31}),
        entries_(std::vector<int32_t>{0, 0, 0, 1, 1, 2, 3}) {
    std::mt19937 random(3);
    std::normal_distribution<float> normal;
    for (int i = 0; i < kTokens * kKvHeads * dims.key_dim; ++i) k_.push_back(normal(random));
    for (int i = 0; i < kTokens * kKvHeads * dims.value_dim; ++i) v_.push_back(normal(random));
    k_[5] = std::numeric_limits<float>::quiet_NaN();  // held as such, it is the same
    const DeviceArray<std::byte> k(Bytes(k_)), v(Bytes(v_));
    EXPECT_TRUE(LaunchAppend(Args(k, v), nullptr).ok());
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  }

  // [entries], after the values are what they are now.
  std::vector<uint32_t> Differs() {
    const DeviceArray<std::byte> k(Bytes(k_)), v(Bytes(v_));
    DeviceArray<uint32_t> differs(4);
    differs.Fill(0);
    EXPECT_TRUE(LaunchMatchesCache(Args(k, v), entries_.data(), differs.data(), nullptr).ok());
    return differs.Get();
  }
  float& k(int32_t token, int32_t head, int32_t d) {
    return k_[(size_t(token) * kKvHeads + head) * cache_.kv().geometry.key_dim + d];
  }
  float& v(int32_t token, int32_t head, int32_t d) {
    return v_[(size_t(token) * kKvHeads + head) * cache_.kv().geometry.value_dim + d];
  }

 private:
  static constexpr int32_t kKvHeads = 3;
  static constexpr int32_t kTokens = 7;

  std::vector<std::byte> Bytes(const std::vector<float>& values) const {
    std::vector<std::byte> bytes(values.size() * SizeOf(input_));
    for (size_t i = 0; i < values.size(); ++i) StoreElement(input_, bytes.data(), i, values[i]);
    return bytes;
  }
  AppendArgs Args(const DeviceArray<std::byte>& k, const DeviceArray<std::byte>& v) const {
    return {.cache = device_cache_.data(),
            .geometry = cache_.kv().geometry,
            .page_size = cache_.kv().page_size,
            .k_scale = k_scale_.data(),
            .v_scale = v_scale_.data(),
            .k = k.data(),
            .v = v.data(),
            .input_dtype = input_,
            .tokens = kTokens,
            .slots = slots_.data()};
  }

  HostCache cache_;
  const DType input_;
  const DeviceArray<std::byte> device_cache_;
  const DeviceArray<float> k_scale_, v_scale_;
  const DeviceArray<int64_t> slots_;
  const DeviceArray<int32_t> entries_;
  std::vector<float> k_, v_;
};

TEST(MatchesCacheTest, FindsWhatDiffersAndNothingElse) {
  TRIBUTARY_SKIP_WITHOUT_GPU();
  for (const DType kv :
       {DType::kFp8E4M3, DType::kFp8E5M2, DType::kBf16, DType::kF16, DType::kNvfp4}) {
    for (const DType input : {DType::kF32, DType::kBf16, DType::kF16}) {
      for (const HeadDims& dims : DimsOf(&HeadDims::append)) {
        SCOPED_TRACE(std::string(Name(kv)) + " from " + Name(input) + " " + NameOf(dims));
        // The last dimension of each is where layouts differ.
        Comparison last(kv, input, dims);
        last.k(6, 2, dims.key_dim - 1) += 8;
        EXPECT_THAT(last.Differs(), ElementsAre(0, 0, 0, 1));
        Comparison comparison(kv, input, dims);
        EXPECT_THAT(comparison.Differs(), ElementsAre(0, 0, 0, 0));
        comparison.v(4, 2, dims.value_dim - 1) += 8;
        EXPECT_THAT(comparison.Differs(), ElementsAre(0, 1, 0, 0));
        comparison.k(0, 1, 8) = std::numeric_limits<float>::quiet_NaN();
        comparison.k(5, 0, 0) += 8;  // another rank's token
        EXPECT_THAT(comparison.Differs(), ElementsAre(1, 1, 0, 0));
      }
    }
  }
}

TEST(CopyPageTest, CopiesThePageInEveryLayerAndNothingElse) {
  TRIBUTARY_SKIP_WITHOUT_GPU();
  constexpr size_t kPage = 4096 + 16;
  constexpr int32_t kLayers = 3, kPages = 5;
  std::vector<std::byte> expected(kPage * kLayers * kPages);
  std::mt19937 random(1);
  for (std::byte& b : expected) b = static_cast<std::byte>(random());
  const DeviceArray<std::byte> device(expected);
  const auto copy = [&](int32_t source, int32_t destination) {
    ASSERT_TRUE(LaunchCopyPage({.base = device.data(),
                                .page_bytes = kPage,
                                .layer_bytes = kPage * kPages,
                                .layers = kLayers,
                                .source = source,
                                .destination = destination},
                               nullptr)
                    .ok());
    for (int32_t layer = 0; layer < kLayers; ++layer) {
      std::byte* base = expected.data() + layer * kPage * kPages;
      std::memmove(base + destination * kPage, base + source * kPage, kPage);
    }
  };
  copy(1, 4);
  copy(4, 0);  // in order: what was just copied
  copy(2, 2);
  EXPECT_EQ(device.Get(), expected);
}

TEST(CopyPageTest, OddSizesAreRefused) {
  EXPECT_EQ(LaunchCopyPage({.page_bytes = 24, .layers = 1}, nullptr).code(),
            StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace tributary::cuda
