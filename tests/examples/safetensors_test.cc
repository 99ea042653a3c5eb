#include "examples/tinylm/safetensors.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdint>
#include <fstream>
#include <ostream>
#include <string>
#include <vector>

namespace tributary::tinylm {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

// A file of `header` and `data`, its header length as given or true.
std::string Write(const std::string& header, const std::string& data, int64_t length = -1) {
  // Tests of one binary may run at the same time.
  const std::string path = testing::TempDir() + std::to_string(getpid()) + ".safetensors";
  const uint64_t size = length < 0 ? header.size() : static_cast<uint64_t>(length);
  std::ofstream file(path, std::ios::binary);
  file.write(reinterpret_cast<const char*>(&size), sizeof(size));
  file << header << data;
  return path;
}

std::string Bytes(const std::vector<uint16_t>& values) {
  return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(uint16_t)};
}

TEST(Safetensors, ReadsBf16AndIgnoresMetadata) {
  const std::string path = Write(
      R"({"__metadata__":{"format":"pt"},"w":{"dtype":"BF16","shape":[2,1],"data_offsets":[0,4]}})",
      Bytes({0x3f80, 0xc000}));
  const auto file = Safetensors::Read(path);
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_EQ(file->size(), 1u);
  const auto values = file->Floats("w", {2, -1});
  ASSERT_TRUE(values.ok()) << values.status();
  EXPECT_THAT(*values, ElementsAre(1.0f, -2.0f));
}

TEST(Safetensors, NamesTheTensorItCannotGive) {
  const std::string path = Write(R"({"w":{"dtype":"F16","shape":[2],"data_offsets":[0,4]},)"
                                 R"("x":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}})",
                                 Bytes({0, 0}));
  const auto file = Safetensors::Read(path);
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_EQ(file->Floats("v", {2}).status().code(), absl::StatusCode::kNotFound);
  const absl::Status shape = file->Floats("w", {3}).status();
  EXPECT_EQ(shape.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(shape.message()), HasSubstr("w has shape [2], not [3]"));
  const absl::Status dtype = file->Floats("x", {4}).status();
  EXPECT_EQ(dtype.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(dtype.message()), HasSubstr("U8"));
}

struct Broken {
  const char* what;
  const char* header;
  int64_t length = -1;
};

void PrintTo(const Broken& broken, std::ostream* out) { *out << broken.what; }

class MalformedSafetensors : public testing::TestWithParam<Broken> {};

TEST_P(MalformedSafetensors, IsRefused) {
  const auto file = Safetensors::Read(Write(GetParam().header, Bytes({0, 0}), GetParam().length));
  EXPECT_EQ(file.status().code(), absl::StatusCode::kInvalidArgument) << GetParam().what;
}

INSTANTIATE_TEST_SUITE_P(
    Headers, MalformedSafetensors,
    testing::Values(
        Broken{"longer than the file", "{}", 1000}, Broken{"length overflows", "{}", INT64_MAX},
        Broken{"not JSON", "{\"w\":"}, Broken{"not an object", "[1]"},
        Broken{"no dtype", R"({"w":{"shape":[2],"data_offsets":[0,4]}})"},
        Broken{"range beyond the file",
               R"({"w":{"dtype":"F16","shape":[3],"data_offsets":[0,6]}})"},
        Broken{"range backwards", R"({"w":{"dtype":"F16","shape":[0],"data_offsets":[4,2]}})"},
        Broken{"range of one number", R"({"w":{"dtype":"F16","shape":[2],"data_offsets":[4]}})"},
        Broken{"fewer bytes than the shape",
               R"({"w":{"dtype":"F16","shape":[2],"data_offsets":[0,2]}})"},
        Broken{"negative extent", R"({"w":{"dtype":"F16","shape":[-2],"data_offsets":[0,4]}})"},
        Broken{"product overflows", R"({"w":{"dtype":"F16","shape":[4294967296,4294967298],)"
                                    R"("data_offsets":[0,4]}})"}));

TEST(Safetensors, MissingFileIsNotFound) {
  EXPECT_EQ(Safetensors::Read("/nonexistent/model.safetensors").status().code(),
            absl::StatusCode::kNotFound);
}

}  // namespace
}  // namespace tributary::tinylm
