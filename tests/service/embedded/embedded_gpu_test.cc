// A host whose GPU drives the layers, and its service, within one process.
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cmath>
#include <cstdint>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "service/client/client.h"
#include "service/client/cuda/device_session.h"
#include "service/embedded/embedded_service.h"
#include "tests/support/process.h"
#include "worker/cuda_backend.h"

namespace tributary::service {
namespace {

const bool kEnvironmentIsSet = (worker::SetCudaEnvironment(), true);

constexpr int32_t kHeads = 4;
constexpr int32_t kDim = 64;
constexpr int32_t kLayers = 2;

class EmbeddedGpu : public ::testing::Test {
 protected:
  void SetUp() override {
    int gpus = 0;
    if (cudaGetDeviceCount(&gpus) != cudaSuccess || gpus == 0) GTEST_SKIP() << "no GPU";
    auto service = EmbeddedService::Start(
        {.socket = directory_.File("socket"), .device = worker::Device::kCuda});
    ASSERT_TRUE(service.ok()) << service.status();
    service_ = *std::move(service);
    connect_.target = service_->target();
    auto client = client::Client::Connect(connect_);
    ASSERT_TRUE(client.ok()) << client.status();
    client_ = *std::move(client);
    ASSERT_EQ(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), cudaSuccess);
    ASSERT_EQ(cudaMalloc(&rows_, kBytes), cudaSuccess);
    ASSERT_EQ(cudaMemset(rows_, 0, kBytes), cudaSuccess);
    ASSERT_EQ(cudaMalloc(&output_, kBytes), cudaSuccess);
  }
  void TearDown() override {
    cudaFree(rows_);
    cudaFree(output_);
    if (stream_ != nullptr) cudaStreamDestroy(stream_);
  }

  void CreateCache() {
    v1::CacheSpec spec;
    spec.set_layers(kLayers);
    spec.set_q_heads(kHeads);
    spec.set_kv_heads(kHeads);
    spec.set_head_dim(kDim);
    spec.set_capacity_tokens(256);
    const auto cache = client_->CreateCache("c", spec);
    ASSERT_TRUE(cache.ok()) << cache.status();
  }
  absl::StatusOr<std::unique_ptr<client::DeviceSession>> Open() {
    return client::DeviceSession::Open(connect_,
                                       {.cache_id = "c", .max_rows = 1, .max_new_tokens = 1});
  }
  // Launches the layers of a step of one row of zeros.
  absl::Status Launch(client::DeviceSession& session) {
    const client::HeadRows rows{
        .data = rows_, .rows = 1, .heads = kHeads, .dim = kDim, .row_stride = kHeads * kDim};
    client::SessionLayer layer{.q = rows, .k = rows, .v = rows, .output = rows};
    layer.output.data = output_;
    for (int32_t i = 0; i < kLayers; ++i) {
      if (const absl::Status launched = session.Attend(stream_, layer); !launched.ok()) {
        return launched;
      }
    }
    return absl::OkStatus();
  }
  // The first element of the output, in bf16.
  float FirstOfOutput() {
    uint16_t bits = 0;
    EXPECT_EQ(cudaMemcpy(&bits, output_, sizeof(bits), cudaMemcpyDeviceToHost), cudaSuccess);
    return (bits & 0x7fff) > 0x7f80 ? NAN : static_cast<float>(bits);
  }

  static constexpr size_t kBytes = size_t{kHeads} * kDim * sizeof(uint16_t);
  const test::TemporaryDirectory directory_;
  client::ConnectOptions connect_;
  std::unique_ptr<EmbeddedService> service_;
  std::unique_ptr<client::Client> client_;
  cudaStream_t stream_ = nullptr;
  void* rows_ = nullptr;
  void* output_ = nullptr;
};

// The service gives the session's memory back when it ends, and the host still has its address.
TEST_F(EmbeddedGpu, AHostMayLaunchLayersOfASessionThatTheServiceHasEnded) {
  CreateCache();
  const auto sequence = client_->OpenSequence("c");
  ASSERT_TRUE(sequence.ok()) << sequence.status();
  auto session = Open();
  ASSERT_TRUE(session.ok()) << session.status();
  const auto step = (*session)->Submit(
      {.layers = kLayers,
       .entries = {{.sequence_id = *sequence, .query_rows = 1, .new_tokens = 1}}});
  ASSERT_TRUE(step.ok()) << step.status();
  ASSERT_TRUE(Launch(**session).ok());
  ASSERT_TRUE((*session)->Await(*step).ok());
  ASSERT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);
  EXPECT_EQ(FirstOfOutput(), 0);

  ASSERT_TRUE(client_->DeleteCache("c").ok());
  const auto patience = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  while ((*session)->status().ok() && std::chrono::steady_clock::now() < patience) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  EXPECT_FALSE((*session)->status().ok());
  // Long enough for the service to have dropped its share.
  std::this_thread::sleep_for(std::chrono::milliseconds(200));
  for (int i = 0; i < 3; ++i) {
    Launch(**session).IgnoreError();
    ASSERT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);
  }
  session->reset();
  EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
}

TEST_F(EmbeddedGpu, SessionsAndCachesComeAndGo) {
  for (int i = 0; i < 100; ++i) {
    CreateCache();
    const auto sequence = client_->OpenSequence("c");
    ASSERT_TRUE(sequence.ok()) << sequence.status();
    for (int64_t position = 0; position < 2; ++position) {
      auto session = Open();
      ASSERT_TRUE(session.ok()) << session.status();
      const auto step = (*session)->Submit({.layers = kLayers,
                                            .entries = {{.sequence_id = *sequence,
                                                         .first_position = position,
                                                         .query_rows = 1,
                                                         .new_tokens = 1}}});
      ASSERT_TRUE(step.ok()) << step.status();
      ASSERT_TRUE(Launch(**session).ok());
      ASSERT_TRUE((*session)->Await(*step).ok());
    }
    ASSERT_TRUE(client_->DeleteCache("c").ok());
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  }
}

}  // namespace
}  // namespace tributary::service
