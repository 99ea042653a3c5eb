// Tokens leave the GPU in plain order, bit for bit as the reference has them, and come back as they
// were; and what is kept of new tokens has the same bits as what is written to pages.
#include "kernels/cuda/append/plain_tokens.h"

#include <gmock/gmock.h>

#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "kernels/cuda/buffer.h"
#include "kernels/params.h"
#include "kernels/reference.h"
#include "tests/kernels/cuda/gpu_cache.h"

namespace tributary::cuda {
namespace {

constexpr int32_t kPageSize = 32;
constexpr int32_t kPages = 5;
constexpr int32_t kLayers = 2;

struct Case {
  KvGeometry geometry;
  DType input = DType::kBf16;
};

std::vector<Case> Cases() {
  std::vector<Case> cases;
  const DType inputs[] = {DType::kF32, DType::kBf16, DType::kF16};
  for (const DType kv :
       {DType::kFp8E4M3, DType::kFp8E5M2, DType::kBf16, DType::kF16, DType::kNvfp4}) {
    for (const HeadDims& dims : DimsOf(&HeadDims::append)) {
      cases.push_back({GeometryOf(3, dims, kv), inputs[cases.size() % 3]});
    }
  }
  return cases;
}

// The token of a slot in plain order.
std::vector<std::byte> PlainToken(const PagedKv& kv, int64_t slot) {
  std::vector<std::byte> token;
  const auto page = static_cast<int32_t>(slot / kv.page_size);
  const auto at = static_cast<int32_t>(slot % kv.page_size);
  for (int32_t head = 0; head < kv.geometry.kv_heads; ++head) {
    const std::byte* key = KeyRow(kv, page, head, at);
    const std::byte* value = ValueRow(kv, page, head, at);
    const std::byte* key_scales = KeyScales(kv, page, head, at);
    const std::byte* value_scales = ValueScales(kv, page, head, at);
    token.insert(token.end(), key, key + KeyBytes(kv.geometry));
    token.insert(token.end(), key_scales, key_scales + KeyScaleBytes(kv.geometry));
    token.insert(token.end(), value, value + ValueBytes(kv.geometry));
    token.insert(token.end(), value_scales, value_scales + ValueScaleBytes(kv.geometry));
  }
  token.resize(PlainTokenBytes(kv.geometry));
  return token;
}

PinnedBuffer Pin(size_t bytes) {
  PinnedBuffer buffer;
  EXPECT_EQ(buffer.Allocate(bytes), cudaSuccess);
  std::memset(buffer.data(), 0xee, bytes);
  return buffer;
}

void ExpectRunsComeBack(const Case& c, int32_t slots) {
  SCOPED_TRACE(std::string(Name(c.geometry.dtype)) + ", keys of " +
               std::to_string(c.geometry.key_dim) + ", runs of " + std::to_string(slots));
  std::mt19937 random(3);
  std::vector<HostCache> layers;
  std::vector<std::byte> on_gpu;
  for (int32_t layer = 0; layer < kLayers; ++layer) {
    layers.emplace_back(CacheShape{c.geometry, kPageSize, kPages});
    layers.back().Fill({0, 1, 2, 3, 4}, kPageSize * kPages, random);
    const auto bytes = Reorder(layers.back().kv(), layers.back().bytes(), Direction::kToGpu);
    on_gpu.insert(on_gpu.end(), bytes.begin(), bytes.end());
  }
  const DeviceArray<std::byte> cache(on_gpu);
  std::vector<int64_t> first;
  for (const int64_t slot : {96, 32, 0}) first.push_back(slot + (slots < kPageSize ? slots : 0));
  const DeviceArray<int64_t> slots_on_gpu(first);
  const size_t token = PlainTokenBytes(c.geometry);
  const size_t run_bytes = kLayers * static_cast<size_t>(slots) * token;
  const PinnedBuffer plain = Pin(run_bytes * first.size());
  PlainRunsArgs args{.cache = cache.data(),
                     .layer_bytes = on_gpu.size() / kLayers,
                     .geometry = c.geometry,
                     .page_size = kPageSize,
                     .layers = kLayers,
                     .first = slots_on_gpu.data(),
                     .runs = static_cast<int32_t>(first.size()),
                     .slots = slots,
                     .plain = plain.data(),
                     .run_bytes = run_bytes};
  ASSERT_EQ(LaunchReadRuns(args, nullptr).message(), "");
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  const std::byte* at = plain.data();
  for (const int64_t slot : first) {
    for (const HostCache& layer : layers) {
      for (int32_t i = 0; i < slots; ++i, at += token) {
        const std::vector<std::byte> expected = PlainToken(layer.kv(), slot + i);
        ASSERT_EQ(expected.size(), token);
        ASSERT_EQ(std::memcmp(at, expected.data(), token), 0) << "slot " << slot + i;
      }
    }
  }
  // Into a cache of NaN: the tokens are there, and nothing else has changed.
  DeviceArray<std::byte> other(on_gpu.size());
  std::vector<std::byte> expected;
  for (const HostCache& layer : layers) {
    HostCache blank({c.geometry, kPageSize, kPages});
    const PagedKv& kv = blank.kv();
    for (const int64_t slot : first) {
      for (int64_t s = slot; s < slot + slots; ++s) {
        const auto page = static_cast<int32_t>(s / kPageSize);
        const auto in_page = static_cast<int32_t>(s % kPageSize);
        for (int32_t head = 0; head < c.geometry.kv_heads; ++head) {
          std::memcpy(KeyRow(kv, page, head, in_page), KeyRow(layer.kv(), page, head, in_page),
                      KeyRowBytes(c.geometry));
          std::memcpy(ValueRow(kv, page, head, in_page), ValueRow(layer.kv(), page, head, in_page),
                      ValueBytes(c.geometry));
          std::memcpy(KeyScales(kv, page, head, in_page),
                      KeyScales(layer.kv(), page, head, in_page), KeyScaleBytes(c.geometry));
          std::memcpy(ValueScales(kv, page, head, in_page),
                      ValueScales(layer.kv(), page, head, in_page), ValueScaleBytes(c.geometry));
        }
      }
    }
    const auto bytes = Reorder(kv, blank.bytes(), Direction::kToGpu);
    expected.insert(expected.end(), bytes.begin(), bytes.end());
  }
  std::vector<std::byte> nothing;
  for (int32_t layer = 0; layer < kLayers; ++layer) {
    HostCache blank({c.geometry, kPageSize, kPages});
    nothing.insert(nothing.end(), blank.bytes().begin(), blank.bytes().end());
  }
  other.Set(nothing);
  args.cache = other.data();
  ASSERT_EQ(LaunchWriteRuns(args, nullptr).message(), "");
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  EXPECT_TRUE(other.Get() == expected);
}

TEST(PlainTokens, RunsLeaveAndComeBack) {
  TRIBUTARY_SKIP_WITHOUT_GPU();
  for (const Case& c : Cases()) {
    for (const int32_t slots : {1, 2, 8, kPageSize}) ExpectRunsComeBack(c, slots);
  }
}

void ExpectKeptAsWritten(const Case& c, bool scaled) {
  SCOPED_TRACE(std::string(Name(c.geometry.dtype)) + " from " + Name(c.input) + ", keys of " +
               std::to_string(c.geometry.key_dim));
  HostCache cache({c.geometry, kPageSize, kPages}, scaled);
  std::vector<int64_t> slots;
  for (int64_t slot = 30; slot < 70; ++slot) slots.push_back(slot);
  slots.insert(slots.end(), {kPadSlot, 131, kPadSlot, 128, 150, 5});
  const auto tokens = static_cast<int32_t>(slots.size());
  std::mt19937 random(7);
  std::normal_distribution<float> normal(0.0f, 30.0f);
  const float odd[] = {0.0f,
                       -0.0f,
                       std::numeric_limits<float>::quiet_NaN(),
                       std::numeric_limits<float>::infinity(),
                       1e30f,
                       -1e9f,
                       1e-9f};
  const auto draw = [&](int32_t dim, size_t period) {
    const size_t elements = static_cast<size_t>(tokens * c.geometry.kv_heads * dim);
    std::vector<std::byte> bytes(elements * SizeOf(c.input));
    for (size_t i = 0; i < elements; ++i) {
      StoreElement(c.input, bytes.data(), i,
                   i % period == 5 ? odd[i / period % 7] : normal(random));
    }
    return bytes;
  };
  const std::vector<std::byte> k = draw(c.geometry.key_dim, 97), v = draw(c.geometry.value_dim, 89);
  AppendParams reference;
  reference.kv = cache.kv();
  reference.k = k.data();
  reference.v = v.data();
  reference.input_dtype = c.input;
  reference.tokens = tokens;
  reference.slots = slots.data();
  ReferenceAppend(reference);

  const DeviceArray<std::byte> device_k(k), device_v(v);
  const DeviceArray<float> k_scale(cache.k_scale()), v_scale(cache.v_scale());
  const DeviceArray<int64_t> device_slots(slots);
  const size_t token = PlainTokenBytes(c.geometry);
  const size_t page_bytes = 2 * kPageSize * token;  // as between the pages of two layers
  const PinnedBuffer plain = Pin(page_bytes * kPages);
  AppendArgs args;
  args.geometry = c.geometry;
  args.page_size = kPageSize;
  args.k_scale = scaled ? k_scale.data() : nullptr;
  args.v_scale = scaled ? v_scale.data() : nullptr;
  args.k = device_k.data();
  args.v = device_v.data();
  args.input_dtype = c.input;
  args.tokens = tokens;
  args.slots = device_slots.data();
  ASSERT_EQ(LaunchAppendPlain(args, {plain.data(), page_bytes}, nullptr).message(), "");
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  std::vector<std::byte> expected(page_bytes * kPages, std::byte{0xee});
  for (const int64_t slot : slots) {
    if (slot == kPadSlot) continue;
    const std::vector<std::byte> bytes = PlainToken(cache.kv(), slot);
    std::memcpy(expected.data() + static_cast<size_t>(slot / kPageSize) * page_bytes +
                    static_cast<size_t>(slot % kPageSize) * token,
                bytes.data(), token);
  }
  EXPECT_EQ(std::memcmp(plain.data(), expected.data(), expected.size()), 0);
}

TEST(PlainTokens, AreKeptWithTheBitsOfAnAppend) {
  TRIBUTARY_SKIP_WITHOUT_GPU();
  for (const Case& c : Cases()) {
    ExpectKeptAsWritten(c, /*scaled=*/c.geometry.key_dim >= 96 && c.geometry.key_dim <= 192);
  }
}

TEST(PlainTokens, RunsThatCrossPagesAreRefused) {
  PlainRunsArgs args;
  args.geometry = SquareGeometry(1, 128, DType::kBf16);
  args.page_size = 16;
  args.layers = 1;
  args.runs = 1;
  args.slots = 5;
  EXPECT_THAT(LaunchReadRuns(args, nullptr).message(), ::testing::HasSubstr("of 5 slots"));
  args.slots = 4;
  args.geometry.dtype = DType::kF32;
  EXPECT_THAT(LaunchWriteRuns(args, nullptr).message(), ::testing::HasSubstr("kv.dtype"));
}

}  // namespace
}  // namespace tributary::cuda
