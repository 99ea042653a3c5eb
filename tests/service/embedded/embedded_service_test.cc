// A service within the test's process, as a host in C++ has it.
#include "service/embedded/embedded_service.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <chrono>
#include <memory>
#include <string>

#include "base/status/errors.h"
#include "base/status/rpc_errors.h"
#include "service/client/client.h"
#include "tests/support/process.h"

namespace tributary::service {
namespace {

std::unique_ptr<EmbeddedService> MustStart(const EmbeddedServiceOptions& options) {
  auto started = EmbeddedService::Start(options);
  EXPECT_TRUE(started.ok()) << started.status();
  return started.ok() ? *std::move(started) : nullptr;
}

TEST(EmbeddedService, ServesClientsOfItsProcess) {
  const test::TemporaryDirectory directory;
  const auto service = MustStart({.socket = directory.File("socket"), .workers = 3, .threads = 3});
  ASSERT_NE(service, nullptr);
  auto client = client::Client::Connect({.target = service->target()});
  ASSERT_TRUE(client.ok()) << client.status();
  v1::CacheSpec spec;
  spec.set_layers(1);
  spec.set_q_heads(2);
  spec.set_kv_heads(2);
  spec.set_head_dim(64);
  spec.set_kv_dtype(v1::DTYPE_BF16);
  spec.set_capacity_tokens(64);
  const auto cache = (*client)->CreateCache("c", spec);
  ASSERT_TRUE(cache.ok()) << cache.status();
  EXPECT_EQ(cache->ranks(), 3);
  EXPECT_TRUE(service->Drain(std::chrono::seconds(5)));
  const auto late = (*client)->WithTimeout(std::chrono::milliseconds(300))->OpenSequence("c");
  EXPECT_EQ(late.status().code(), absl::StatusCode::kUnavailable) << late.status();
}

TEST(EmbeddedService, OptionsAreRefusedByName) {
  const test::TemporaryDirectory directory;
  const std::string socket = directory.File("socket");
  const auto field = [](const EmbeddedServiceOptions& options) {
    const auto started = EmbeddedService::Start(options);
    EXPECT_EQ(started.status().code(), absl::StatusCode::kInvalidArgument) << started.status();
    return FieldOf(started.status());
  };
  EXPECT_EQ(field({.socket = "/" + std::string(200, 'x')}), "socket");
  EXPECT_EQ(field({.socket = socket, .workers = 0}), "workers");
  EXPECT_EQ(field({.socket = socket, .threads = -1}), "threads");
  EXPECT_EQ(field({.socket = socket, .memory_limit_bytes = -1}), "memory_limit_bytes");
  EXPECT_EQ(field({.socket = socket, .first_gpu = -1}), "first_gpu");
}

TEST(EmbeddedService, ASocketThatNobodyNamedEndsWithTheService) {
  std::string path;
  {
    const auto service = MustStart({.threads = 1});
    ASSERT_NE(service, nullptr);
    EXPECT_TRUE(client::Client::Connect({.target = service->target()}).ok());
    path = service->target().substr(std::string("unix:").size());
    EXPECT_EQ(access(path.c_str(), F_OK), 0);
  }
  EXPECT_NE(access(path.substr(0, path.rfind('/')).c_str(), F_OK), 0) << path;
}

TEST(EmbeddedService, ASocketThatIsInUseIsRefused) {
  const test::TemporaryDirectory directory;
  const std::string socket = directory.File("socket");
  const auto service = MustStart({.socket = socket, .threads = 1});
  ASSERT_NE(service, nullptr);
  const auto other = EmbeddedService::Start({.socket = socket, .threads = 1});
  EXPECT_EQ(other.status().code(), absl::StatusCode::kUnavailable) << other.status();
  EXPECT_TRUE(client::Client::Connect({.target = service->target()}).ok());
}

}  // namespace
}  // namespace tributary::service
