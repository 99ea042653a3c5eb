// Workers die or are replaced while each of them also keeps the tokens of another: sequences go on
// where they were. Every answer is checked against float64 attention; nothing is sent again but
// calls whose outcome was unknown.
#include <gmock/gmock.h>
#include <grpcpp/security/server_credentials.h>
#include <grpcpp/server_builder.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "service/client/client.h"
#include "service/workers/remote_group.h"
#include "tests/fault/fleet.h"
#include "tests/fault/group_harness.h"
#include "tests/fault/programs.h"
#include "tests/service/test_service.h"

namespace tributary::test {
namespace {

using ::testing::HasSubstr;

class WorkerRestart : public Fleet {
 protected:
  explicit WorkerRestart(const std::vector<std::string>& flags = {"--replicas=1"},
                         const std::vector<std::string>& worker_flags = {})
      : Fleet({.workers = 4, .coordinator_flags = flags, .worker_flags = worker_flags}) {}

  void Kill(int rank) {
    workers_[rank]->Signal(SIGKILL);
    ASSERT_EQ(workers_[rank]->Wait(kPatience), -SIGKILL);
  }
  // Until nothing is missing anywhere.
  bool WaitWhole() {
    return Eventually(kPatience, [&] {
      const v1::GetTopologyReply topology = Topology();
      return topology.state() == v1::GROUP_STATE_READY && topology.caches_size() == 1 &&
             topology.caches(0).pages_restoring() == 0 &&
             topology.caches(0).pages_without_replica() == 0;
    });
  }
  std::unique_ptr<SequenceHost> Host(uint64_t id, int tokens) {
    auto host = std::make_unique<SequenceHost>(stub_, id);
    EXPECT_TRUE(host->Open().ok());
    EXPECT_TRUE(host->Step(tokens).ok());
    return host;
  }
  static void ExpectNothingLost(Load& load) {
    for (size_t i = 0; i < load.hosts().size(); ++i) EXPECT_EQ(load.counts(i).lost, 0) << i;
  }
};

TEST_F(WorkerRestart, EachMayDieUnderLoad) {
  Load load(stub_, /*long_hosts=*/4, /*short_hosts=*/2);
  for (int rank = 0; rank < 4; ++rank) {
    ASSERT_TRUE(load.WaitOk(5));
    Kill(rank);
    workers_[rank] = Worker(rank);
    ASSERT_TRUE(WaitReady(static_cast<uint64_t>(rank) + 2));
    ASSERT_TRUE(WaitWhole());
  }
  ASSERT_TRUE(load.WaitOk(10));
  load.Stop();
  ExpectNothingLost(load);
  EXPECT_THAT(coordinator_->Log(), HasSubstr("pages restored from replicas"));
  ExpectPagesAccountedFor(load.hosts());
}

class WorkerRestartUnderTls : public WorkerRestart {
 protected:
  WorkerRestartUnderTls() : WorkerRestart({"--replicas=1"}, {"--peer_tls=always"}) {}
};

// Partials, replicas, and what is handed over or brought back: all of it goes from worker to
// worker.
TEST_F(WorkerRestartUnderTls, NothingIsLost) {
  const std::string tls = "partials meet in host memory, by TCP under TLS 1.3";
  EXPECT_EQ(Topology().exchange(), tls);
  Load load(stub_, /*long_hosts=*/2, /*short_hosts=*/1);
  ASSERT_TRUE(load.WaitOk(5));
  Kill(2);
  workers_[2] = Worker(2);
  ASSERT_TRUE(WaitReady(2));
  ASSERT_TRUE(WaitWhole());
  ASSERT_TRUE(load.WaitOk(5));
  workers_[1]->Signal(SIGTERM);
  ASSERT_EQ(workers_[1]->Wait(kPatience), 0);
  workers_[1] = Worker(1);
  ASSERT_TRUE(WaitReady(3));
  ASSERT_TRUE(WaitWhole());
  ASSERT_TRUE(load.WaitOk(5));
  load.Stop();
  ExpectNothingLost(load);
  EXPECT_THAT(coordinator_->Log(), HasSubstr("pages restored from replicas"));
  EXPECT_EQ(Topology().exchange(), tls);
  ExpectPagesAccountedFor(load.hosts());
}

TEST_F(WorkerRestart, AWorkerThatStandsByTakesOver) {
  const auto host = Host(1, 200);
  auto spare = Worker(-1);
  ASSERT_TRUE(Eventually(kPatience, [&] {
    return spare->Log().find("are held by live workers") != std::string::npos;
  }));
  Kill(2);
  ASSERT_TRUE(WaitReady(2));
  ASSERT_TRUE(Eventually(kPatience, [&] { return host->Look(4).ok(); }));
  EXPECT_TRUE(host->Step(30).ok());
}

TEST_F(WorkerRestart, NeighboursThatDieTogetherLoseWhatOneKeptOfTheOther) {
  const auto everywhere = Host(1, 200);
  const auto first_rank = Host(2, 10);
  Kill(2);
  Kill(3);
  workers_[2] = Worker(2);
  workers_[3] = Worker(3);
  ASSERT_TRUE(WaitWhole());
  ASSERT_TRUE(Eventually(kPatience, [&] { return first_rank->Look(4).ok(); }));
  EXPECT_TRUE(first_rank->Step(60).ok());
  EXPECT_EQ(everywhere->Step(1).error_code(), grpc::StatusCode::DATA_LOSS);
}

TEST_F(WorkerRestart, ForksAndTruncationsAreRestored) {
  const auto parent = Host(1, 200);
  SequenceHost child(stub_, 2);
  ASSERT_TRUE(parent->Fork(&child, 150).ok());
  ASSERT_TRUE(parent->Truncate(170).ok());
  Kill(1);
  workers_[1] = Worker(1);
  ASSERT_TRUE(WaitReady(2));
  ASSERT_TRUE(Eventually(kPatience, [&] { return parent->Look(4).ok() && child.Look(4).ok(); }));
  EXPECT_TRUE(parent->Step(20).ok());
  EXPECT_TRUE(child.Step(20).ok());
  EXPECT_TRUE(parent->Look(4).ok());
}

TEST_F(WorkerRestart, ACacheMayDoWithoutReplicas) {
  v1::DeleteCacheRequest request;
  request.set_cache_id(kCacheId);
  v1::DeleteCacheReply deleted;
  grpc::ClientContext context;
  ASSERT_TRUE(stub_->DeleteCache(&context, request, &deleted).ok());
  v1::CreateCacheRequest create;
  create.set_cache_id(kCacheId);
  *create.mutable_spec() = PublicSpec();
  create.mutable_spec()->set_replicas(0);
  v1::CreateCacheReply created;
  grpc::ClientContext again;
  ASSERT_TRUE(stub_->CreateCache(&again, create, &created).ok());
  EXPECT_EQ(created.spec().replicas(), 0);
  const auto host = Host(1, 200);
  Kill(1);
  workers_[1] = Worker(1);
  ASSERT_TRUE(WaitReady(2));
  ASSERT_TRUE(Eventually(
      kPatience, [&] { return host->Look(4).error_code() == grpc::StatusCode::DATA_LOSS; }));
}

// Without replicas: what is left of sequences is kept, and hosts send the rest again.
class LostTokens : public WorkerRestart {
 protected:
  LostTokens() : WorkerRestart({"--replicas=0"}) {}

  // Until the host's sequence is whole again. Returns the tokens that were sent.
  static int64_t Mend(SequenceHost& host) {
    int64_t brought = 0;
    grpc::Status status;
    EXPECT_TRUE(Eventually(kPatience,
                           [&] {
                             status = host.Look(1);
                             while (status.error_code() == grpc::StatusCode::DATA_LOSS) {
                               status = host.BringBack(status, &brought);
                               if (status.ok()) status = host.Look(1);
                             }
                             return status.ok();
                           }))
        << status.error_code() << ": " << status.error_message();
    return brought;
  }
  void Replace(int rank) {
    Kill(rank);
    workers_[rank] = Worker(rank);
  }
};

TEST_F(LostTokens, AreAllThatIsSentAgain) {
  const auto parent = Host(1, 200);
  SequenceHost child(stub_, 2);
  ASSERT_TRUE(parent->Fork(&child, 150).ok());
  ASSERT_TRUE(child.Step(30).ok());
  Replace(1);
  ASSERT_TRUE(WaitReady(2));
  EXPECT_EQ(Mend(*parent), 3 * 16) << "positions 16, 80 and 144";
  EXPECT_EQ(Mend(child), 16) << "what it shares is there; its own page lacks 144 to 159";
  EXPECT_TRUE(parent->Look(200).ok());
  EXPECT_TRUE(child.Look(180).ok());
  EXPECT_TRUE(parent->Step(20).ok());
  EXPECT_TRUE(child.Step(20).ok());
  EXPECT_EQ(Topology().caches(0).sequences_lost(), 0);
  Replace(3);
  Replace(0);
  ASSERT_TRUE(Eventually(kPatience, [&] { return Topology().epoch() >= 3; }));
  EXPECT_GT(Mend(child), 0);
  EXPECT_GT(Mend(*parent), 0);
  EXPECT_TRUE(parent->Look(220).ok());
  EXPECT_TRUE(child.Look(200).ok());
}

// Two layers that see everything and one with a window, which has pages of its own.
TEST_F(LostTokens, OfSeveralLayersAndWindowsGiveTheSameBytesAsBefore) {
  constexpr int32_t kLayers = 3;
  constexpr int32_t kTokens = 300;
  v1::CacheSpec spec = PublicSpec();
  spec.set_layers(kLayers);
  for (int layer = 0; layer < kLayers; ++layer) spec.add_layer_specs();
  spec.mutable_layer_specs(1)->mutable_window()->set_left(64);
  spec.set_rollback_tokens(32);
  spec.set_window_capacity_tokens(2'048);
  const auto client = *client::Client::Connect({.target = PublicAddress(directory_)});
  ASSERT_TRUE(client->CreateCache("layers", spec).ok());
  const uint64_t sequence = *client->OpenSequence("layers");
  const size_t token = static_cast<size_t>(spec.kv_heads() * spec.head_dim());
  std::vector<float> values(kTokens * token);
  for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i % 61) / 30.0f - 1.0f;
  const auto append = [&](int32_t layer, const std::vector<client::PositionRange>& ranges) {
    std::vector<float> given;
    client::AppendCall call{.cache_id = "layers",
                            .layer = layer,
                            .kv_heads = spec.kv_heads(),
                            .head_dim = spec.head_dim()};
    for (const auto& [begin, end] : ranges) {
      call.entries.push_back({sequence, begin, static_cast<int32_t>(end - begin)});
      given.insert(given.end(), values.begin() + begin * static_cast<int64_t>(token),
                   values.begin() + end * static_cast<int64_t>(token));
    }
    call.k = given.data();
    call.v = given.data();
    return client->Append(call);
  };
  const auto look = [&](int32_t layer, std::vector<float>* output) {
    const std::vector<float> q(4 * static_cast<size_t>(spec.q_heads() * spec.head_dim()), 0.5f);
    output->resize(q.size());
    return client->Attend({.cache_id = "layers",
                           .layer = layer,
                           .entries = {{sequence, kTokens - 4, 4, 0}},
                           .q = q.data(),
                           .q_heads = spec.q_heads(),
                           .kv_heads = spec.kv_heads(),
                           .head_dim = spec.head_dim(),
                           .output = output->data()});
  };
  for (int32_t first = 0; first < kTokens; first += 100) {
    for (int32_t layer = 0; layer < kLayers; ++layer) {
      ASSERT_TRUE(append(layer, {{first, first + 100}}).ok());
    }
  }
  std::vector<float> before[kLayers];
  for (int32_t layer = 0; layer < kLayers; ++layer) ASSERT_TRUE(look(layer, &before[layer]).ok());
  Replace(2);
  ASSERT_TRUE(WaitReady(2));
  std::vector<float> after[kLayers];
  int64_t brought[kLayers] = {};
  absl::Status status = look(0, &after[0]);
  while (absl::IsDataLoss(status)) {
    const auto missing = client::MissingTokensOf(status);
    ASSERT_TRUE(missing.has_value()) << status;
    const absl::Status appended = append(missing->layer, missing->ranges);
    ASSERT_TRUE(appended.ok()) << appended;
    brought[missing->layer] += missing->tokens;
    status = look(0, &after[0]);
  }
  for (int32_t layer = 0; layer < kLayers; ++layer) {
    EXPECT_TRUE(look(layer, &after[layer]).ok());
    EXPECT_EQ(after[layer], before[layer]) << "layer " << layer;
  }
  EXPECT_EQ(brought[0], brought[2]);
  EXPECT_GT(brought[1], 0);
  EXPECT_LT(brought[1], brought[0]) << "what the window gave up is not asked for";
}

// Made before the fleet that is told of it.
struct StateDirectory {
  TemporaryDirectory state;
};

class WorkerAndCoordinatorRestart : protected StateDirectory, public WorkerRestart {
 protected:
  explicit WorkerAndCoordinatorRestart(const std::string& replicas = "1")
      : WorkerRestart({"--replicas=" + replicas, "--state_dir=" + state.File(".")}) {}
};

// The coordinator is the test's own, so that a call may take many steps.
class LongCalls : public ::testing::Test {
 protected:
  static constexpr int kWorkers = 3;
  // Of a row of PublicSpec and its token, in f32.
  static constexpr int64_t kBytesOfRow = 4 * 128 * (8 + 2);

  LongCalls() {
    auto group = service::CreateRemoteGroup(GroupHarness::Options(kWorkers));
    grpc::ServerBuilder builder;
    builder.AddListeningPort(WorkerAddress(directory_), grpc::InsecureServerCredentials());
    group->AddTo(builder);
    server_ = builder.BuildAndStart();
    for (int rank = 0; rank < kWorkers; ++rank) workers_.push_back(Worker(rank));
    service::CoordinatorOptions options;
    options.max_step_bytes = 2 * kBytesOfRow;
    options.replicas = 1;
    service_ = std::make_unique<service::testing::TestService>(
        service::testing::TestService::Options{.coordinator = options}, std::move(group));
  }
  ~LongCalls() override {
    service_->coordinator().Stop();
    server_->Shutdown(std::chrono::system_clock::now());
  }

  std::unique_ptr<ChildProcess> Worker(int rank) {
    return StartWorker(directory_, WorkerAddress(directory_), rank);
  }
  uint64_t Steps() { return service_->Topology().statistics().steps(); }
  bool WaitWhole() {
    return Eventually(kPatience, [&] {
      const v1::GetTopologyReply topology = service_->Topology();
      return topology.state() == v1::GROUP_STATE_READY &&
             topology.caches(0).pages_restoring() + topology.caches(0).pages_without_replica() == 0;
    });
  }

  TemporaryDirectory directory_;
  std::unique_ptr<grpc::Server> server_;
  std::vector<std::unique_ptr<ChildProcess>> workers_;
  std::unique_ptr<service::testing::TestService> service_;
};

TEST_F(LongCalls, AWorkerThatDiesBetweenTheStepsOfACallLosesNothing) {
  ASSERT_TRUE(service::testing::CreateCache(service_->stub(), kCacheId, PublicSpec()).ok());
  SequenceHost host(ConnectTo(service_->address()), 1);
  ASSERT_TRUE(host.Open().ok());
  ASSERT_TRUE(host.Step(70).ok());
  int interrupted = 0;
  for (int rank = 0; rank < kWorkers || interrupted == 0; ++rank) {
    ChildProcess& dies = *workers_[rank % kWorkers];
    const uint64_t before = Steps();
    grpc::Status called;
    std::thread caller([&] { called = host.Step(200); });
    EXPECT_TRUE(Eventually(kPatience, [&] { return Steps() > before + 10; }));
    dies.Signal(SIGKILL);
    caller.join();
    ASSERT_EQ(dies.Wait(kPatience), -SIGKILL);
    workers_[rank % kWorkers] = Worker(rank % kWorkers);
    if (!called.ok()) {
      ++interrupted;
      EXPECT_TRUE(called.error_code() == grpc::StatusCode::ABORTED ||
                  called.error_code() == grpc::StatusCode::UNAVAILABLE)
          << called.error_message();
    }
    ASSERT_TRUE(WaitWhole());
    // The host repeats what was interrupted, and every reply is checked.
    ASSERT_TRUE(Eventually(kPatience, [&] { return host.Step(3).ok(); }));
    EXPECT_TRUE(host.Look(50).ok());
    ASSERT_TRUE(Eventually(kPatience, [&] { return host.Truncate(70).ok(); }));
  }
  EXPECT_GT(interrupted, 0);
}

// Every program is told to stop and started anew, one after the other, as an upgrade does it.
class RollingRestart : public WorkerAndCoordinatorRestart,
                       public ::testing::WithParamInterface<const char*> {
 protected:
  RollingRestart() : WorkerAndCoordinatorRestart(GetParam()) {}
};

// A host of the client library, with its default retries: none of its calls may fail.
class RetryingHost {
 public:
  explicit RetryingHost(const std::string& address) {
    client_ = *client::Client::Connect({.target = address, .timeout = kPatience});
    sequence_ = *client_->OpenSequence(kCacheId);
    thread_ = std::thread([this] {
      while (!stopping_) Step();
    });
  }
  ~RetryingHost() { Stop(); }
  void Stop() {
    stopping_ = true;
    if (thread_.joinable()) thread_.join();
  }
  int64_t length() const { return length_; }
  std::chrono::milliseconds longest() const { return longest_; }

 private:
  void Step() {
    const worker::CacheSpec spec = ModelSpec();
    const std::vector<float> q(static_cast<size_t>(spec.q_heads * spec.head_dim), 0.5f);
    const std::vector<float> kv(static_cast<size_t>(spec.kv_heads * spec.head_dim), 0.25f);
    std::vector<float> output(q.size());
    client::AttendCall call{.cache_id = kCacheId,
                            .entries = {{sequence_, length_, 1, 1}},
                            .q = q.data(),
                            .k = kv.data(),
                            .v = kv.data(),
                            .q_heads = spec.q_heads,
                            .kv_heads = spec.kv_heads,
                            .head_dim = spec.head_dim,
                            .output = output.data()};
    const auto begin = std::chrono::steady_clock::now();
    const absl::Status done = client_->Attend(call);
    const auto took = std::chrono::steady_clock::now() - begin;
    longest_ = std::max(longest_, std::chrono::duration_cast<std::chrono::milliseconds>(took));
    EXPECT_TRUE(done.ok()) << done;
    if (!done.ok()) stopping_ = true;
    // All keys and values are alike: so is what every row sees.
    EXPECT_NEAR(output.front(), 0.25f, 1e-3f);
    if (++length_ == 500) {
      // Not to nothing: a coordinator that restarts forgets sequences without tokens.
      EXPECT_TRUE(client_->TruncateSequence(kCacheId, sequence_, 1).ok());
      length_ = 1;
    }
  }

  std::unique_ptr<client::Client> client_;
  uint64_t sequence_ = 0;
  std::atomic<int64_t> length_ = 0;
  std::chrono::milliseconds longest_{0};
  std::atomic<bool> stopping_ = false;
  std::thread thread_;
};

TEST_P(RollingRestart, OfWorkersAndOfTheCoordinatorUnderLoadLosesNothing) {
  Load load(stub_, /*long_hosts=*/3, /*short_hosts=*/1);
  RetryingHost retrying(PublicAddress(directory_));
  for (int rank = 0; rank < 4; ++rank) {
    ASSERT_TRUE(load.WaitOk(5));
    workers_[rank]->Signal(SIGTERM);
    EXPECT_EQ(workers_[rank]->Wait(kPatience), 0);
    workers_[rank] = Worker(rank);
    ASSERT_TRUE(WaitReady(static_cast<uint64_t>(rank) + 2));
    ASSERT_TRUE(WaitWhole());
  }
  ASSERT_TRUE(load.WaitOk(5));
  coordinator_->Signal(SIGTERM);
  EXPECT_EQ(coordinator_->Wait(kPatience), 0);
  Coordinate();
  ASSERT_TRUE(WaitReady(6));
  ASSERT_TRUE(load.WaitOk(5));
  load.Stop();
  retrying.Stop();
  ExpectNothingLost(load);
  RecordProperty("longest_call_ms", static_cast<int>(retrying.longest().count()));
}

INSTANTIATE_TEST_SUITE_P(Replicas, RollingRestart, ::testing::Values("0", "1"));

TEST_F(WorkerAndCoordinatorRestart, BothMayDieTogether) {
  const auto host = Host(1, 200);
  for (uint64_t life = 2; life < 4; ++life) {
    const int rank = static_cast<int>(life);
    coordinator_->Signal(SIGKILL);
    ASSERT_EQ(coordinator_->Wait(kPatience), -SIGKILL);
    Kill(rank);
    workers_[rank] = Worker(rank);
    Coordinate();
    ASSERT_TRUE(WaitReady(life));
    ASSERT_TRUE(WaitWhole());
    ASSERT_TRUE(Eventually(kPatience, [&] { return host->Look(4).ok(); }));
    EXPECT_TRUE(host->Step(3).ok());
  }
}

}  // namespace
}  // namespace tributary::test
