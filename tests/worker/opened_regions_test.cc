// Memory of other processes' GPUs, as far as it can be told without one.
#include "worker/opened_regions.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <string>

#include "base/status/errors.h"
#include "worker/cuda/input_use.h"
#include "worker/step_check.h"

namespace tributary::worker::testing {
namespace {

using ::testing::HasSubstr;

constexpr char kGpu[] = "GPU-01234567-89ab-cdef-0123-456789ABCDEF";

SharedDeviceMemory Memory(char handle = 'h', uint64_t offset = 256, uint64_t bytes = 1024) {
  return {.handle = std::string(64, handle), .offset = offset, .bytes = bytes, .gpu = kGpu};
}

// Allocations of 4096 bytes, one per handle; counts what is open.
class FakeOpener final : public RegionOpener {
 public:
  absl::StatusOr<Mapping> Open(const SharedDeviceMemory& memory) override {
    if (memory.handle[0] == '!') return InvalidField("cuda_ipc.raw_handle", "of nobody");
    std::byte* base = allocations_[memory.handle[0]];
    ++open_[base];
    return Mapping{.base = base, .bytes = 4096, .same_gpu = memory.handle[0] == 'h'};
  }
  void Close(const Mapping& mapping) override {
    EXPECT_GT(open_[mapping.base], 0);
    if (--open_[mapping.base] == 0) open_.erase(mapping.base);
  }
  std::byte* base(char handle) { return allocations_[handle]; }
  size_t open() const { return open_.size(); }

 private:
  std::map<char, std::byte[4096]> allocations_;
  std::map<std::byte*, int> open_;
};

TEST(SharedDeviceMemoryTest, BadOnesAreRefusedAndNamed) {
  EXPECT_TRUE(CheckSharedDeviceMemory(Memory()).ok());
  const auto refused = [](const SharedDeviceMemory& memory) {
    const absl::Status status = CheckSharedDeviceMemory(memory);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    return FieldOf(status);
  };
  SharedDeviceMemory memory = Memory();
  memory.handle = "short";
  EXPECT_EQ(refused(memory), "cuda_ipc.raw_handle");
  for (const char* gpu :
       {"", "0", "GPU-0123456789ab-cdef-0123-456789abcdef",
        "GPU-0123456g-89ab-cdef-0123-456789abcdef", "MIG-01234567-89ab-cdef-0123-456789abcdef"}) {
    memory = Memory();
    memory.gpu = gpu;
    EXPECT_EQ(refused(memory), "cuda_ipc.device_uuid") << gpu;
  }
  EXPECT_EQ(refused(Memory('h', 0, 0)), "byte_size");
  EXPECT_EQ(refused(Memory('h', 8)), "cuda_ipc.offset");
  EXPECT_EQ(refused(Memory('h', UINT64_MAX - 15, 32)), "cuda_ipc.offset");
}

TEST(OpenedRegionsTest, PartsLieWhereTheRegionSays) {
  FakeOpener opener;
  OpenedRegions regions(opener);
  ASSERT_TRUE(regions.Open(7, Memory('h')).ok());
  ASSERT_TRUE(regions.Open(8, Memory('p', 0, 4096)).ok());
  EXPECT_EQ(regions.Find({7, 0, 1024}).data, opener.base('h') + 256);
  EXPECT_TRUE(regions.Find({7, 0, 1024}).same_gpu);
  EXPECT_EQ(regions.Find({7, 1008, 16}).data, opener.base('h') + 256 + 1008);
  EXPECT_EQ(regions.Find({8, 64, 4}).data, opener.base('p') + 64);
  EXPECT_FALSE(regions.Find({8, 64, 4}).same_gpu);
  for (const RegionPart& outside :
       {RegionPart{7, 0, 1025}, RegionPart{7, 1024, 1}, RegionPart{7, UINT64_MAX - 15, 32},
        RegionPart{7, 4, 4}, RegionPart{9, 0, 1}, RegionPart{}}) {
    EXPECT_EQ(regions.Find(outside).data, nullptr) << outside.region << " at " << outside.offset;
  }
}

TEST(OpenedRegionsTest, OpenedOnceAndClosedOnce) {
  FakeOpener opener;
  {
    OpenedRegions regions(opener);
    ASSERT_TRUE(regions.Open(1, Memory('h')).ok());
    EXPECT_TRUE(regions.Open(1, Memory('h')).ok()) << "the command, repeated";
    EXPECT_EQ(regions.Open(1, Memory('p')).code(), absl::StatusCode::kAlreadyExists);
    EXPECT_TRUE(regions.Open(2, Memory('h', 0)).ok()) << "another part of the allocation";
    regions.Close(1);
    regions.Close(1);
    EXPECT_EQ(regions.Find({1, 0, 16}).data, nullptr);
    EXPECT_NE(regions.Find({2, 0, 16}).data, nullptr);
    EXPECT_EQ(opener.open(), 1u);
    EXPECT_TRUE(regions.Open(3, Memory('q')).ok());
  }
  EXPECT_EQ(opener.open(), 0u) << "what is left is closed at the end";
}

TEST(OpenedRegionsTest, WhatCannotBeOpenedChangesNothing) {
  FakeOpener opener;
  OpenedRegions regions(opener);
  EXPECT_EQ(FieldOf(regions.Open(1, Memory('!'))), "cuda_ipc.raw_handle");
  const absl::Status beyond = regions.Open(1, Memory('h', 4096 - 512, 528));
  EXPECT_EQ(FieldOf(beyond), "byte_size");
  EXPECT_THAT(std::string(beyond.message()), HasSubstr("4096"));
  EXPECT_EQ(regions.size(), 0u);
  EXPECT_EQ(opener.open(), 0u);
}

// ------------------------------------------------------------------------- steps that name regions

class StepRegionsTest : public ::testing::Test {
 protected:
  // One sequence of 3 rows: q of 3 x 4 x 64 bf16, k and v of 3 x 2 x 64 bf16.
  StepRegionsTest() {
    spec_.q_heads = 4;
    spec_.kv_heads = 2;
    spec_.head_dim = 64;
    spec_.layers.resize(1);
    step_.entries = {{.sequence = 1, .query_rows = 3, .new_tokens = 3}};
    step_.q = {.dtype = DType::kBf16, .bytes = 1536, .parts = {{5, 0, 1536}}};
    step_.k = {.dtype = DType::kBf16, .bytes = 768, .parts = {{5, 1536, 256}, {6, 0, 512}}};
    step_.outputs = {
        {.rows = 2, .format = {DType::kBf16}, .o = {{5, 4096, 1024}}, .lse = {{6, 512, 32}}},
        {.rows = 1, .format = {DType::kF32}, .o = {{5, 8192, 1024}}}};
  }
  absl::Status Check() const {
    return CheckStepRegions(spec_, step_, [](const RegionPart& part) {
      return (part.region == 5 || part.region == 6) && part.offset + part.bytes <= 10'000;
    });
  }

  CacheSpec spec_;
  StepCommand step_;
};

TEST_F(StepRegionsTest, SizesMustAddUp) {
  EXPECT_EQ(Check(), absl::OkStatus());
  step_.k.parts[1].bytes = 496;
  EXPECT_EQ(FieldOf(Check()), "k");
}

TEST_F(StepRegionsTest, PartsMustLieInOpenRegions) {
  step_.q.parts[0].region = 4;
  EXPECT_EQ(Check().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(FieldOf(Check()), "q");
}

TEST_F(StepRegionsTest, OutputsCoverEveryRowOnce) {
  step_.outputs[1].o.part.bytes = 512;
  EXPECT_EQ(FieldOf(Check()), "outputs[1].o");
  step_.outputs[1] = {.rows = 1, .o = {{5, 8192, 1024}}, .lse = {{5, 9216, 8}}};
  EXPECT_EQ(FieldOf(Check()), "outputs[1].lse");
  step_.outputs[1] = {.rows = 2, .o = {{5, 8192, 2048}}};
  EXPECT_EQ(FieldOf(Check()), "outputs[1].rows");
  step_.outputs[1] = {.rows = 1, .format = {DType::kFp8E5M2}, .o = {{5, 8192, 256}}};
  EXPECT_EQ(FieldOf(Check()), "outputs[1].dtype");
  step_.outputs[1] = {.rows = 1, .format = {DType::kFp8E4M3}, .o = {{5, 8192, 256}}};
  EXPECT_EQ(Check(), absl::OkStatus());
  step_.outputs[1] = {.rows = 1, .format = {DType::kNvfp4}, .o = {{5, 8192, 144}}};
  EXPECT_EQ(Check(), absl::OkStatus());
  step_.outputs[1].o.part.bytes = 128;
  EXPECT_EQ(FieldOf(Check()), "outputs[1].o") << "without its scales";
  step_.outputs.pop_back();
  EXPECT_EQ(FieldOf(Check()), "outputs");
  step_.outputs = {{.rows = 3, .lse = {{6, 512, 48}}}};
  EXPECT_EQ(Check(), absl::OkStatus()) << "the LSE alone";
}

// ---------------------------------------------------------------------------------- input_use.h

TEST(InputUseTest, InPlaceOnlyWhereKernelsMayAndGainByIt) {
  EXPECT_TRUE(MayBeReadInPlace({}));
  EXPECT_TRUE(MayBeReadInPlace({.kind = StepKind::kAppend}));
  EXPECT_TRUE(MayBeReadInPlace({.read_often = true}));
  EXPECT_TRUE(MayBeReadInPlace({.same_gpu = false}));
  EXPECT_FALSE(MayBeReadInPlace({.same_gpu = false, .read_often = true}));
  EXPECT_FALSE(MayBeReadInPlace({.parts = 2}));
  EXPECT_FALSE(MayBeReadInPlace({.padded = true}));
  EXPECT_FALSE(MayBeReadInPlace({.kind = StepKind::kPrefill}));
  EXPECT_FALSE(MayBeReadInPlace({.kind = StepKind::kDflash}));
}

}  // namespace
}  // namespace tributary::worker::testing
