// Append on the GPU writes, bit for bit, what the reference writes, and nothing else.
#include "kernels/cuda/append/append.h"

#include <gmock/gmock.h>

#include <cmath>
#include <limits>

#include "kernels/cuda/append/append_list.h"
#include "kernels/key_range.h"
#include "kernels/reference.h"
#include "tests/kernels/cuda/gpu_cache.h"

namespace tributary::cuda {
namespace {

struct Case {
  CacheShape shape;
  DType input = DType::kBf16;
  bool scaled = false;
  bool listed = false;
  std::vector<int64_t> slots;
};

void ExpectMatchesReference(const Case& c) {
  SCOPED_TRACE(std::string(Name(c.shape.geometry.dtype)) + " from " + Name(c.input) + ", keys of " +
               std::to_string(c.shape.geometry.key_dim) + ", values of " +
               std::to_string(c.shape.geometry.value_dim));
  HostCache cache(c.shape, c.scaled);
  const auto tokens = static_cast<int32_t>(c.slots.size());
  const KvGeometry& g = c.shape.geometry;
  std::mt19937 random(7);
  std::normal_distribution<float> normal(0.0f, 30.0f);
  const float odd[] = {0.0f,    -0.0f, std::nanf(""), std::numeric_limits<float>::infinity(),
                       1e30f,   -1e9f, 1e-9f,         -449.0f,
                       60000.0f};
  const auto draw = [&](int32_t dim, size_t period) {
    const size_t elements = size_t(tokens) * g.kv_heads * dim;
    std::vector<std::byte> bytes(elements * SizeOf(c.input));
    for (size_t i = 0; i < elements; ++i) {
      StoreElement(c.input, bytes.data(), i,
                   i % period == 5 ? odd[i / period % 9] : normal(random));
    }
    return bytes;
  };
  const std::vector<std::byte> k = draw(g.key_dim, 97), v = draw(g.value_dim, 89);
  AppendParams p;
  p.kv = cache.kv();
  p.k = k.data();
  p.v = v.data();
  p.input_dtype = c.input;
  p.tokens = tokens;
  p.slots = c.slots.data();

  const DeviceArray<std::byte> device_cache(Reorder(cache.kv(), cache.bytes(), Direction::kToGpu));
  const DeviceArray<std::byte> device_k(k), device_v(v);
  const DeviceArray<float> k_scale(cache.k_scale()), v_scale(cache.v_scale());
  AppendList list;
  if (c.listed) ListTokens(c.slots, &list);
  const DeviceArray<int64_t> slots(c.listed ? list.slots : c.slots);
  const DeviceArray<int32_t> listed(list.tokens);
  AppendArgs args;
  args.cache = device_cache.data();
  args.geometry = cache.kv().geometry;
  args.page_size = c.shape.page_size;
  args.k_scale = c.scaled ? k_scale.data() : nullptr;
  args.v_scale = c.scaled ? v_scale.data() : nullptr;
  args.k = device_k.data();
  args.v = device_v.data();
  args.input_dtype = c.input;
  args.tokens = c.listed ? static_cast<int32_t>(list.slots.size()) : tokens;
  args.slots = slots.data();
  args.listed = c.listed ? listed.data() : nullptr;
  const Status status = LaunchAppend(args, nullptr);
  ASSERT_TRUE(status.ok()) << status.message();
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  const std::vector<std::byte> actual =
      Reorder(cache.kv(), device_cache.Get(), Direction::kFromGpu);

  ReferenceAppend(p);
  for (const int64_t slot : c.slots) {
    if (slot == kPadSlot) continue;
    cache.ClearKeyPadding(static_cast<int32_t>(slot / c.shape.page_size),
                          static_cast<int32_t>(slot % c.shape.page_size));
  }
  const std::vector<std::byte>& expected = cache.bytes();
  ASSERT_EQ(actual.size(), expected.size());
  for (size_t i = 0; i < actual.size(); ++i) {
    ASSERT_EQ(actual[i], expected[i]) << "byte " << i << " of " << actual.size();
  }
}

TEST(AppendTest, EveryTypeAndAlignment) {
  TRIBUTARY_SKIP_WITHOUT_GPU();
  for (DType kv : {DType::kFp8E4M3, DType::kFp8E5M2, DType::kBf16, DType::kF16, DType::kNvfp4}) {
    for (DType input : {DType::kF32, DType::kBf16, DType::kF16}) {
      for (const HeadDims& dims : DimsOf(&HeadDims::append)) {
        Case c;
        c.shape = {GeometryOf(3, dims, kv), 32, 6};
        c.input = input;
        c.scaled = dims.key_dim >= 96 && dims.key_dim <= 192;
        // Whole quads, a run that starts inside a quad, tokens of other ranks, scattered tokens.
        for (int64_t slot = 32; slot < 64; ++slot) c.slots.push_back(slot);
        for (int64_t slot = 67; slot < 96; ++slot) c.slots.push_back(slot);
        c.slots.insert(c.slots.end(), {kPadSlot, 130, kPadSlot, 128, 191, 5});
        ExpectMatchesReference(c);
        // Tokens of several ranks in turns, a run after it that begins inside a quad.
        c.listed = true;
        ExpectMatchesReference(c);
        c.slots.clear();
        for (int64_t slot = 97; slot < 128; ++slot) {
          c.slots.insert(c.slots.end(), {kPadSlot, slot, kPadSlot});
        }
        for (int64_t slot = 2; slot < 23; ++slot) c.slots.push_back(slot);
        ExpectMatchesReference(c);
      }
    }
  }
}

TEST(AppendTest, NothingToWriteChangesNothing) {
  TRIBUTARY_SKIP_WITHOUT_GPU();
  Case c;
  c.shape = {SquareGeometry(2, 128, DType::kFp8E4M3), 16, 2};
  ExpectMatchesReference(c);
  c.slots.assign(9, kPadSlot);
  ExpectMatchesReference(c);
}

TEST(AppendListTest, KeepsQuadsOfSlotsTogether) {
  const int64_t p = kPadSlot;
  AppendList list;
  ListTokens(std::vector<int64_t>{p, 14, 15, p, 48, 49, 50, 51, 7, p}, &list);
  EXPECT_THAT(list.slots, ::testing::ElementsAre(p, p, 14, 15, 48, 49, 50, 51, p, p, p, 7));
  EXPECT_THAT(list.tokens, ::testing::ElementsAre(0, 0, 1, 2, 4, 5, 6, 7, 0, 0, 0, 8));
  EXPECT_EQ(AppendCost(list.slots), 4 + 1 + 4);
  EXPECT_EQ(AppendCost(std::vector<int64_t>{p, 14, 15, p, 48, 49, 50, 51, 7, p}), 4 + 1 + 4);
  ListTokens(std::vector<int64_t>(5, p), &list);
  EXPECT_TRUE(list.slots.empty());
}

TEST(AppendListTest, PaysWhereQuadsAreTornOrTokensAreOfOthers) {
  AppendList list;
  const auto pays = [&](int64_t first, int32_t tokens, int32_t ranks, int32_t interleave) {
    const DcpLayout layout{0, ranks, interleave};
    std::vector<int64_t> slots;
    for (int64_t position = first; position < first + tokens; ++position) {
      slots.push_back(OwnerOf(layout, position) == 0 ? LocalSlot(layout, position) : kPadSlot);
    }
    return ListIfThatPays(slots, &list);
  };
  EXPECT_FALSE(pays(0, 4096, 1, 16)) << "all quads are whole";
  EXPECT_TRUE(pays(5, 4096, 1, 16)) << "none is";
  EXPECT_TRUE(pays(0, 4096, 4, 1)) << "each has one of our tokens";
  EXPECT_TRUE(pays(0, 4096, 4, 16)) << "three of four launch threads for others";
  EXPECT_FALSE(pays(5, 63, 1, 16)) << "too small";
  EXPECT_FALSE(ListIfThatPays(std::vector<int64_t>(64, 3), &list)) << "single tokens";
}

TEST(AppendTest, RefusesTypesItDoesNotKnow) {
  AppendArgs args;
  args.tokens = 1;
  args.geometry = SquareGeometry(1, 128, DType::kBf16);
  args.input_dtype = DType::kFp8E4M3;
  EXPECT_THAT(LaunchAppend(args, nullptr).message(), ::testing::HasSubstr("input_dtype: fp8_e4m3"));
  args.input_dtype = DType::kBf16;
  args.geometry.dtype = DType::kF32;
  EXPECT_THAT(LaunchAppend(args, nullptr).message(), ::testing::HasSubstr("kv.dtype"));
  args.geometry = SquareGeometry(1, 112, DType::kBf16);
  EXPECT_THAT(LaunchAppend(args, nullptr).message(), ::testing::HasSubstr("key_dim: 112"));
}

}  // namespace
}  // namespace tributary::cuda
