// Clients that send what no client should, to the real coordinator: it refuses with the documented
// code, holds no memory for them, and goes on serving others.
#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

#include <atomic>
#include <functional>
#include <limits>
#include <memory>
#include <random>
#include <regex>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "base/status/grpc_status.h"
#include "tests/fault/load.h"
#include "tests/fault/programs.h"
#include "tests/service/raw_call.h"
#include "tests/service/test_service.h"
#include "tests/support/usage.h"

namespace tributary::test {
namespace {

using grpc::StatusCode;
using service::testing::AppendOf;
using service::testing::AttendOf;
using service::testing::QueryOf;
using service::testing::SmallSpec;
using ::testing::AnyOf;
using ::testing::Ne;

constexpr std::chrono::seconds kPatience{60};
constexpr int kMessageLimit = 256 << 10;
constexpr StatusCode kUnparsable = StatusCode::INVALID_ARGUMENT;
constexpr char kAttend[] = "/tributary.v1.AttentionService/Attend";

class HostileClient : public ::testing::Test {
 protected:
  void SetUp() override {
    coordinator_ = StartCoordinator(
        directory_, 0,
        {"--embedded_workers=2", "--threads=2", "--listen=" + address_ + ",127.0.0.1:0",
         "--max_message_bytes=" + std::to_string(kMessageLimit)});
    ASSERT_TRUE(Eventually(kPatience, [&] {
      return coordinator_->Log().find(" ready") != std::string::npos &&
             coordinator_->Log().find("listening") != std::string::npos;
    }));
    std::smatch match;
    const std::string log = coordinator_->Log();
    ASSERT_TRUE(std::regex_search(log, match, std::regex(",127\\.0\\.0\\.1:([0-9]+)")));
    port_ = std::stoi(match[1]);
    channel_ = grpc::CreateChannel(address_, grpc::InsecureChannelCredentials());
    stub_ = v1::AttentionService::NewStub(channel_);
    ASSERT_TRUE(service::testing::CreateCache(*stub_, "m", spec_).ok());
    ASSERT_TRUE(service::testing::Open(*stub_, "m", 1).ok());
    ASSERT_TRUE(Serves());
    peak_ = PeakMemory();
  }

  // Whether a good call is answered.
  bool Serves() {
    v1::AttendReply reply;
    const grpc::Status status =
        service::testing::Attend(*stub_, AttendOf(spec_, "m", 1, position_, 1), &reply);
    EXPECT_TRUE(status.ok()) << status.error_message();
    if (status.ok()) ++position_;
    return status.ok();
  }

  // Sends bytes as a message of the method.
  grpc::Status Send(const std::string& bytes, const std::string& method = kAttend,
                    std::shared_ptr<grpc::Channel> channel = nullptr) {
    return service::testing::RawCall(channel == nullptr ? channel_ : channel, method, bytes,
                                     kPatience)
        .status;
  }

  size_t PeakMemory() const { return UsageOf(coordinator_->pid()).peak; }
  size_t OpenFiles() const { return UsageOf(coordinator_->pid()).files; }

  int Connect() const {
    const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    timeval timeout{.tv_sec = 20, .tv_usec = 0};
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &timeout, sizeof(timeout));
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(static_cast<uint16_t>(port_));
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    EXPECT_EQ(connect(fd, reinterpret_cast<const sockaddr*>(&address), sizeof(address)), 0);
    return fd;
  }

  const v1::CacheSpec spec_ = SmallSpec();
  const TemporaryDirectory directory_;
  const std::string address_ = PublicAddress(directory_);
  std::unique_ptr<ChildProcess> coordinator_;
  int port_ = 0;
  std::shared_ptr<grpc::Channel> channel_;
  std::unique_ptr<v1::AttentionService::Stub> stub_;
  int64_t position_ = 0;
  size_t peak_ = 0;
};

// --------------------------------------------------------------------- bytes that are no messages

TEST_F(HostileClient, WhatCannotBeParsedIsRefused) {
  const std::string good = AttendOf(spec_, "m", 1, 0, 1).SerializeAsString();
  EXPECT_EQ(Send("\x0a").error_code(), kUnparsable) << "a tag without its value";
  EXPECT_EQ(Send(good.substr(0, good.size() - 1)).error_code(), kUnparsable);
  EXPECT_EQ(Send("").error_code(), StatusCode::NOT_FOUND) << "an empty message is one: of no cache";
  std::mt19937_64 random(1);
  for (int i = 0; i < 300; ++i) {
    std::string bytes(1 + random() % 200, '\0');
    for (char& byte : bytes) byte = static_cast<char>(random());
    // Some are messages by chance; of what they ask for nothing exists.
    EXPECT_THAT(Send(bytes).error_code(),
                AnyOf(kUnparsable, StatusCode::NOT_FOUND, StatusCode::INVALID_ARGUMENT));
    std::string changed = good;
    changed[random() % changed.size()] ^= static_cast<char>(1 << random() % 8);
    EXPECT_THAT(Send(changed).error_code(), Ne(StatusCode::UNKNOWN));
  }
  // Sequence 1 may have other tokens by now.
  EXPECT_TRUE(service::testing::Open(*stub_, "m", 2).ok());
  v1::AttendReply reply;
  EXPECT_TRUE(service::testing::Attend(*stub_, AttendOf(spec_, "m", 2, 0, 1), &reply).ok());
}

TEST_F(HostileClient, AMessageOneByteTooLargeIsRefusedAndTheNextOneServed) {
  const auto of_size = [&](size_t size) {
    v1::AttendRequest request = AttendOf(spec_, "m", 1, 0, 1);
    request.mutable_q()->mutable_inline_()->clear();
    const size_t rest = request.ByteSizeLong();
    request.mutable_q()->mutable_inline_()->resize(size - rest - 16);
    std::string bytes = request.SerializeAsString();
    while (bytes.size() < size) {  // an unknown field of the bytes that are left, two at least
      request.mutable_q()->mutable_inline_()->push_back('\0');
      bytes = request.SerializeAsString();
    }
    EXPECT_EQ(bytes.size(), size);
    return bytes;
  };
  EXPECT_EQ(Send(of_size(kMessageLimit + 1)).error_code(), StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_EQ(Send(of_size(kMessageLimit)).error_code(), StatusCode::INVALID_ARGUMENT)
      << "read, and found to be no tensor of that shape";
  EXPECT_TRUE(Serves());
}

TEST_F(HostileClient, AMessageThatInflatesIsNotInflated) {
  grpc::ChannelArguments arguments;
  arguments.SetCompressionAlgorithm(GRPC_COMPRESS_GZIP);
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  const auto channel =
      grpc::CreateCustomChannel(address_, grpc::InsecureChannelCredentials(), arguments);
  v1::AttendRequest request = AttendOf(spec_, "m", 1, position_, 1);
  constexpr size_t kInflated = size_t{192} << 20;  // about 190 KB on the wire
  // A sanitizer keeps several bytes of its own for each that is touched.
#ifdef TRIBUTARY_SHORT_GRID
  constexpr size_t kAllowed = kInflated / 2;
#else
  constexpr size_t kAllowed = kInflated / 4;
#endif
  request.mutable_q()->mutable_inline_()->assign(kInflated, '\0');
  EXPECT_THAT(Send(request.SerializeAsString(), kAttend, channel).error_code(),
              AnyOf(StatusCode::UNIMPLEMENTED, StatusCode::RESOURCE_EXHAUSTED));
  EXPECT_LT(PeakMemory(), peak_ + kAllowed);
  EXPECT_TRUE(Serves());
}

TEST_F(HostileClient, WhatIsNotServedIsUnimplemented) {
  for (const char* method : {"/tributary.v1.AttentionService/Attack", "/tributary.v2.X/Attend",
                             "/tributary.v1.GroupService/Session", "/"}) {
    EXPECT_EQ(Send("", method).error_code(), StatusCode::UNIMPLEMENTED) << method;
  }
  EXPECT_TRUE(Serves());
}

TEST_F(HostileClient, OtherProtocolsAreHungUpOn) {
  const size_t files = OpenFiles();
  std::mt19937_64 random(2);
  std::string noise(4096, '\0');
  for (char& byte : noise) byte = static_cast<char>(random());
  for (const std::string& opening :
       {std::string("GET / HTTP/1.1\r\nHost: x\r\n\r\n"), noise,
        std::string("\x16\x03\x01\x02\x00"),
        std::string("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n") + std::string(64, '\xff')}) {
    const int fd = Connect();
    EXPECT_EQ(send(fd, opening.data(), opening.size(), MSG_NOSIGNAL),
              static_cast<ssize_t>(opening.size()));
    shutdown(fd, SHUT_WR);
    char buffer[512];
    ssize_t got = 0;
    size_t answered = 0;
    while ((got = recv(fd, buffer, sizeof(buffer), 0)) > 0) answered += got;
    EXPECT_LT(answered, sizeof(buffer)) << "no more than to say no";
    close(fd);
    EXPECT_TRUE(Serves());
  }
  // And some that say nothing at all.
  std::vector<int> silent;
  for (int i = 0; i < 50; ++i) silent.push_back(Connect());
  EXPECT_TRUE(Serves());
  for (const int fd : silent) close(fd);
  EXPECT_TRUE(Eventually(kPatience, [&] { return OpenFiles() <= files + 2; }))
      << OpenFiles() << " files open, " << files << " before";
  EXPECT_LT(PeakMemory(), peak_ + (size_t{64} << 20));
}

// ---------------------------------------------------------------------------- well-formed lies

TEST_F(HostileClient, LiesAreNamedAndReachNoWorker) {
  const auto topology = [&] {
    v1::GetTopologyRequest request;
    request.set_with_sequences(true);
    grpc::ClientContext context;
    v1::GetTopologyReply reply;
    EXPECT_TRUE(stub_->GetTopology(&context, request, &reply).ok());
    return reply;
  };
  struct Lie {
    StatusCode code;
    std::string field;
    std::function<void(v1::AttendRequest*)> tell;
  };
  using Request = v1::AttendRequest*;
  constexpr StatusCode kInvalid = StatusCode::INVALID_ARGUMENT;
  constexpr int64_t kHuge = std::numeric_limits<int64_t>::max();
  const std::vector<Lie> lies = {
      {kInvalid, "q.shape[0]", [](Request r) { r->mutable_q()->set_shape(0, -1); }},
      {kInvalid, "q.shape[2]", [](Request r) { r->mutable_q()->set_shape(2, kHuge); }},
      {kInvalid, "q.shape[1]",
       [](Request r) {  // the product is 0 in 64 bits
         r->mutable_q()->set_shape(1, int64_t{1} << 32);
         r->mutable_q()->set_shape(2, int64_t{1} << 32);
       }},
      {kInvalid, "q.shape", [](Request r) { r->mutable_q()->clear_shape(); }},
      {kInvalid, "q.shape[1]", [](Request r) { r->mutable_q()->set_shape(1, 0); }},
      {kInvalid, "q.inline", [](Request r) { r->mutable_q()->set_dtype(v1::DTYPE_F16); }},
      {kInvalid, "k.dtype", [](Request r) { r->mutable_k()->set_dtype(v1::DTYPE_FP8_E5M2); }},
      {kInvalid, "k.shape[2]", [](Request r) { r->mutable_k()->set_shape(2, 63); }},
      {kInvalid, "layer", [](Request r) { r->set_layer(std::numeric_limits<int32_t>::min()); }},
      {kInvalid, "entries", [](Request r) { r->clear_entries(); }},
      {kInvalid, "entries[1].sequence_id", [](Request r) { *r->add_entries() = r->entries(0); }},
      {kInvalid, "entries[0].query_rows",
       [](Request r) { r->mutable_entries(0)->set_query_rows(-1); }},
      {kInvalid, "entries[0].new_tokens",
       [](Request r) {
         r->mutable_entries(0)->set_query_rows(std::numeric_limits<int32_t>::max());
       }},
      {kInvalid, "entries[0].first_position",
       [](Request r) { r->mutable_entries(0)->set_first_position(-1); }},
      {StatusCode::OUT_OF_RANGE, "entries[0].first_position",
       [](Request r) { r->mutable_entries(0)->set_first_position(1000); }},
      {StatusCode::NOT_FOUND, "entries[0].sequence_id",
       [](Request r) { r->mutable_entries(0)->set_sequence_id(~uint64_t{0}); }},
      {StatusCode::NOT_FOUND, "cache_id", [](Request r) { r->set_cache_id("of nobody"); }},
      {StatusCode::NOT_FOUND, "q.shared_memory.region",
       [](Request r) {
         r->mutable_q()->clear_source();
         r->mutable_q()->mutable_shared_memory()->set_region("/etc/passwd");
       }},
  };
  const v1::GetTopologyReply before = topology();
  for (size_t i = 0; i < lies.size(); ++i) {
    v1::AttendRequest request = AttendOf(spec_, "m", 1, position_, 1);
    lies[i].tell(&request);
    v1::AttendReply reply;
    const grpc::Status status = service::testing::Attend(*stub_, request, &reply);
    EXPECT_EQ(status.error_code(), lies[i].code) << i << ": " << status.error_message();
    EXPECT_EQ(service::testing::FieldOf(status), lies[i].field)
        << i << ": " << status.error_message();
  }
  const v1::GetTopologyReply after = topology();
  EXPECT_EQ(after.statistics().steps(), before.statistics().steps());
  EXPECT_EQ(after.statistics().tokens_appended(), before.statistics().tokens_appended());
  EXPECT_EQ(after.caches(0).SerializeAsString(), before.caches(0).SerializeAsString());
  EXPECT_EQ(after.epoch(), before.epoch());
  EXPECT_TRUE(Serves());
}

TEST_F(HostileClient, ImpossibleCachesAreNamed) {
  const auto refused = [&](const std::string& field, const auto& spoil) {
    v1::CacheSpec spec = spec_;
    spoil(&spec);
    const grpc::Status status = service::testing::CreateCache(*stub_, "lie", spec);
    EXPECT_THAT(status.error_code(),
                AnyOf(StatusCode::INVALID_ARGUMENT, StatusCode::FAILED_PRECONDITION,
                      StatusCode::RESOURCE_EXHAUSTED))
        << field << ": " << status.error_message();
    if (status.error_code() == StatusCode::INVALID_ARGUMENT) {
      EXPECT_EQ(service::testing::FieldOf(status), field) << status.error_message();
    }
  };
  refused("spec.q_heads", [](v1::CacheSpec* s) { s->set_q_heads(0); });
  refused("spec.kv_heads", [](v1::CacheSpec* s) { s->set_kv_heads(-2); });
  refused("spec.head_dim", [](v1::CacheSpec* s) { s->set_head_dim(1 << 30); });
  refused("spec.page_size", [](v1::CacheSpec* s) { s->set_page_size(17); });
  refused("spec.capacity_tokens",
          [](v1::CacheSpec* s) { s->set_capacity_tokens(std::numeric_limits<int64_t>::max()); });
  EXPECT_TRUE(Serves());
}

// A row's own position must be held: there is no row over nothing.
TEST_F(HostileClient, AnEmptySequenceHasNoRows) {
  ASSERT_TRUE(service::testing::Open(*stub_, "m", 9).ok());
  v1::AttendReply reply;
  const grpc::Status status =
      service::testing::Attend(*stub_, QueryOf(spec_, "m", 9, 0, 1), &reply);
  EXPECT_EQ(status.error_code(), StatusCode::OUT_OF_RANGE) << status.error_message();
  EXPECT_EQ(service::testing::FieldOf(status), "entries[0].first_position");
}

// ------------------------------------------------------------ more bytes at a time than it may
// hold

// What gRPC has read of messages that are not whole yet is counted by nobody but gRPC: its quota
// makes clients that send faster than it allows wait.
TEST(HostileClients, ThatSendMoreThanTheBoundAreHeldBackWhileOthersAreServed) {
  constexpr int64_t kMessage = int64_t{16} << 20;
  constexpr int64_t kInFlight = int64_t{32} << 20;
  constexpr int kClients = 24;
  const TemporaryDirectory directory;
  const auto coordinator =
      StartEmbedded(directory, 2,
                    {"--threads=1", "--max_message_bytes=" + std::to_string(kMessage),
                     "--max_bytes_per_client=" + std::to_string(kInFlight),
                     "--max_bytes_in_flight=" + std::to_string(kInFlight)});
  ASSERT_TRUE(Eventually(kPatience, [&] {
    return coordinator->Log().find(" ready") != std::string::npos;
  })) << coordinator->Log();
  const std::string address = PublicAddress(directory);
  const v1::CacheSpec spec = SmallSpec();
  const auto stub = ConnectTo(address);
  ASSERT_TRUE(service::testing::CreateCache(*stub, "m", spec).ok());
  ASSERT_TRUE(service::testing::Open(*stub, "m", 1).ok());
  const size_t before = UsageOf(coordinator->pid()).peak;

  // Nearly as much as gRPC takes at all: it has read them whole before they are refused.
  const std::string message(static_cast<size_t>(2 * kMessage - 1024), '\xff');
  std::atomic<int> clients = kClients;
  std::vector<std::thread> threads;
  for (int i = 0; i < kClients; ++i) {
    threads.emplace_back([&] {
      grpc::ChannelArguments arguments;
      arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);  // a connection of its own
      const auto channel =
          grpc::CreateCustomChannel(address, grpc::InsecureChannelCredentials(), arguments);
      for (int blow = 0; blow < 2; ++blow) {
        const grpc::Status status =
            service::testing::RawCall(channel, kAttend, message, kPatience).status;
        EXPECT_FALSE(status.ok());
      }
      --clients;
    });
  }
  // gRPC makes room by closing connections, idle ones of anybody first, and by resetting calls.
  // Whoever meets either repeats the call, as the client libraries do.
  int64_t position = 0;
  while (clients > 0) {
    grpc::Status status;
    const bool served = Eventually(kPatience, [&] {
      v1::AttendReply reply;
      status = service::testing::Attend(*stub, AttendOf(spec, "m", 1, position, 1), &reply);
      return !absl::IsUnavailable(FromGrpcStatus(status));
    });
    EXPECT_TRUE(served && status.ok()) << status.error_message();
    ++position;
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_GT(position, 0);
  // docs/security.md: what is in flight, two messages, and what the process needs by itself. All
  // clients together send 768 MiB at a time.
  if (kInstrumented) return;
  const auto bound = static_cast<size_t>(kInFlight + 2 * kMessage);
  EXPECT_LT(UsageOf(coordinator->pid()).peak - before, bound + (size_t{64} << 20));
}

}  // namespace
}  // namespace tributary::test
