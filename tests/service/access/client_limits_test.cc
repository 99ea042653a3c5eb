// Limits of what a client may hold, over gRPC: two hosts known by their tokens.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <prometheus/metric_family.h>

#include <atomic>
#include <fstream>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "base/rpc/channel_security.h"
#include "service/data/resolve_spec.h"
#include "service/observe/telemetry.h"
#include "tests/service/fake_group.h"
#include "tests/service/session_driver.h"
#include "tests/service/test_service.h"
#include "worker/cache_spec.h"

namespace tributary::service::testing {
namespace {

using ::grpc::StatusCode;
using Stub = v1::AttentionService::Stub;

constexpr int32_t kPageTokens = 32;  // page_size * workers

// A host with a connection of its own.
class Host {
 public:
  Host(const std::string& address, const std::string& token_file) {
    grpc::ChannelArguments arguments;
    arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    const auto channel = DialSecurely(address, {.tls = {}, .token_file = token_file}, arguments);
    EXPECT_TRUE(channel.ok()) << channel.status();
    stub_ = v1::AttentionService::NewStub(*channel);
  }

  Stub& stub() { return *stub_; }
  grpc::Status Open(uint64_t id, const std::string& cache = "m") {
    return testing::Open(*stub_, cache, id);
  }
  grpc::Status Fork(uint64_t parent, uint64_t child) {
    v1::ForkSequenceRequest request;
    request.set_cache_id("m");
    request.set_parent_id(parent);
    request.set_sequence_id(child);
    v1::ForkSequenceReply reply;
    return Call(&Stub::ForkSequence, request, &reply);
  }
  grpc::Status Truncate(uint64_t id, int64_t length) {
    v1::TruncateSequenceRequest request;
    request.set_cache_id("m");
    request.set_sequence_id(id);
    request.set_length(length);
    v1::TruncateSequenceReply reply;
    return Call(&Stub::TruncateSequence, request, &reply);
  }
  grpc::Status Close(uint64_t id) {
    v1::CloseSequenceRequest request;
    request.set_cache_id("m");
    request.set_sequence_id(id);
    v1::CloseSequenceReply reply;
    return Call(&Stub::CloseSequence, request, &reply);
  }
  grpc::Status DeleteCache(const std::string& cache) {
    v1::DeleteCacheRequest request;
    request.set_cache_id(cache);
    v1::DeleteCacheReply reply;
    return Call(&Stub::DeleteCache, request, &reply);
  }
  // In all layers.
  grpc::Status Append(uint64_t id, int64_t first, int32_t tokens) {
    const v1::CacheSpec spec = SmallSpec();
    for (int32_t layer = 0; layer < spec.layers(); ++layer) {
      v1::AppendReply reply;
      const grpc::Status status =
          testing::Append(*stub_, AppendOf(spec, "m", id, first, tokens, layer), &reply);
      if (!status.ok()) return status;
    }
    return grpc::Status::OK;
  }

  template <typename Request, typename Reply>
  grpc::Status Call(grpc::Status (Stub::*method)(grpc::ClientContext*, const Request&, Reply*),
                    const Request& request, Reply* reply) {
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(60));
    return (stub_.get()->*method)(&context, request, reply);
  }

 private:
  std::unique_ptr<Stub> stub_;
};

// What a refusal says ran out; "" when it is none.
std::string SubjectOf(const grpc::Status& status) {
  google::rpc::QuotaFailure quota;
  if (status.error_code() != StatusCode::RESOURCE_EXHAUSTED || !DetailOf(status, &quota)) return "";
  return quota.violations(0).subject();
}

class ClientLimitsTest : public ::testing::Test {
 protected:
  void Serve(const ClientLimits& limits) {
    std::ofstream(directory_.File("tokens")) << "alice client 0123456789abcdef-alice\n"
                                                "bob client,admin 0123456789abcdef-bob\n"
                                                "carol client 0123456789abcdef-carol\n";
    for (const char* name : {"alice", "bob", "carol"}) {
      std::ofstream(directory_.File(name)) << "0123456789abcdef-" << name << "\n";
    }
    const auto access = AccessControl::Create({.token_file = directory_.File("tokens")});
    ASSERT_TRUE(access.ok()) << access.status();
    observer_ =
        std::make_shared<Telemetry>(2,
                                    std::make_shared<const telemetry::Logger>(
                                        telemetry::LogLevel::kError, telemetry::LogFormat::kText),
                                    nullptr);
    TestService::Options options;
    options.coordinator.client_limits = limits;
    options.coordinator.observer = observer_;
    options.server.access = *access;
    auto group = std::make_unique<FakeGroup>(2);
    group_ = group.get();
    service_.emplace(options, std::move(group));
    alice_.emplace(service_->address(), directory_.File("alice"));
    bob_.emplace(service_->address(), directory_.File("bob"));
    carol_.emplace(service_->address(), directory_.File("carol"));
    ASSERT_TRUE(CreateCache(alice_->stub(), "m", SmallSpec()).ok());
  }
  v1::CacheInfo Cache() {
    v1::GetTopologyRequest request;
    request.set_with_sequences(true);
    return service_->coordinator().GetTopology(request, {})->caches(0);
  }
  // As Prometheus sees it.
  double Refusals(const std::string& limit) {
    for (const auto& family : observer_->metrics()->Collect(Snapshot())) {
      if (family.name != "tributary_client_limit_refusals_total") continue;
      for (const auto& metric : family.metric) {
        if (metric.label.size() == 1 && metric.label[0].value == limit) return metric.counter.value;
      }
    }
    return -1;
  }

  test::TemporaryDirectory directory_;
  std::shared_ptr<Telemetry> observer_;
  FakeGroup* group_ = nullptr;
  std::optional<TestService> service_;
  std::optional<Host> alice_;
  std::optional<Host> bob_;
  std::optional<Host> carol_;
};

TEST_F(ClientLimitsTest, AClientAtItsLimitOfCachesIsRefusedAndOthersAreNot) {
  Serve({.caches = 2});
  EXPECT_TRUE(CreateCache(alice_->stub(), "n", SmallSpec()).ok());
  EXPECT_EQ(SubjectOf(CreateCache(alice_->stub(), "o", SmallSpec())), "client:alice caches");
  EXPECT_TRUE(CreateCache(alice_->stub(), "n", SmallSpec()).ok()) << "a repeat takes nothing";
  EXPECT_TRUE(CreateCache(bob_->stub(), "o", SmallSpec()).ok());
  EXPECT_TRUE(CreateCache(alice_->stub(), "o", SmallSpec()).ok()) << "it counts for bob";
  EXPECT_TRUE(alice_->DeleteCache("n").ok());
  EXPECT_TRUE(CreateCache(alice_->stub(), "p", SmallSpec()).ok());
  EXPECT_EQ(Refusals("caches"), 1);
}

TEST_F(ClientLimitsTest, AClientAtItsLimitOfBytesIsRefused) {
  const auto resolved = ResolveSpec(SmallSpec(), 2);
  ASSERT_TRUE(resolved.ok());
  const auto bytes = static_cast<int64_t>(2 * *worker::ShardBytes(resolved->spec));
  Serve({.cache_bytes = 2 * bytes});
  EXPECT_TRUE(CreateCache(alice_->stub(), "n", SmallSpec()).ok());
  EXPECT_EQ(SubjectOf(CreateCache(alice_->stub(), "o", SmallSpec())), "client:alice cache_bytes");
  EXPECT_TRUE(CreateCache(bob_->stub(), "o", SmallSpec()).ok());
  EXPECT_TRUE(alice_->DeleteCache("m").ok());
  EXPECT_TRUE(CreateCache(alice_->stub(), "m", SmallSpec()).ok());
}

TEST_F(ClientLimitsTest, AStreamEndsWhenItsCallersTokenIsTakenAway) {
  Serve({});
  ASSERT_TRUE(alice_->Open(1).ok());
  group_->Hold();
  grpc::ClientContext context;
  const auto stream = alice_->stub().AttendStream(&context);
  ASSERT_TRUE(stream->Write(AttendOf(SmallSpec(), "m", 1, 0, 1)));
  group_->WaitForHeld(1);
  std::ofstream(directory_.File("tokens")) << "bob client,admin 0123456789abcdef-bob\n";
  v1::AttendReply reply;
  EXPECT_FALSE(stream->Read(&reply));
  EXPECT_EQ(stream->Finish().error_code(), StatusCode::UNAUTHENTICATED);
  group_->Release();
  EXPECT_TRUE(test::Eventually(std::chrono::seconds(60),
                               [&] { return service_->server().open_streams() == 0; }));
}

TEST_F(ClientLimitsTest, ASessionEndsWhenItsCallersTokenIsTakenAway) {
  Serve({});
  ASSERT_TRUE(alice_->Open(1).ok());
  SessionDriver session(alice_->stub(), MessagesSession(1));
  ASSERT_TRUE(session.is_open());
  std::ofstream(directory_.File("tokens")) << "bob client,admin 0123456789abcdef-bob\n";
  EXPECT_EQ(session.Finish().error_code(), StatusCode::UNAUTHENTICATED);
}

TEST_F(ClientLimitsTest, CachesAreSeenByThoseWhoAskedForThemAndDeletedByWhoCreatedThem) {
  Serve({});
  const auto seen_by = [](Host& host, const std::string& cache) {
    v1::GetTopologyRequest request;
    request.set_cache_id(cache);
    v1::GetTopologyReply reply;
    const grpc::Status status = host.Call(&Stub::GetTopology, request, &reply);
    return status.ok() ? reply.caches_size() : -1;
  };
  EXPECT_EQ(seen_by(*alice_, ""), 1);
  EXPECT_EQ(seen_by(*carol_, ""), 0);
  EXPECT_EQ(seen_by(*carol_, "m"), -1);
  EXPECT_EQ(carol_->DeleteCache("m").error_code(), StatusCode::NOT_FOUND);
  EXPECT_EQ(seen_by(*bob_, "m"), 1) << "an admin sees all";
  // Another host of the same model.
  ASSERT_TRUE(CreateCache(carol_->stub(), "m", SmallSpec()).ok());
  EXPECT_EQ(seen_by(*carol_, "m"), 1);
  const grpc::Status refused = carol_->DeleteCache("m");
  EXPECT_EQ(refused.error_code(), StatusCode::PERMISSION_DENIED);
  EXPECT_EQ(FieldOf(refused), "cache_id");
  EXPECT_TRUE(alice_->DeleteCache("m").ok());
  ASSERT_TRUE(CreateCache(carol_->stub(), "m", SmallSpec()).ok());
  EXPECT_TRUE(bob_->DeleteCache("m").ok()) << "an admin deletes what others made";
}

TEST_F(ClientLimitsTest, AClientAtItsLimitOfSequencesIsRefusedAndOthersAreNot) {
  Serve({.sequences = 2});
  ASSERT_TRUE(alice_->Open(1).ok());
  ASSERT_TRUE(alice_->Fork(1, 2).ok());
  EXPECT_EQ(SubjectOf(alice_->Open(3)), "client:alice sequences");
  EXPECT_EQ(SubjectOf(alice_->Fork(1, 3)), "client:alice sequences");
  EXPECT_EQ(Cache().sequences(), 2);
  EXPECT_EQ(Refusals("sequences"), 2);
  EXPECT_EQ(Refusals("pages"), 0);

  EXPECT_TRUE(alice_->Open(1).ok()) << "a call repeated";
  EXPECT_TRUE(bob_->Open(4).ok());
  // Whoever closes it, whoever opened it has the place again.
  EXPECT_TRUE(bob_->Close(1).ok());
  EXPECT_TRUE(alice_->Open(3).ok());
  EXPECT_FALSE(alice_->Open(5).ok());
}

TEST_F(ClientLimitsTest, AllCachesCountTogetherAndDeletingOneFreesItsPlaces) {
  Serve({.sequences = 2});
  ASSERT_TRUE(CreateCache(alice_->stub(), "draft", SmallSpec()).ok());
  ASSERT_TRUE(alice_->Open(1).ok());
  ASSERT_TRUE(alice_->Open(1, "draft").ok());
  EXPECT_EQ(SubjectOf(alice_->Open(2)), "client:alice sequences");
  ASSERT_TRUE(bob_->DeleteCache("draft").ok());
  EXPECT_TRUE(alice_->Open(2).ok());
}

TEST_F(ClientLimitsTest, ConcurrentOpensNeverExceedTheLimit) {
  constexpr int kMost = 10;
  Serve({.sequences = kMost});
  std::atomic<int> opened{0};
  std::atomic<int> refused{0};
  std::atomic<int> other{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      Host host(service_->address(), directory_.File("alice"));
      for (int i = 0; i < 25; ++i) {
        const grpc::Status status = host.Open(static_cast<uint64_t>(1 + t * 25 + i));
        ++(status.ok() ? opened : SubjectOf(status).empty() ? other : refused);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(opened, kMost);
  EXPECT_EQ(refused, 100 - kMost);
  EXPECT_EQ(other, 0);
  EXPECT_EQ(Cache().sequences(), kMost);
  EXPECT_EQ(Refusals("sequences"), 100 - kMost);
}

TEST_F(ClientLimitsTest, AClientAtItsLimitOfPagesIsRefusedUntilItGivesSomeBack) {
  Serve({.pages = 4});
  ASSERT_TRUE(alice_->Open(1).ok());
  ASSERT_TRUE(bob_->Open(2).ok());
  ASSERT_TRUE(alice_->Append(1, 0, 4 * kPageTokens).ok());
  const std::string before = Cache().DebugString();
  EXPECT_EQ(SubjectOf(alice_->Append(1, 4 * kPageTokens, 1)), "client:alice pages");
  // The owner answers for a sequence, whoever writes to it.
  EXPECT_EQ(SubjectOf(bob_->Append(1, 4 * kPageTokens, 1)), "client:alice pages");
  EXPECT_EQ(Cache().DebugString(), before);
  EXPECT_EQ(Refusals("pages"), 2);
  EXPECT_TRUE(bob_->Append(2, 0, 4 * kPageTokens).ok());

  EXPECT_TRUE(alice_->Truncate(1, 3 * kPageTokens).ok());
  EXPECT_TRUE(alice_->Append(1, 3 * kPageTokens, 1).ok());
  EXPECT_TRUE(alice_->Close(1).ok());
  ASSERT_TRUE(alice_->Open(1).ok());
  EXPECT_TRUE(alice_->Append(1, 0, 4 * kPageTokens).ok());
}

TEST_F(ClientLimitsTest, ForkingDoesNotLeadBeyondTheLimitOfPages) {
  Serve({.pages = 3});
  ASSERT_TRUE(alice_->Open(1).ok());
  ASSERT_TRUE(alice_->Append(1, 0, 2 * kPageTokens + 1).ok());
  // Shared with oneself they count once ...
  ASSERT_TRUE(alice_->Fork(1, 2).ok());
  EXPECT_EQ(SubjectOf(alice_->Append(2, 2 * kPageTokens + 1, 1)), "client:alice pages");
  // ... and for another client as its own.
  ASSERT_TRUE(bob_->Open(3).ok());
  ASSERT_TRUE(bob_->Append(3, 0, 1).ok());
  EXPECT_EQ(SubjectOf(bob_->Fork(1, 4)), "client:bob pages");
  EXPECT_EQ(Cache().sequences(), 3);
  ASSERT_TRUE(bob_->Close(3).ok());
  EXPECT_TRUE(bob_->Fork(1, 4).ok());
}

TEST_F(ClientLimitsTest, SequencesLostWithAWorkerTakeNoPlaces) {
  Serve({.sequences = 1, .pages = 1});
  ASSERT_TRUE(alice_->Open(1).ok());
  ASSERT_TRUE(alice_->Append(1, 0, kPageTokens).ok());
  group_->Break("a worker died");
  service_->WaitNotReady();
  group_->Form({true, false});
  service_->WaitReady();
  EXPECT_EQ(alice_->Append(1, kPageTokens, 1).error_code(), StatusCode::DATA_LOSS);
  ASSERT_TRUE(alice_->Open(1).ok());
  EXPECT_TRUE(alice_->Append(1, 0, kPageTokens).ok());
  EXPECT_EQ(SubjectOf(alice_->Open(2)), "client:alice sequences");
}

}  // namespace
}  // namespace tributary::service::testing
