// The known answer: given by a service that works, and missed by one that loses a shard.
#include "service/cli/self_check.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/half.h"
#include "service/embedded/embedded_service.h"

namespace tributary::cli {
namespace {

using ::testing::_;
using ::testing::NiceMock;
using ::testing::Return;

class MockClient : public client::Client {
 public:
  MOCK_METHOD(std::unique_ptr<Client>, WithTimeout, (std::chrono::milliseconds), (override));
  MOCK_METHOD(absl::StatusOr<v1::CreateCacheReply>, CreateCache,
              (const std::string&, const v1::CacheSpec&), (override));
  MOCK_METHOD(absl::Status, DeleteCache, (const std::string&), (override));
  MOCK_METHOD(absl::StatusOr<uint64_t>, OpenSequence, (const std::string&), (override));
  MOCK_METHOD(absl::Status, ReopenSequence, (const std::string&, uint64_t), (override));
  MOCK_METHOD(absl::StatusOr<uint64_t>, ForkSequence,
              (const std::string&, uint64_t, std::optional<int64_t>), (override));
  MOCK_METHOD(absl::StatusOr<int64_t>, TruncateSequence, (const std::string&, uint64_t, int64_t),
              (override));
  MOCK_METHOD(absl::Status, CloseSequence, (const std::string&, uint64_t), (override));
  MOCK_METHOD(absl::StatusOr<std::vector<uint64_t>>, UpdateSequences,
              (const std::string&, const std::vector<client::SequenceUpdate>&), (override));
  MOCK_METHOD(absl::StatusOr<std::shared_ptr<client::SharedBuffer>>, AllocateShared, (uint64_t),
              (override));
  MOCK_METHOD(absl::Status, Append, (const client::AppendCall&), (override));
  MOCK_METHOD(absl::Status, Attend, (const client::AttendCall&), (override));
  MOCK_METHOD(uint64_t, AttendAsync, (const client::AttendCall&, std::function<void(absl::Status)>),
              (override));
  MOCK_METHOD(void, Cancel, (uint64_t), (override));
  MOCK_METHOD(absl::StatusOr<std::shared_ptr<const client::DeviceRegion>>, ShareDeviceMemory,
              (const client::DeviceMemory&), (override));
  MOCK_METHOD(absl::Status, UnshareDeviceMemory, (const client::DeviceRegion&), (override));
  MOCK_METHOD(absl::StatusOr<std::vector<v1::LeasedSequence>>, LeasedSequences, (), (override));
  MOCK_METHOD(absl::StatusOr<v1::GetTopologyReply>, GetTopology, (const v1::GetTopologyRequest&),
              (override));
  MOCK_METHOD(absl::StatusOr<v1::GetLimitsReply>, GetLimits, (), (override));
  MOCK_METHOD(absl::StatusOr<std::string>, TargetOf, (uint64_t), (const, override));
};

constexpr int kRanks = 4;
constexpr int kPage = 16;

// Answers with the mean of the values 1..4 of the ranks, as if of `counted` tokens.
std::unique_ptr<NiceMock<MockClient>> ServiceThatCounts(int counted, double mean) {
  auto client = std::make_unique<NiceMock<MockClient>>();
  v1::CreateCacheReply created;
  created.set_ranks(kRanks);
  created.set_backend("mock");
  created.mutable_spec()->set_page_size(kPage);
  ON_CALL(*client, CreateCache).WillByDefault(Return(created));
  ON_CALL(*client, OpenSequence).WillByDefault(Return(7));
  ON_CALL(*client, Attend).WillByDefault([=](const client::AttendCall& call) {
    const bool first = call.entries[0].first_position == 0;
    const float output = first ? 1.0F : static_cast<float>(mean);
    auto* const out = static_cast<uint16_t*>(call.output);
    std::fill_n(out, call.q_heads * call.head_dim, Bf16FromFloat(output));
    std::fill_n(call.lse, call.q_heads, first ? 0.0F : std::log(static_cast<float>(counted)));
    return absl::OkStatus();
  });
  return client;
}

TEST(SelfCheck, WorkingServicesPass) {
  for (const int workers : {1, 3}) {
    const auto service = service::EmbeddedService::Start({.workers = workers, .threads = 1});
    ASSERT_TRUE(service.ok()) << service.status();
    const auto client = client::Client::Connect({.target = (*service)->target()});
    ASSERT_TRUE(client.ok()) << client.status();
    const auto check = RunSelfCheck(**client);
    ASSERT_TRUE(check.ok()) << check.status();
    EXPECT_EQ(check->ranks, workers);
    EXPECT_EQ(check->findings.size(), 4);
    for (const Finding& finding : check->findings) {
      EXPECT_TRUE(finding.good) << finding.what << ": " << finding.found << ", not "
                                << finding.expected;
    }
    const auto topology = (*client)->GetTopology({});
    ASSERT_TRUE(topology.ok());
    EXPECT_EQ(topology->caches_size(), 0) << "the cache is deleted";
  }
}

TEST(SelfCheck, AcceptsTheKnownAnswer) {
  const auto check = RunSelfCheck(*ServiceThatCounts(kRanks * kPage, 2.5));
  ASSERT_TRUE(check.ok());
  EXPECT_TRUE(check->good());
}

TEST(SelfCheck, AMissingShardShows) {
  const auto check = RunSelfCheck(*ServiceThatCounts((kRanks - 1) * kPage, 3.0));
  ASSERT_TRUE(check.ok());
  EXPECT_FALSE(check->good());
  EXPECT_TRUE(check->findings[0].good);
  EXPECT_FALSE(check->findings[2].good) << "output";
  EXPECT_FALSE(check->findings[3].good) << "LSE";
}

TEST(SelfCheck, ATokenCountedTwiceShows) {
  const auto check = RunSelfCheck(*ServiceThatCounts(kRanks * kPage + 1, 2.5));
  ASSERT_TRUE(check.ok());
  EXPECT_FALSE(check->good());
}

TEST(SelfCheck, RefusalsArePassedOnAndTheCacheIsDeleted) {
  auto client = ServiceThatCounts(kRanks * kPage, 2.5);
  EXPECT_CALL(*client, Append).WillOnce(Return(absl::ResourceExhaustedError("no pages")));
  EXPECT_CALL(*client, DeleteCache(_)).WillOnce(Return(absl::OkStatus()));
  EXPECT_EQ(RunSelfCheck(*client).status().code(), absl::StatusCode::kResourceExhausted);
}

TEST(SelfCheck, NanIsNeverGood) {
  EXPECT_FALSE(Judge("x", 1, std::numeric_limits<double>::quiet_NaN(), 1e9).good);
  EXPECT_TRUE(Judge("x", 1, 1.5, 0.5).good);
  EXPECT_FALSE(Judge("x", 1, 1.5, 0.4).good);
}

}  // namespace
}  // namespace tributary::cli
