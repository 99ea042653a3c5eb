// A real coordinator with two real workers: what they export is what docs/metrics.md lists, and it
// moves when something happens.
#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <memory>
#include <vector>

#include "tests/fault/load.h"
#include "tests/fault/programs.h"
#include "tests/observe/scrape.h"
#include "tests/support/http.h"

namespace tributary::test {
namespace {

using ::testing::Contains;
using ::testing::Key;

constexpr std::chrono::seconds kPatience{60};
constexpr int kRanks = 2;

class MetricsTest : public ::testing::Test {
 protected:
  void SetUp() override {
    coordinator_ = StartCoordinator(directory_, kRanks, {"--metrics-port=0"});
    for (int rank = 0; rank < kRanks; ++rank) {
      workers_.push_back(
          StartWorker(directory_, WorkerAddress(directory_), rank, {"--metrics_port=0"}));
    }
    stub_ = ConnectTo(PublicAddress(directory_));
    ASSERT_TRUE(Eventually(
        kPatience, [&] { return coordinator_->Log().find(" ready") != std::string::npos; }));
  }

  // A page of the program's own.
  static Page Scrape(ChildProcess& process) {
    const int port = MetricsPort(process.Log());
    EXPECT_NE(port, 0) << process.Log();
    return ParsePage(HttpGet(port, "/metrics"));
  }

  grpc::Status CreateCache() {
    v1::CreateCacheRequest request;
    request.set_cache_id(kCacheId);
    *request.mutable_spec() = PublicSpec();
    grpc::ClientContext context;
    v1::CreateCacheReply reply;
    return stub_->CreateCache(&context, request, &reply);
  }

  const TemporaryDirectory directory_;
  std::unique_ptr<ChildProcess> coordinator_;
  std::vector<std::unique_ptr<ChildProcess>> workers_;
  std::shared_ptr<v1::AttentionService::Stub> stub_;
};

TEST_F(MetricsTest, WhatIsExportedIsWhatIsDocumented) {
  // The second page: the exporter's own metrics begin with the first.
  Scrape(*coordinator_);
  EXPECT_EQ(Scrape(*coordinator_).families, DocumentedMetrics({"Coordinator", "Both"}));
  Scrape(*workers_[0]);
  EXPECT_EQ(Scrape(*workers_[0]).families, DocumentedMetrics({"Worker", "Both"}));
}

TEST_F(MetricsTest, CallsAndStepsAreCounted) {
  ASSERT_TRUE(CreateCache().ok());
  SequenceHost host(stub_, 7);
  ASSERT_TRUE(host.Open().ok());
  for (int step = 0; step < 5; ++step) ASSERT_TRUE(host.Step(3).ok());
  SequenceHost unknown(stub_, 8);
  EXPECT_EQ(unknown.Step(1).error_code(), grpc::StatusCode::NOT_FOUND);

  // A step is counted just after its callers have their replies.
  Page page;
  ASSERT_TRUE(Eventually(kPatience, [&] {
    page = Scrape(*coordinator_);
    return page.samples["tributary_steps_total{outcome=\"done\"}"] == 5;
  }));
  const auto& of = page.samples;
  EXPECT_EQ(of.at("tributary_rpc_requests_total{method=\"Attend\",code=\"OK\"}"), 5);
  EXPECT_EQ(of.at("tributary_rpc_requests_total{method=\"Attend\",code=\"NOT_FOUND\"}"), 1);
  EXPECT_EQ(of.at("tributary_rpc_duration_seconds_count{method=\"Attend\"}"), 6);
  EXPECT_EQ(of.at("tributary_rpc_in_flight{method=\"Attend\"}"), 0);
  EXPECT_GT(of.at("tributary_rpc_received_bytes_total{method=\"Attend\"}"), 0);
  for (const char* phase : {"queue", "build", "plan", "append", "attend", "exchange", "reply"}) {
    EXPECT_EQ(
        of.at("tributary_step_phase_duration_seconds_count{phase=\"" + std::string(phase) + "\"}"),
        5)
        << phase;
  }
  EXPECT_EQ(of.at("tributary_step_duration_seconds_count"), 5);
  EXPECT_EQ(of.at("tributary_step_rows_sum"), 15);
  EXPECT_EQ(of.at("tributary_tokens_appended_total"), 15);
  EXPECT_EQ(of.at("tributary_rank_skew_seconds_count"), 5);
  EXPECT_EQ(of.at("tributary_rank_slowest_steps_total{rank=\"0\"}") +
                of.at("tributary_rank_slowest_steps_total{rank=\"1\"}"),
            5);
  EXPECT_EQ(of.at("tributary_kv_sequences"), 1);
  EXPECT_EQ(of.at("tributary_kv_pages{state=\"used\"}"), 1);
  EXPECT_EQ(of.at("tributary_group_ready"), 1);
  EXPECT_EQ(of.at("tributary_worker_up{rank=\"1\"}"), 1);

  Page worker;
  ASSERT_TRUE(Eventually(kPatience, [&] {
    worker = Scrape(*workers_[1]);
    return worker.samples["tributary_worker_steps_total{outcome=\"done\"}"] == 5;
  }));
  EXPECT_EQ(worker.samples.at("tributary_worker_rank"), 1);
  EXPECT_EQ(worker.samples.at("tributary_worker_ready"), 1);
  EXPECT_GT(worker.samples.at("tributary_worker_shard_bytes"), 0);
  EXPECT_EQ(
      worker.samples.at("tributary_worker_step_phase_duration_seconds_count{phase=\"attend\"}"), 5);
}

TEST_F(MetricsTest, ALostWorkerShows) {
  const double epoch = Scrape(*coordinator_).samples["tributary_group_epoch"];
  workers_[1]->Signal(SIGKILL);
  Page page;
  EXPECT_TRUE(Eventually(kPatience, [&] {
    page = Scrape(*coordinator_);
    return page.samples["tributary_group_breaks_total"] == 1;
  }));
  EXPECT_EQ(page.samples["tributary_worker_up{rank=\"1\"}"], 0);
  EXPECT_EQ(page.samples["tributary_group_ready"], 0);
  workers_[1] = StartWorker(directory_, WorkerAddress(directory_), 1);
  EXPECT_TRUE(Eventually(kPatience, [&] {
    page = Scrape(*coordinator_);
    return page.samples["tributary_group_ready"] == 1;
  }));
  EXPECT_GT(page.samples["tributary_group_epoch"], epoch);
  EXPECT_EQ(page.samples["tributary_group_formations_total"], 2);
}

TEST_F(MetricsTest, APortInUseIsSaid) {
  const std::string port = std::to_string(MetricsPort(coordinator_->Log()));
  const TemporaryDirectory other;
  const auto second = StartCoordinator(other, 1, {"--metrics-port=" + port});
  EXPECT_EQ(second->Wait(kPatience), 1);
  EXPECT_THAT(second->Log(), ::testing::HasSubstr("cannot serve metrics at 127.0.0.1:" + port));
}

}  // namespace
}  // namespace tributary::test
