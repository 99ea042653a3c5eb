#include "service/client/groups/split_call.h"

#include <gtest/gtest.h>

#include <numeric>

#include "base/status/errors.h"
#include "base/status/rpc_errors.h"

namespace tributary::client {
namespace {

// Rows of 2 heads of 16 dimensions; a row's elements are all its number.
struct Call {
  explicit Call(const std::vector<int>& rows) {
    int total = 0;
    for (size_t i = 0; i < rows.size(); ++i) {
      call.entries.push_back({i, 0, rows[i], rows[i]});
      total += rows[i];
    }
    q.resize(total * 32);
    k.resize(total * 16);
    for (int row = 0; row < total; ++row) {
      std::fill_n(q.begin() + row * 32, 32, static_cast<float>(row));
      std::fill_n(k.begin() + row * 16, 16, static_cast<float>(100 + row));
    }
    v = k;
    output.assign(total * 32, -1);
    lse.assign(total * 2, -1);
    call.q = q.data();
    call.k = k.data();
    call.v = v.data();
    call.q_heads = 2;
    call.kv_heads = 1;
    call.head_dim = 16;
    call.output = output.data();
    call.lse = lse.data();
  }
  std::vector<float> q, k, v, output, lse;
  AttendCall call;
};

// What a group would answer: its queries, and the first element of each row and head.
void Answer(const AttendCall& part) {
  int64_t rows = 0;
  for (const AttendEntry& entry : part.entries) rows += entry.query_rows;
  const auto* q = static_cast<const float*>(part.q);
  std::copy_n(q, rows * 32, static_cast<float*>(part.output));
  for (int64_t i = 0; i < rows * 2; ++i) part.lse[i] = q[i * 16];
}

TEST(SplitCallTest, EntriesSideBySideStayWhereTheyAre) {
  Call whole({2, 1, 3});
  const auto parts = Split(whole.call, {1, 1, 0});
  ASSERT_TRUE(parts.ok());
  ASSERT_EQ(parts->size(), 2u);
  EXPECT_EQ((*parts)[0]->group(), 1u);
  EXPECT_EQ((*parts)[0]->call().q, whole.q.data());
  EXPECT_EQ((*parts)[1]->call().q, whole.q.data() + 3 * 32);
  EXPECT_EQ((*parts)[1]->call().k, whole.k.data() + 3 * 16);
  EXPECT_EQ((*parts)[1]->call().output, whole.output.data() + 3 * 32);
  EXPECT_EQ((*parts)[1]->call().lse, whole.lse.data() + 3 * 2);
}

TEST(SplitCallTest, ResultsOfScatteredEntriesComeToTheirPlaces) {
  Call whole({2, 1, 3, 1});
  const auto parts = Split(whole.call, {0, 1, 0, 1});
  ASSERT_TRUE(parts.ok());
  ASSERT_EQ(parts->size(), 2u);
  const AttendCall& second = (*parts)[1]->call();
  ASSERT_EQ(second.entries.size(), 2u);
  EXPECT_EQ(second.entries[1].sequence_id, 3u);
  EXPECT_EQ(static_cast<const float*>(second.k)[0], 102);
  EXPECT_EQ(static_cast<const float*>(second.v)[16], 106);
  for (const auto& part : *parts) {
    Answer(part->call());
    part->GiveResults(whole.call);
  }
  EXPECT_EQ(whole.output, whole.q);
  for (size_t i = 0; i < whole.lse.size(); ++i) EXPECT_EQ(whole.lse[i], whole.q[i * 16]);
}

TEST(SplitCallTest, ScalesOfNvfp4LieBehindAllElements) {
  Call whole({1, 1, 1});
  std::vector<uint8_t> output(3 * 18), expected(3 * 18);
  for (int row = 0; row < 3; ++row) {
    std::fill_n(expected.begin() + row * 16, 16, 10 + row);
    std::fill_n(expected.begin() + 48 + row * 2, 2, 20 + row);
  }
  whole.call.output_dtype = v1::DTYPE_NVFP4;
  whole.call.output = output.data();
  const auto parts = Split(whole.call, {0, 1, 0});
  ASSERT_TRUE(parts.ok());
  for (const auto& part : *parts) {
    const auto rows = part->call().entries.size();
    auto* bytes = static_cast<uint8_t*>(part->call().output);
    for (size_t i = 0; i < rows; ++i) {
      const auto row = static_cast<int>(part->call().entries[i].sequence_id);
      std::fill_n(bytes + i * 16, 16, 10 + row);
      std::fill_n(bytes + rows * 16 + i * 2, 2, 20 + row);
    }
    part->GiveResults(whole.call);
  }
  EXPECT_EQ(output, expected);
}

TEST(SplitCallTest, ErrorsNameTheEntryOfTheWholeCall) {
  Call whole({1, 1, 1});
  const auto parts = Split(whole.call, {0, 1, 0});
  ASSERT_TRUE(parts.ok());
  const absl::Status error = (*parts)[0]->Renamed(BeyondEnd(EntryField(1, "first_position"), 9, 4));
  EXPECT_EQ(FieldOf(error), "entries[2].first_position");
  EXPECT_EQ(LengthOf(error), 4);
  EXPECT_NE(error.message().find("entries[2].first_position"), std::string::npos) << error;
  EXPECT_EQ(error.message().find("entries[1]"), std::string::npos) << error;
  const absl::Status other = InvalidField("q", "is missing");
  EXPECT_EQ((*parts)[0]->Renamed(other), other);
  EXPECT_TRUE((*parts)[0]->Renamed(absl::OkStatus()).ok());
}

class Region final : public DeviceRegion {
 public:
  const std::string& name() const override { return name_; }
  const DeviceMemory& memory() const override { return memory_; }

 private:
  const std::string name_ = "r";
  const DeviceMemory memory_;
};

TEST(SplitCallTest, TensorsOfADeviceAreCutInRuns) {
  Call whole({1, 1, 1});
  whole.call.device = std::make_shared<Region>();
  const auto parts = Split(whole.call, {0, 1, 0});
  ASSERT_TRUE(parts.ok());
  ASSERT_EQ(parts->size(), 3u);
  EXPECT_EQ((*parts)[2]->group(), 0u);
  EXPECT_EQ((*parts)[2]->call().q, whole.q.data() + 2 * 32);
  EXPECT_EQ((*parts)[2]->call().output, whole.output.data() + 2 * 32);
  whole.call.output_dtype = v1::DTYPE_NVFP4;
  EXPECT_EQ(FieldOf(Split(whole.call, {0, 1, 0}).status()), "output_dtype");
}

TEST(SplitCallTest, AppendsAreSplitTheSameWay) {
  std::vector<float> k(4 * 16);
  for (int i = 0; i < 4; ++i) std::fill_n(k.begin() + i * 16, 16, static_cast<float>(i));
  AppendCall call{.cache_id = "m", .entries = {{7, 0, 1}, {8, 0, 2}, {9, 0, 1}}};
  call.k = call.v = k.data();
  call.kv_heads = 1;
  call.head_dim = 16;
  const auto parts = Split(call, {0, 1, 0});
  ASSERT_EQ(parts.size(), 2u);
  EXPECT_EQ(static_cast<const float*>(parts[0]->call().k)[16], 3);
  EXPECT_EQ(parts[1]->call().k, k.data() + 16);
  EXPECT_EQ(FieldOf(parts[0]->Renamed(InvalidField(EntryField(1, "tokens"), "x"))),
            "entries[2].tokens");
}

}  // namespace
}  // namespace tributary::client
