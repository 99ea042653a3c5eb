#include "service/cli/load.h"

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "service/cli/bench_report.h"
#include "service/client/client.h"
#include "service/embedded/embedded_service.h"

namespace tributary::cli {
namespace {

using ::testing::HasSubstr;
using ::testing::IsSupersetOf;
using ::testing::Not;

class LoadTest : public ::testing::Test {
 protected:
  LoadTest() {
    auto service = service::EmbeddedService::Start({.workers = 2, .threads = 2});
    EXPECT_TRUE(service.ok()) << service.status();
    service_ = *std::move(service);
    options_.target = service_->target();
    options_.sequences = 4;
    options_.batch = 2;
    options_.context = 300;
    options_.q_heads = 4;
    options_.kv_heads = 2;
    options_.head_dim = 64;
    options_.shared_memory_bytes = 4 << 20;
    options_.warmup = std::chrono::milliseconds(0);
    options_.duration = std::chrono::milliseconds(200);
  }
  absl::StatusOr<LoadResult> Run() {
    return RunLoad(options_, stop_,
                   [this](const std::string& what, double done, const std::string&) {
                     EXPECT_GE(done, 0);
                     EXPECT_LE(done, 1);
                     if (told_.empty() || told_.back() != what) told_.push_back(what);
                   });
  }
  int CachesLeft() {
    auto client = client::Client::Connect({.target = service_->target()});
    return (*(*client)->GetTopology({})).caches_size();
  }

  std::unique_ptr<service::EmbeddedService> service_;
  LoadOptions options_;
  std::atomic<bool> stop_{false};
  std::vector<std::string> told_;  // what a progress bar would have named
};

TEST_F(LoadTest, MeasuresAndCleansUp) {
  for (const bool shared_memory : {true, false}) {
    if (!shared_memory) options_.shared_memory_bytes = 0;
    auto result = Run();
    ASSERT_TRUE(result.ok()) << result.status();
    EXPECT_TRUE(result->errors.empty()) << result->first_error;
    EXPECT_GT(result->requests, 0u);
    EXPECT_EQ(result->request_latency.count(), result->requests);
    EXPECT_EQ(result->step_latency.count(), result->steps);
    EXPECT_EQ(result->tokens, result->steps * 2);
    // At least the context's K and V, fp8, for each sequence of the batch.
    EXPECT_GE(result->kv_bytes_read, static_cast<double>(result->requests) * 2 * 300 * 2 * 2 * 64);
    EXPECT_EQ(CachesLeft(), 0);
    const std::string report = BenchReport(options_, *result, true, Style(false));
    for (const char* part : {" p50 ", " p90 ", " p99 ", " p99.9 ", "tokens/s", "no errors"}) {
      EXPECT_THAT(report, HasSubstr(part));
    }
    const std::string json = BenchJson(options_, *result);
    for (const char* member : {"p50", "p90", "p99", "p99.9", "tokens_per_second"}) {
      EXPECT_THAT(json, HasSubstr("\"" + std::string(member) + "\": "));
    }
    EXPECT_THAT(told_, IsSupersetOf({"filling", "running"}));
    told_.clear();
  }
}

TEST_F(LoadTest, SessionsMeasureTheSame) {
  options_.session = true;
  options_.layers = 3;
  options_.context = 16;
  options_.rows = 2;
  options_.duration = std::chrono::milliseconds(500);  // several windows
  const auto result = Run();
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_TRUE(result->errors.empty()) << result->first_error;
  EXPECT_GT(result->steps, 0u);
  EXPECT_EQ(result->tokens, result->steps * 4);
  EXPECT_EQ(CachesLeft(), 0);
  LoadResult shown = *result;
  EXPECT_THAT(BenchReport(options_, shown, true, Style(false)), HasSubstr(", session"));
  EXPECT_THAT(BenchJson(options_, shown), HasSubstr("\"session\": true"));
}

TEST_F(LoadTest, StepsLargerThanASlotGoInPieces) {
  options_.session = true;
  options_.context = 16;
  options_.rows = 20;
  options_.slot_rows = 8;
  for (const v1::SessionMemory memory : {v1::SESSION_MEMORY_HOST, v1::SESSION_MEMORY_MESSAGES}) {
    options_.session_memory = memory;
    const auto result = Run();
    ASSERT_TRUE(result.ok()) << result.status();
    EXPECT_TRUE(result->errors.empty()) << result->first_error;
    EXPECT_GT(result->steps, 0u);
    EXPECT_TRUE(result->breakdown.empty());
  }
}

// CPU workers have no mailbox on a GPU. (A build without CUDA says so, too.)
TEST_F(LoadTest, SessionsOnGpusNeedThem) {
  options_.session = true;
  options_.session_memory = v1::SESSION_MEMORY_DEVICE;
  const auto result = Run();
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->steps, 0u);
  EXPECT_FALSE(result->errors.empty());
}

TEST_F(LoadTest, RollsBackWhenItsWindowIsFull) {
  options_.rows = 4;
  options_.layers = 1;
  options_.context = 16;
  options_.duration = std::chrono::milliseconds(500);
  const auto result = Run();
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_TRUE(result->errors.empty()) << result->first_error;
}

TEST_F(LoadTest, StopsWhenAsked) {
  stop_ = true;
  options_.duration = std::chrono::hours(1);
  const auto result = Run();
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->requests, 0u);
  EXPECT_EQ(CachesLeft(), 0);
}

TEST_F(LoadTest, RefusalsAreReported) {
  options_.head_dim = 63;
  const auto result = Run();
  EXPECT_TRUE(absl::IsInvalidArgument(result.status())) << result.status();
  EXPECT_EQ(CachesLeft(), 0);
}

TEST(BenchReport, ShowsWhereTheTimeOfALayerWent) {
  LoadResult result;
  EXPECT_THAT(BenchReport({}, result, true, Style(false)), Not(HasSubstr("ring seen")));
  EXPECT_THAT(BenchJson({}, result), HasSubstr("\"breakdown_seconds\": {}"));
  for (int i = 0; i < 3; ++i) {
    result.breakdown.Add({.fill = 1e-6,
                          .ring_seen = 2e-6,
                          .attention = 30e-6,
                          .exchange = 4e-6,
                          .ring_back = 5e-6,
                          .wait = 41e-6});
  }
  const std::string report = BenchReport({}, result, true, Style(false));
  for (const char* phase : {"fill", "ring seen", "attention", "exchange", "ring back", "wait"}) {
    EXPECT_THAT(report, HasSubstr(phase));
  }
  EXPECT_THAT(BenchJson({}, result), HasSubstr("\"ring_seen\": {\"count\": 3, "));
}

TEST(CheckLoad, NamesTheFlag) {
  const LoadOptions on_host{.session = true, .breakdown = true};
  EXPECT_THAT(std::string(CheckLoad(on_host).message()), HasSubstr("--breakdown"));
  EXPECT_THAT(std::string(CheckLoad({.slot_rows = -1}).message()), HasSubstr("--slot_rows"));

  EXPECT_THAT(std::string(CheckLoad({.sequences = 3, .batch = 2}).message()),
              HasSubstr("--sequences"));
  EXPECT_THAT(std::string(CheckLoad({.connections = 0}).message()), HasSubstr("--connections"));
  EXPECT_EQ(CheckLoad({}), absl::OkStatus());
}

}  // namespace
}  // namespace tributary::cli
