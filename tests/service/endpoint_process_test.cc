// Sessions of hosts whose heads are split over endpoints, each of which is a process: what they get
// together is what calls give, and a process that is killed or stops ends the session for all.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cstdint>
#include <fstream>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "service/client/client.h"
#include "service/client/host_session.h"
#include "tests/service/endpoint_work.h"
#include "tests/service/test_service.h"
#include "tests/support/process.h"

namespace tributary::service::testing {
namespace {

using client::HostSession;
using test::ChildProcess;
using Output = std::vector<float>;

constexpr std::chrono::seconds kPatience{60};

class EndpointProcessTest : public ::testing::Test {
 protected:
  void Start(int32_t endpoints, int stop_at = -1,
             std::chrono::milliseconds wait_timeout = std::chrono::seconds(30)) {
    service_.emplace(TestService::Options{.workers = 2});
    auto client = client::Client::Connect({.target = service_->address()});
    ASSERT_TRUE(client.ok()) << client.status();
    client_ = *std::move(client);
    ASSERT_TRUE(client_->CreateCache("m", WorkSpec()).ok());
    called_ = client_->OpenSequence("m").value_or(0);
    stepped_ = client_->OpenSequence("m").value_or(0);
    auto session =
        HostSession::Open({.target = service_->address()}, {.cache_id = "m",
                                                            .max_rows = kWorkSlotRows,
                                                            .max_new_tokens = kWorkSlotRows,
                                                            .wait_timeout = wait_timeout,
                                                            .memory = v1::SESSION_MEMORY_HOST,
                                                            .endpoints = endpoints});
    ASSERT_TRUE(session.ok()) << session.status();
    session_ = *std::move(session);
    for (int32_t e = 1; e < endpoints; ++e) {
      processes_.push_back(std::make_unique<ChildProcess>(
          std::vector<std::string>{ENDPOINT_PROCESS, service_->address(),
                                   std::to_string(session_->opened().session_id()),
                                   ToHex(session_->opened().endpoint_secret()), std::to_string(e),
                                   std::to_string(stepped_), std::to_string(stop_at), Results(e)},
          directory_.File("endpoint" + std::to_string(e) + ".log")));
    }
  }
  std::string Results(int32_t endpoint) const {
    return directory_.File("results" + std::to_string(endpoint));
  }
  // What calls give for the same tokens of another sequence, of all heads.
  Output Call(int64_t position, int32_t layer, int32_t rows) {
    WorkTensors tensors(position, layer, rows);
    Output output(tensors.q.size());
    const absl::Status called = client_->Attend({.cache_id = "m",
                                                 .layer = layer,
                                                 .entries = {{called_, position, rows, rows}},
                                                 .dtype = v1::DTYPE_F32,
                                                 .q = tensors.q.data(),
                                                 .k = tensors.k.data(),
                                                 .v = tensors.v.data(),
                                                 .q_heads = kWorkQHeads,
                                                 .kv_heads = kWorkKvHeads,
                                                 .head_dim = kWorkDim,
                                                 .output = output.data()});
    EXPECT_TRUE(called.ok()) << called;
    return output;
  }
  int64_t LengthOfStepped() {
    const auto topology = service_->Topology();
    for (const auto& sequence : topology.caches(0).sequence()) {
      if (sequence.sequence_id() == stepped_) return sequence.length();
    }
    return -1;
  }

  const test::TemporaryDirectory directory_;
  std::optional<TestService> service_;
  std::unique_ptr<client::Client> client_;
  uint64_t called_ = 0;
  uint64_t stepped_ = 0;
  std::unique_ptr<HostSession> session_;                  // endpoint 0
  std::vector<std::unique_ptr<ChildProcess>> processes_;  // from endpoint 1 on
};

// Of a row [kWorkQHeads, dim], those of one endpoint.
void ExpectPart(const Output& part, const Output& all, int32_t endpoint, int32_t endpoints) {
  const size_t own = static_cast<size_t>(kWorkQHeads / endpoints * kWorkDim);
  const size_t row = static_cast<size_t>(kWorkQHeads * kWorkDim);
  ASSERT_EQ(part.size() / own, all.size() / row);
  for (size_t i = 0; i < part.size(); ++i) {
    const float want = all[i / own * row + static_cast<size_t>(endpoint) * own + i % own];
    ASSERT_NEAR(part[i], want, 1e-4f) << "endpoint " << endpoint << ", element " << i;
  }
}

TEST_F(EndpointProcessTest, TogetherTheyGetWhatCallsGive) {
  constexpr int32_t kEndpoints = 4;
  ASSERT_NO_FATAL_FAILURE(Start(kEndpoints));
  std::vector<Output> expected;
  std::vector<Output> own;
  int64_t position = 0;
  for (const int32_t rows : kWorkSteps) {
    const absl::Status done =
        DriveEndpoint(*session_, stepped_, position, rows,
                      [&own](int32_t, const Output& output) { own.push_back(output); });
    ASSERT_TRUE(done.ok()) << done;
    for (int32_t layer = 0; layer < kWorkLayers; ++layer) {
      expected.push_back(Call(position, layer, rows));
    }
    position += rows;
  }
  EXPECT_EQ(LengthOfStepped(), position);
  for (size_t i = 0; i < own.size(); ++i) ExpectPart(own[i], expected[i], 0, kEndpoints);
  for (int32_t e = 1; e < kEndpoints; ++e) {
    ASSERT_EQ(processes_[static_cast<size_t>(e - 1)]->Wait(kPatience), 0) << "endpoint " << e;
    std::ifstream file(Results(e), std::ios::binary);
    for (const Output& all : expected) {
      Output part(all.size() / kEndpoints);
      file.read(reinterpret_cast<char*>(part.data()),
                static_cast<std::streamsize>(part.size() * sizeof(float)));
      ASSERT_TRUE(file.good());
      ASSERT_NO_FATAL_FAILURE(ExpectPart(part, all, e, kEndpoints));
    }
  }
}

TEST_F(EndpointProcessTest, OneKilledInTheMidstOfAStepEndsTheSessionForAll) {
  ASSERT_NO_FATAL_FAILURE(Start(4, /*stop_at=*/1));
  const auto drive = [this](int64_t position, int32_t rows, const OnOutput& done) {
    return DriveEndpoint(*session_, stepped_, position, rows, done);
  };
  const absl::Status first = drive(0, kWorkSteps[0], [](int32_t, const Output&) {});
  ASSERT_TRUE(first.ok()) << first;
  const auto begin = std::chrono::steady_clock::now();
  const absl::Status second = drive(kWorkSteps[0], kWorkSteps[1], [this](int32_t, const Output&) {
    processes_[1]->Signal(SIGKILL);  // layer 0 is through, and layer 1 waits for all of them
  });
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(20));
  EXPECT_TRUE(absl::IsAborted(second)) << second;
  EXPECT_THAT(second.message(), ::testing::HasSubstr("endpoint 2"));
  EXPECT_EQ(processes_[1]->Wait(kPatience), -SIGKILL);
  EXPECT_EQ(LengthOfStepped(), kWorkSteps[0]);  // nothing of the second step is kept
  // Calls go on from there.
  for (int32_t layer = 0; layer < kWorkLayers; ++layer) Call(0, layer, kWorkSteps[0]);
}

// It lives and says nothing: the bound of the session ends it, and names the process.
TEST_F(EndpointProcessTest, OneThatStopsEndsTheSessionForAll) {
  ASSERT_NO_FATAL_FAILURE(Start(2, /*stop_at=*/0, std::chrono::seconds(3)));
  const absl::Status ended =
      DriveEndpoint(*session_, stepped_, 0, kWorkSteps[0], [](int32_t, const Output&) {});
  EXPECT_TRUE(absl::IsDeadlineExceeded(ended)) << ended;
  EXPECT_THAT(ended.message(), ::testing::HasSubstr("endpoint 1"));
  EXPECT_TRUE(
      test::Eventually(kPatience, [this] { return service_->Topology().sessions_size() == 0; }));
  EXPECT_EQ(LengthOfStepped(), 0);
}

}  // namespace
}  // namespace tributary::service::testing
