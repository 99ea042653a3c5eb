// Merging partials on the GPU against the reference: any number of sources, empty ones, sinks,
// every output type, results that lie where a source does.
#include "kernels/cuda/merge/merge.h"

#include <gmock/gmock.h>

#include <cmath>
#include <deque>
#include <limits>
#include <optional>

#include "kernels/cpu/backend.h"
#include "kernels/lse.h"
#include "kernels/output_format.h"
#include "kernels/reference.h"
#include "tests/kernels/cuda/gpu_cache.h"

namespace tributary::cuda {
namespace {

struct Case {
  int32_t sources = 3;
  int32_t rows = 5;
  int32_t heads = 6;
  int32_t value_dim = 128;
  bool sinks = false;
  bool in_place = false;
  DType out = DType::kF32;
  float out_scale = 1.0f;
  DType source = DType::kF32;
  int32_t other_heads = 0;  // of a source's row, before and after those that are merged
};

// The partials of a case, as its source type keeps them.
struct Sources {
  explicit Sources(const Case& c) : o(c.sources), lse(c.sources), sinks(c.heads) {
    std::mt19937 random(11);
    std::normal_distribution<float> normal;
    for (int32_t s = 0; s < c.sources; ++s) {
      for (size_t i = 0; i < size_t(c.rows) * c.heads; ++i) {
        // Sources without keys here and there; at pair 2, all of them.
        const bool empty = (i + s) % 4 == 0 || i == 2;
        lse[s].push_back(empty ? EmptyLse<float>() : 10.0f * normal(random));
        for (int32_t d = 0; d < c.value_dim; ++d) {
          std::byte kept[sizeof(float)];
          StoreElement(c.source, kept, 0, empty ? 0.0f : normal(random));
          o[s].push_back(LoadElement(c.source, kept, 0));
        }
      }
    }
    for (float& sink : sinks) sink = 3.0f * normal(random);
  }

  ReferenceResult Expected(const Case& c) const {
    std::vector<const float*> all_o, all_lse;
    for (const std::vector<float>& of_source : o) all_o.push_back(of_source.data());
    for (const std::vector<float>& of_source : lse) all_lse.push_back(of_source.data());
    MergeParams p;
    p.o = all_o;
    p.lse = all_lse;
    p.rows = c.rows;
    p.heads = c.heads;
    p.value_dim = c.value_dim;
    p.sinks = c.sinks ? sinks.data() : nullptr;
    return ReferenceMerge(p);
  }

  std::vector<std::vector<float>> o, lse;  // [sources]
  std::vector<float> sinks;
};

// A source on the device, in rows of more heads than are merged, the others NaN.
struct DeviceSource {
  DeviceSource(const Case& c, const std::vector<float>& o, const std::vector<float>& lse)
      : pitch(c.heads + 2 * c.other_heads) {
    std::vector<std::byte> wide(c.rows * pitch * c.value_dim * SizeOf(c.source), std::byte{0xff});
    std::vector<float> wide_lse(c.rows * pitch, std::numeric_limits<float>::quiet_NaN());
    for (size_t i = 0; i < lse.size(); ++i) {
      const size_t at = i / c.heads * pitch + c.other_heads + i % c.heads;
      wide_lse[at] = lse[i];
      for (int32_t d = 0; d < c.value_dim; ++d) {
        StoreElement(c.source, wide.data(), at * c.value_dim + d, o[i * c.value_dim + d]);
      }
    }
    device_o.emplace(wide);
    device_lse.emplace(wide_lse);
  }

  size_t pitch;
  std::optional<DeviceArray<std::byte>> device_o;
  std::optional<DeviceArray<float>> device_lse;
};

struct Merged {
  std::vector<std::byte> o;
  std::vector<float> lse;
};

void Launch(const Case& c, const Sources& sources, Merged* merged) {
  const size_t pairs = size_t(c.rows) * c.heads;
  std::deque<DeviceSource> device;
  MergeArgs args;
  for (int32_t s = 0; s < c.sources; ++s) {
    const DeviceSource& source = device.emplace_back(c, sources.o[s], sources.lse[s]);
    args.o[s] = source.device_o->data() + c.other_heads * c.value_dim * SizeOf(c.source);
    args.lse[s] = source.device_lse->data() + c.other_heads;
    args.source_heads[s] = static_cast<int32_t>(source.pitch);
  }
  args.source_dtype = c.source;
  const DeviceArray<float> device_sinks(sources.sinks);
  DeviceArray<std::byte> out(pairs * c.value_dim * SizeOf(c.out));
  DeviceArray<float> lse_out(pairs);
  out.Fill(0xff);
  args.sources = c.sources;
  args.rows = c.rows;
  args.heads = c.heads;
  args.value_dim = c.value_dim;
  args.sinks = c.sinks ? device_sinks.data() : nullptr;
  args.out = c.in_place ? const_cast<void*>(args.o[0]) : static_cast<void*>(out.data());
  args.out_dtype = c.out;
  args.out_scale = c.out_scale;
  args.lse_out = c.in_place ? const_cast<float*>(args.lse[0]) : lse_out.data();
  const Status status = LaunchMerge(args, nullptr);
  ASSERT_TRUE(status.ok()) << status.message();
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  const auto get = [](auto* to, size_t count, const void* from) {
    to->resize(count);
    ASSERT_EQ(cudaMemcpy(to->data(), from, count * sizeof(*to->data()), cudaMemcpyDeviceToHost),
              cudaSuccess);
  };
  get(&merged->o, pairs * c.value_dim * SizeOf(c.out), args.out);
  get(&merged->lse, pairs, args.lse_out);
}

void ExpectMatchesReference(const Case& c) {
  SCOPED_TRACE(std::to_string(c.sources) + " sources, d" + std::to_string(c.value_dim) + ", " +
               Name(c.out) + (c.sinks ? ", sinks" : "") + (c.in_place ? ", in place" : "") +
               ", from " + Name(c.source));
  const Sources sources(c);
  Merged actual;
  ASSERT_NO_FATAL_FAILURE(Launch(c, sources, &actual));
  const ReferenceResult expected = sources.Expected(c);
  // Half a unit in the last place of each type, and what fp32 arithmetic loses.
  const double relative = c.out == DType::kFp8E4M3   ? 0.0626
                          : c.out == DType::kFp8E5M2 ? 0.1251
                          : c.out == DType::kBf16    ? 0.0040
                          : c.out == DType::kF16     ? 0.0005
                                                     : 5e-5;
  for (size_t i = 0; i < expected.o.size(); ++i) {
    const double value = LoadElement(c.out, actual.o.data(), i) * double{c.out_scale};
    ASSERT_NEAR(value, expected.o[i], relative * std::abs(expected.o[i]) + 1e-3 * relative)
        << "o[" << i << "]";
  }
  for (size_t i = 0; i < expected.lse.size(); ++i) {
    if (std::isinf(expected.lse[i])) {
      ASSERT_EQ(actual.lse[i], expected.lse[i]) << "lse[" << i << "]";
    } else {
      ASSERT_NEAR(actual.lse[i], expected.lse[i], 1e-4) << "lse[" << i << "]";
    }
  }
}

TEST(MergeTest, AnyNumberOfSources) {
  TRIBUTARY_SKIP_WITHOUT_GPU();
  for (int32_t sources : {1, 2, 3, 8, 16}) {
    for (int32_t value_dim : {64, 80, 96, 128, 192, 256}) {
      for (bool sinks : {false, true}) {
        ExpectMatchesReference({.sources = sources, .value_dim = value_dim, .sinks = sinks});
        ExpectMatchesReference(
            {.sources = sources, .value_dim = value_dim, .sinks = sinks, .in_place = true});
      }
    }
  }
}

TEST(MergeTest, EveryOutputType) {
  TRIBUTARY_SKIP_WITHOUT_GPU();
  for (DType out : {DType::kF32, DType::kBf16, DType::kF16}) ExpectMatchesReference({.out = out});
  // Scaled so that what matters is neither saturated nor subnormal.
  ExpectMatchesReference({.out = DType::kFp8E5M2, .out_scale = 1.0f / 1024});
  ExpectMatchesReference({.out = DType::kFp8E4M3, .out_scale = 1.0f / 64});
}

// One source without sinks: what is stored is the source's numbers, rounded. The CPU's bytes are
// the definition's (kernels_output_format_test).
void ExpectStoresWhatTheCpuStores(const OutputFormat& format, int32_t value_dim,
                                  const std::vector<float>& values) {
  SCOPED_TRACE(std::string(Name(format.dtype)) + " / " + std::to_string(format.scale) + ", d" +
               std::to_string(value_dim));
  constexpr int32_t kHeads = 3;
  const auto pairs = static_cast<int64_t>(values.size()) / value_dim;
  ASSERT_EQ(pairs % kHeads, 0);
  const DeviceArray<float> o(values), lse(std::vector<float>(static_cast<size_t>(pairs), 0.0f));
  std::vector<uint8_t> expected(OutputBytes(format.dtype, pairs * value_dim));
  cpu::StoreOutput(format, values.data(), values.size(), expected.data());
  DeviceArray<uint8_t> out(expected.size());
  out.Fill(0xee);
  MergeArgs args;
  args.o[0] = o.data();
  args.lse[0] = lse.data();
  args.sources = 1;
  args.rows = static_cast<int32_t>(pairs / kHeads);
  args.heads = kHeads;
  args.value_dim = value_dim;
  args.out = out.data();
  args.out_dtype = format.dtype;
  args.out_scale = format.scale;
  args.out_block_scales = out.data() + Nvfp4ScalesOffset(pairs * value_dim);
  const Status status = LaunchMerge(args, nullptr);
  ASSERT_TRUE(status.ok()) << status.message();
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  const std::vector<uint8_t> got = out.Get();
  for (size_t i = 0; i < expected.size(); ++i) {
    ASSERT_EQ(int{got[i]}, int{expected[i]}) << "byte " << i << " of " << expected.size();
  }
}

TEST(MergeTest, QuantisedOutputsHaveTheBytesOfTheCpu) {
  TRIBUTARY_SKIP_WITHOUT_GPU();
  std::mt19937 random(3);
  std::normal_distribution<float> normal;
  for (const int32_t value_dim : {64, 80, 96, 128, 192, 256}) {
    // From what vanishes to what saturates, with ties. (A merge makes -0 of a source +0.)
    std::vector<float> values;
    for (int i = 0; i < 3 * 64; ++i) {
      for (int32_t d = 0; d < value_dim; ++d) {
        const float x = std::ldexp(normal(random), i % 40 - 30);
        values.push_back(d % 7 == 0 ? std::round(4 * std::abs(x)) / 4 : x);
      }
    }
    std::fill_n(values.begin() + 5 * value_dim, 16, 0.0f);
    for (const DType dtype : {DType::kF32, DType::kBf16}) {
      ExpectStoresWhatTheCpuStores({dtype, 1.0f}, value_dim, values);
    }
    values[5] = std::numeric_limits<float>::quiet_NaN();
    values[value_dim + 3] = std::numeric_limits<float>::infinity();
    for (const DType dtype : {DType::kFp8E4M3, DType::kNvfp4}) {
      for (const float scale : {1.0f, 0.37f, 3e-4f, 1e30f}) {
        ExpectStoresWhatTheCpuStores({dtype, scale}, value_dim, values);
      }
    }
  }
}

TEST(MergeTest, EverySourceTypeAndSlicesOfHeads) {
  TRIBUTARY_SKIP_WITHOUT_GPU();
  for (DType source : {DType::kF32, DType::kBf16, DType::kF16}) {
    for (int32_t other_heads : {0, 3}) {
      ExpectMatchesReference({.sinks = true, .source = source, .other_heads = other_heads});
    }
  }
}

// A rank's slice of the heads, merged into its rows of all heads where they lie.
TEST(MergeTest, ASliceOfTheHeadsIntoAllOfThem) {
  TRIBUTARY_SKIP_WITHOUT_GPU();
  constexpr int32_t kRows = 5, kHeads = 7, kDim = 64, kBegin = 2, kCount = 3;
  std::mt19937 random(12);
  std::normal_distribution<float> normal;
  const auto draw = [&](size_t count) {
    std::vector<float> values(count);
    for (float& value : values) value = normal(random);
    return values;
  };
  const std::vector<float> all_o = draw(kRows * kHeads * kDim), all_lse = draw(kRows * kHeads);
  const std::vector<float> slice_o = draw(kRows * kCount * kDim), slice_lse = draw(kRows * kCount);
  DeviceArray<float> o(all_o), lse(all_lse);
  const DeviceArray<float> from_o(slice_o), from_lse(slice_lse);
  MergeArgs args;
  args.o[0] = args.out = o.data() + kBegin * kDim;
  args.lse[0] = args.lse_out = lse.data() + kBegin;
  args.source_heads[0] = args.out_heads = kHeads;
  args.o[1] = from_o.data();
  args.lse[1] = from_lse.data();
  args.sources = 2;
  args.rows = kRows;
  args.heads = kCount;
  args.value_dim = kDim;
  const Status status = LaunchMerge(args, nullptr);
  ASSERT_TRUE(status.ok()) << status.message();
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  const std::vector<float> got_o = o.Get(), got_lse = lse.Get();
  for (int32_t row = 0; row < kRows; ++row) {
    for (int32_t head = 0; head < kHeads; ++head) {
      const int32_t at = row * kHeads + head;
      const bool inside = head >= kBegin && head < kBegin + kCount;
      const int32_t of_slice = row * kCount + head - kBegin;
      const double a = std::exp(double{all_lse[at]});
      const double b = inside ? std::exp(double{slice_lse[of_slice]}) : 0.0;
      EXPECT_NEAR(got_lse[at], std::log(a + b), 1e-5) << row << ", " << head;
      for (int32_t d = 0; d < kDim; ++d) {
        const double other = inside ? slice_o[of_slice * kDim + d] : 0.0f;
        const double expected = (a * all_o[at * kDim + d] + b * other) / (a + b);
        ASSERT_NEAR(got_o[at * kDim + d], expected, 1e-5) << row << ", " << head << ", " << d;
      }
    }
  }
}

TEST(MergeTest, RefusesWhatItCannotMerge) {
  MergeArgs args;
  EXPECT_THAT(LaunchMerge(args, nullptr).message(), ::testing::HasSubstr("sources: 0"));
  args.sources = 17;
  EXPECT_THAT(LaunchMerge(args, nullptr).message(), ::testing::HasSubstr("sources: 17"));
  args.sources = 1;
  args.heads = 4;
  args.source_heads[0] = 2;
  args.value_dim = 64;
  EXPECT_THAT(LaunchMerge(args, nullptr).message(), ::testing::HasSubstr("source_heads[0]: 2"));
  args.source_heads[0] = 0;
  args.out_heads = 3;
  EXPECT_THAT(LaunchMerge(args, nullptr).message(), ::testing::HasSubstr("out_heads: 3"));
  args.out_heads = 0;
  args.value_dim = 6;
  EXPECT_THAT(LaunchMerge(args, nullptr).message(), ::testing::HasSubstr("value_dim: 6"));
  args.value_dim = 64;
  args.out_dtype = DType::kNvfp4;
  EXPECT_THAT(LaunchMerge(args, nullptr).message(), ::testing::HasSubstr("out_block_scales"));
}

}  // namespace
}  // namespace tributary::cuda
