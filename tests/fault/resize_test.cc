// The number of workers changes while hosts go on: sequences stay, and no token is sent again.
// Every answer is checked against float64 attention, or against a service that always had so many
// workers.
#include <gmock/gmock.h>
#include <grpcpp/create_channel.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tests/fault/fleet.h"
#include "tests/fault/link.h"
#include "tests/fault/random_host.h"
#include "tributary/v1/operations.grpc.pb.h"

namespace tributary::test {
namespace {

using std::chrono::milliseconds;
using ::testing::HasSubstr;

class ResizeTest : public Fleet {
 protected:
  explicit ResizeTest(int workers = 2, std::vector<std::string> flags = {},
                      std::vector<std::string> worker_flags = {})
      : Fleet({.workers = workers,
               .coordinator_flags = std::move(flags),
               .worker_flags = std::move(worker_flags)}) {}
  ~ResizeTest() override { StopHosts(); }

  grpc::Status Resize(int workers, v1::ChangeWorkersReply* reply = nullptr,
                      milliseconds patience = std::chrono::seconds(30)) {
    v1::ChangeWorkersRequest request;
    request.set_workers(workers);
    request.set_patience_ms(static_cast<uint32_t>(patience.count()));
    v1::ChangeWorkersReply ignored;
    const auto stub = v1::OperationsService::NewStub(
        grpc::CreateChannel(PublicAddress(directory_), grpc::InsecureChannelCredentials()));
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::minutes(2));
    return stub->ChangeWorkers(&context, request, reply == nullptr ? &ignored : reply);
  }
  // From now on every message between workers and the coordinator arrives so much later, where
  // there are links.
  void SlowDown(milliseconds delay) {
    for (const auto& link : links_) link->SetDelay(delay);
  }
  void MakeLinks() {
    for (int rank = 0; rank < 4; ++rank) {
      links_.push_back(std::make_unique<Link>(CoordinatorAddress(rank).substr(5),
                                              directory_.File("workers.sock")));
    }
  }
  // As an operator does it: starts those that are missing, asks, and stops those that stand by.
  void ResizeTo(int workers) {
    for (int rank = static_cast<int>(workers_.size()); rank < workers; ++rank) {
      workers_.push_back(Worker(rank));
    }
    v1::ChangeWorkersReply reply;
    const grpc::Status status = Resize(workers, &reply);
    ASSERT_TRUE(status.ok()) << status.error_message();
    EXPECT_EQ(reply.workers(), workers);
    while (static_cast<int>(workers_.size()) > workers) {
      workers_.back()->Signal(SIGTERM);
      EXPECT_EQ(workers_.back()->Wait(kPatience), 0);
      workers_.pop_back();
    }
    ASSERT_EQ(Topology().workers_size(), workers);
  }
  // Of the group as it is, without workers that a larger one waits for.
  int Ranks() {
    v1::GetLimitsReply reply;
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(5));
    return stub_->GetLimits(&context, v1::GetLimitsRequest(), &reply).ok() ? reply.ranks() : 0;
  }
  // How often the coordinator's log has a text.
  size_t Times(const std::string& text) const {
    const std::string log = coordinator_->Log();
    size_t times = 0;
    for (size_t at = log.find(text); at != std::string::npos; at = log.find(text, at + 1)) ++times;
    return times;
  }
  bool WaitWhole() {
    return Eventually(kPatience, [&] {
      const v1::GetTopologyReply topology = Topology();
      return topology.state() == v1::GROUP_STATE_READY && topology.caches_size() >= 1 &&
             topology.caches(0).pages_restoring() == 0 &&
             topology.caches(0).pages_without_replica() == 0;
    });
  }

  // Hosts whose calls are drawn at random: steps, prompts, forks, truncations.
  void StartHosts(int count) {
    for (int number = 0; number < count; ++number) {
      hosts_.push_back(
          std::make_unique<RandomHost>(ConnectTo(PublicAddress(directory_)), number, 77));
      threads_.emplace_back([this, host = hosts_.back().get()] { host->Run(stop_); });
    }
  }
  bool WaitForHosts(int64_t more) {
    std::vector<int64_t> goals;
    for (const auto& host : hosts_) goals.push_back(host->operations() + more);
    return Eventually(std::chrono::minutes(2), [&] {
      for (size_t i = 0; i < goals.size(); ++i) {
        if (hosts_[i]->operations() < goals[i] && !HasFailure()) return false;
      }
      return true;
    });
  }
  void StopHosts() {
    stop_ = true;
    for (std::thread& thread : threads_) thread.join();
    threads_.clear();
  }
  // Nothing was lost, and nothing is left.
  void CheckHosts() {
    StopHosts();
    EXPECT_EQ(Topology().caches(0).sequences_lost(), 0);
    for (const auto& host : hosts_) host->CheckAndClose();
    EXPECT_EQ(Topology().caches(0).pages_used(), 0);
    EXPECT_EQ(Topology().caches(0).sequences(), 0);
  }

  std::vector<std::unique_ptr<Link>>
      links_;  // by rank; none: workers reach the coordinator directly
  std::vector<std::unique_ptr<RandomHost>> hosts_;
  std::vector<std::thread> threads_;
  std::atomic<bool> stop_ = false;
};

// What the errors of changes say that did not come about.
void Count(const grpc::Status& status, std::map<std::string, int>* counts) {
  ++(*counts)[status.ok() ? "came about" : status.error_message()];
}
void Print(const std::map<std::string, int>& counts) {
  for (const auto& [what, count] : counts) std::printf("%d x %s\n", count, what.c_str());
}

TEST_F(ResizeTest, GrowsAndShrinksUnderLoad) {
  StartHosts(3);
  for (const int workers : {4, 2, 3, 1, 4}) {
    ASSERT_TRUE(WaitForHosts(15));
    ASSERT_NO_FATAL_FAILURE(ResizeTo(workers));
  }
  ASSERT_TRUE(WaitForHosts(15));
  CheckHosts();
  EXPECT_THAT(coordinator_->Log(), HasSubstr("the number of workers has changed"));
}

TEST_F(ResizeTest, WorkersThatAreMissingAreWaitedForAndTheServiceGoesOn) {
  StartHosts(1);
  ASSERT_TRUE(WaitForHosts(5));
  const grpc::Status missing = Resize(4, nullptr, milliseconds(300));
  EXPECT_EQ(missing.error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_THAT(missing.error_message(), HasSubstr("2 of 4 are there"));
  EXPECT_EQ(Topology().epoch(), 1u) << "the group has not been broken";
  EXPECT_TRUE(Resize(2).ok()) << "as many as there are";
  EXPECT_EQ(Resize(0).error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  // They come while the change waits for them.
  grpc::Status there;
  std::thread resize([&] { there = Resize(4); });
  std::this_thread::sleep_for(milliseconds(300));
  workers_.push_back(Worker(-1));
  workers_.push_back(Worker(-1));
  resize.join();
  EXPECT_TRUE(there.ok()) << there.error_message();
  ASSERT_TRUE(WaitForHosts(5));
  CheckHosts();
}

TEST_F(ResizeTest, EmbeddedWorkersAreRefused) {
  TemporaryDirectory directory;
  const auto embedded = StartEmbedded(directory, 2);
  ASSERT_TRUE(Eventually(kPatience,
                         [&] { return embedded->Log().find("listening") != std::string::npos; }));
  const auto stub = v1::OperationsService::NewStub(
      grpc::CreateChannel(PublicAddress(directory), grpc::InsecureChannelCredentials()));
  v1::ChangeWorkersRequest request;
  request.set_workers(3);
  v1::ChangeWorkersReply reply;
  grpc::Status status;
  EXPECT_TRUE(Eventually(kPatience, [&] {
    grpc::ClientContext context;
    status = stub->ChangeWorkers(&context, request, &reply);
    return status.error_code() == grpc::StatusCode::FAILED_PRECONDITION;
  }));
  EXPECT_THAT(status.error_message(), HasSubstr("threads of the coordinator"));
}

class ResizeWithReplicas : public ResizeTest {
 protected:
  ResizeWithReplicas() : ResizeTest(3, {"--replicas=1"}) {}
};

// Changes take long enough for something to come in between.
class ResizeSlowly : public ResizeTest {
 protected:
  explicit ResizeSlowly(int workers = 3, std::vector<std::string> flags = {"--replicas=1"})
      : ResizeTest(workers, std::move(flags)) {}

  void SetUp() override {
    MakeLinks();
    ResizeTest::SetUp();
    SlowDown(milliseconds(15));
  }
  std::string CoordinatorAddress(int rank) const override {
    return "unix:" + directory_.File("link" + std::to_string(rank));
  }
  // How long a change takes in which nobody dies. Deaths come at times up to half as late again.
  milliseconds TimeOf(int workers) {
    EXPECT_TRUE(WaitForHosts(3));
    v1::ChangeWorkersReply reply;
    const grpc::Status status = Resize(workers, &reply);
    EXPECT_TRUE(status.ok()) << status.error_message();
    return milliseconds(static_cast<int64_t>(reply.seconds() * 1e3));
  }
};

TEST_F(ResizeWithReplicas, ReplicasAreThereAtOnceAndOneWorkerCannotHaveThem) {
  StartHosts(2);
  ASSERT_TRUE(WaitForHosts(15));
  ASSERT_NO_FATAL_FAILURE(ResizeTo(2));
  // Nobody has had time to make them again.
  EXPECT_EQ(Topology().caches(0).pages_without_replica(), 0);
  workers_[1]->Signal(SIGKILL);
  ASSERT_EQ(workers_[1]->Wait(kPatience), -SIGKILL);
  workers_[1] = Worker(1);
  ASSERT_TRUE(WaitWhole());
  const grpc::Status alone = Resize(1);
  EXPECT_EQ(alone.error_code(), grpc::StatusCode::FAILED_PRECONDITION);
  EXPECT_THAT(alone.error_message(), HasSubstr("no other can keep its tokens"));
  ASSERT_TRUE(WaitForHosts(15));
  CheckHosts();
}

// Whenever a worker dies, either number of workers results, and nothing is lost.
TEST_F(ResizeSlowly, AWorkerMayDieInTheMidst) {
  StartHosts(3);
  workers_.push_back(Worker(3));
  std::mt19937 random(11);
  std::map<std::string, int> outcomes;
  const milliseconds whole = TimeOf(4);
  for (int time = 0; time < 7; ++time) {
    ASSERT_TRUE(WaitForHosts(3));
    ASSERT_TRUE(WaitWhole());
    const int workers = Ranks() == 4 ? 3 : 4;
    grpc::Status status;
    std::thread resize([&] { status = Resize(workers); });
    // The group is broken for the change, and formed again; then caches are made and filled.
    const size_t changes = Times("reason=the number of workers changes");
    ASSERT_TRUE(Eventually(
        kPatience, [&] { return Times("reason=the number of workers changes") > changes; }));
    std::this_thread::sleep_for(whole * time / 4);
    const auto rank = static_cast<size_t>(random() % 3);
    workers_[rank]->Signal(SIGKILL);
    ASSERT_EQ(workers_[rank]->Wait(kPatience), -SIGKILL);
    workers_[rank] = Worker(static_cast<int>(rank));
    resize.join();
    EXPECT_TRUE(status.ok() || status.error_code() == grpc::StatusCode::UNAVAILABLE)
        << status.error_code() << ": " << status.error_message();
    Count(status, &outcomes);
    ASSERT_TRUE(WaitWhole()) << status.error_message();
    EXPECT_EQ(Topology().caches(0).sequences_lost(), 0) << time;
  }
  Print(outcomes);
  EXPECT_GT(outcomes["came about"], 0) << "the last deaths come late";
  EXPECT_LT(outcomes["came about"], 7) << "the first deaths come early";
  SlowDown(milliseconds(0));
  ASSERT_TRUE(WaitForHosts(10));
  CheckHosts();
}

// Made before the fleet that is told of it.
class StateDirectory {
 protected:
  TemporaryDirectory state_;
};

class ResizeWithJournal : protected StateDirectory, public ResizeSlowly {
 protected:
  ResizeWithJournal() : ResizeSlowly(2, {"--state_dir=" + state_.File(".")}) {}
};

constexpr char kAnotherFlag[] = "the group goes on with the number of workers that it has";

TEST_F(ResizeWithJournal, TheCoordinatorMayDieInTheMidstAndAfterwards) {
  StartHosts(3);
  workers_.push_back(Worker(2));
  workers_.push_back(Worker(3));
  int changed = 0;
  const milliseconds whole = TimeOf(4);
  for (int time = 0; time < 7; ++time) {
    ASSERT_TRUE(WaitForHosts(3));
    ASSERT_TRUE(WaitWhole());
    const int before = Ranks();
    std::thread resize([&] { Resize(before == 4 ? 2 : 4); });
    const size_t changes = Times("reason=the number of workers changes");
    ASSERT_TRUE(Eventually(
        kPatience, [&] { return Times("reason=the number of workers changes") > changes; }));
    std::this_thread::sleep_for(whole * time / 4);
    coordinator_->Signal(SIGKILL);
    ASSERT_EQ(coordinator_->Wait(kPatience), -SIGKILL);
    resize.join();
    // If the change counts, it is undone: the flag says how many there are to be.
    const size_t others = Times(kAnotherFlag);
    ASSERT_NO_FATAL_FAILURE(Coordinate({"--workers=" + std::to_string(before)}));
    ASSERT_TRUE(WaitWhole());
    EXPECT_EQ(Topology().caches(0).sequences_lost(), 0) << time;
    changed += Times(kAnotherFlag) > others ? 1 : 0;
    EXPECT_TRUE(Eventually(kPatience, [&] { return Ranks() == before; }));
  }
  std::printf("of 7 changes in which the coordinator died, %d counted\n", changed);
  EXPECT_GT(changed, 0) << "the last deaths come late";
  EXPECT_LT(changed, 7) << "the first deaths come early";
  // The flag of the next start says another number.
  SlowDown(milliseconds(0));
  ASSERT_EQ(Ranks(), 4);
  coordinator_->Signal(SIGTERM);
  ASSERT_EQ(coordinator_->Wait(kPatience), 0);
  ASSERT_NO_FATAL_FAILURE(Coordinate({"--workers=3"}));
  EXPECT_TRUE(Eventually(kPatience, [&] { return Ranks() == 3; }));
  ASSERT_TRUE(WaitWhole());
  ASSERT_TRUE(WaitForHosts(10));
  CheckHosts();
}

class ResizeWithoutMemory : public ResizeTest {
 protected:
  ResizeWithoutMemory() : ResizeTest(2) {}
};

TEST_F(ResizeWithoutMemory, IsRefusedAndChangesNothing) {
  StartHosts(2);
  ASSERT_TRUE(WaitForHosts(10));
  // The worker that comes has room for nothing.
  workers_.push_back(Worker(2, {"--memory_limit=4096"}));
  const grpc::Status status = Resize(3);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED) << status.error_message();
  ASSERT_TRUE(WaitForHosts(10));
  EXPECT_EQ(Topology().workers_size(), 2);
  workers_.back()->Signal(SIGTERM);
  EXPECT_EQ(workers_.back()->Wait(kPatience), 0);
  workers_.pop_back();
  ASSERT_NO_FATAL_FAILURE(ResizeTo(4));
  ASSERT_TRUE(WaitForHosts(10));
  CheckHosts();
}

// ----------------------------------------------------------------- caches of several kinds,
// compared

v1::CacheSpec CacheOf(v1::DType dtype, int32_t page_size, int32_t interleave, bool windows) {
  v1::CacheSpec spec;
  spec.set_layers(2);
  spec.set_q_heads(4);
  spec.set_kv_heads(2);
  spec.set_head_dim(64);
  spec.set_page_size(page_size);
  spec.set_interleave(interleave);
  spec.set_kv_dtype(dtype);
  spec.set_capacity_tokens(4'096);
  if (!windows) return spec;
  spec.add_layer_specs();
  spec.add_layer_specs()->mutable_window()->set_left(50);
  spec.set_rollback_tokens(16);
  spec.set_window_capacity_tokens(2'048);
  return spec;
}

// One service, whose answers are told as they come.
class Answers : public Fleet {
 public:
  explicit Answers(int workers) : Fleet({.workers = workers}) { Fleet::SetUp(); }
  void TestBody() override {}

  void Create(const std::string& cache, const v1::CacheSpec& spec) {
    v1::CreateCacheRequest request;
    request.set_cache_id(cache);
    *request.mutable_spec() = spec;
    v1::CreateCacheReply reply;
    grpc::ClientContext context;
    const grpc::Status status = stub_->CreateCache(&context, request, &reply);
    ASSERT_TRUE(status.ok()) << status.error_message();
  }
  void Fork(const std::string& cache, uint64_t parent, uint64_t child, int64_t length) {
    v1::ForkSequenceRequest request;
    request.set_cache_id(cache);
    request.set_parent_id(parent);
    request.set_sequence_id(child);
    request.set_length(length);
    v1::ForkSequenceReply reply;
    grpc::ClientContext context;
    const grpc::Status status = stub_->ForkSequence(&context, request, &reply);
    ASSERT_TRUE(status.ok()) << status.error_message();
  }
  void Open(const std::string& cache, uint64_t sequence) {
    v1::OpenSequenceRequest request;
    request.set_cache_id(cache);
    request.set_sequence_id(sequence);
    v1::OpenSequenceReply reply;
    grpc::ClientContext context;
    ASSERT_TRUE(stub_->OpenSequence(&context, request, &reply).ok());
  }
  // Appends tokens that follow from the place, and returns the answer's bytes.
  std::string Step(const std::string& cache, uint64_t sequence, int64_t first, int32_t tokens) {
    std::string bytes;
    for (int32_t layer = 0; layer < 2; ++layer) {
      std::mt19937_64 random(sequence * 1'000'003 + static_cast<uint64_t>(first) * 2 +
                             static_cast<uint64_t>(layer));
      v1::AttendRequest request;
      request.set_cache_id(cache);
      request.set_layer(layer);
      request.set_mode(v1::ATTEND_MODE_CAUSAL);
      v1::AttendEntry* entry = request.add_entries();
      entry->set_sequence_id(sequence);
      entry->set_first_position(first);
      entry->set_query_rows(tokens);
      entry->set_new_tokens(tokens);
      const auto fill = [&](int32_t heads, v1::Tensor* tensor) {
        std::normal_distribution<float> normal;
        std::vector<float> values(static_cast<size_t>(tokens) * static_cast<size_t>(heads) * 64);
        for (float& value : values) value = normal(random);
        tensor->set_dtype(v1::DTYPE_F32);
        for (const int64_t dim : {int64_t{tokens}, int64_t{heads}, int64_t{64}}) {
          tensor->add_shape(dim);
        }
        tensor->mutable_inline_()->assign(reinterpret_cast<const char*>(values.data()),
                                          values.size() * sizeof(float));
      };
      fill(4, request.mutable_q());
      fill(2, request.mutable_k());
      fill(2, request.mutable_v());
      v1::AttendReply reply;
      grpc::ClientContext context;
      const grpc::Status status = stub_->Attend(&context, request, &reply);
      EXPECT_TRUE(status.ok()) << cache << ": " << status.error_message();
      bytes += reply.output().inline_();
    }
    return bytes;
  }
  // Starts the workers that are missing, and asks.
  void ResizeTo(int workers) {
    for (int rank = static_cast<int>(workers_.size()); rank < workers; ++rank) {
      workers_.push_back(Worker(rank));
    }
    v1::ChangeWorkersRequest request;
    request.set_workers(workers);
    v1::ChangeWorkersReply reply;
    const auto stub = v1::OperationsService::NewStub(
        grpc::CreateChannel(PublicAddress(directory_), grpc::InsecureChannelCredentials()));
    grpc::ClientContext context;
    const grpc::Status status = stub->ChangeWorkers(&context, request, &reply);
    ASSERT_TRUE(status.ok()) << status.error_message();
    EXPECT_EQ(reply.caches(), 5);  // that of the fleet, too
  }
};

class ResizedAnswers : public ::testing::TestWithParam<std::pair<int, int>> {};

TEST_P(ResizedAnswers, AreThoseOfAServiceThatAlwaysHadSoManyWorkers) {
  const auto [before, after] = GetParam();
  Answers changed(before), native(after);
  const std::vector<std::pair<std::string, v1::CacheSpec>> caches = {
      {"bf16", CacheOf(v1::DTYPE_BF16, 16, 16, false)},
      {"fp8", CacheOf(v1::DTYPE_FP8_E4M3, 32, 8, false)},
      {"f16", CacheOf(v1::DTYPE_F16, 64, 16, true)},
      {"e5m2", CacheOf(v1::DTYPE_FP8_E5M2, 16, 4, true)}};
  const auto fill = [&caches](Answers& service) {
    for (const auto& [cache, spec] : caches) {
      service.Create(cache, spec);
      service.Open(cache, 1);
      for (int64_t first = 0; first < 400; first += 50) service.Step(cache, 1, first, 50);
      service.Fork(cache, 1, 2, 390);
      service.Step(cache, 2, 390, 30);
    }
  };
  fill(changed);
  fill(native);
  ASSERT_NO_FATAL_FAILURE(changed.ResizeTo(after));
  for (const auto& [cache, spec] : caches) {
    for (int64_t step = 0; step < 3; ++step) {
      EXPECT_EQ(changed.Step(cache, 1, 400 + step, 1), native.Step(cache, 1, 400 + step, 1))
          << cache;
      EXPECT_EQ(changed.Step(cache, 2, 420 + step, 1), native.Step(cache, 2, 420 + step, 1))
          << cache;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, ResizedAnswers,
                         ::testing::Values(std::pair(2, 4), std::pair(4, 2), std::pair(3, 1)),
                         [](const auto& test) {
                           return std::to_string(test.param.first) + "_to_" +
                                  std::to_string(test.param.second);
                         });

}  // namespace
}  // namespace tributary::test
