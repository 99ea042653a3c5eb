// Sessions whose mailbox lies on a GPU, with service, workers and host as processes of their own:
// they give what calls give, for embedded workers and worker processes, one rank and several; and
// how they end when a process is killed or stopped.
#include <cuda_runtime.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "kernels/cpu/backend.h"
#include "service/client/client.h"
#include "service/client/cuda/device_session.h"
#include "tests/fault/programs.h"
#include "tests/support/process.h"
#include "worker/cuda_backend.h"

namespace tributary::test {
namespace {

using client::Client;
using client::DeviceSession;
using std::chrono::seconds;

constexpr seconds kPatience{60};
constexpr int32_t kQHeads = 16, kKvHeads = 2, kDim = 128, kLayers = 2, kMostRows = 256;
constexpr char kCache[] = "m";

// Memory of the GPU that is current, of bf16 elements.
class Elements {
 public:
  explicit Elements(size_t count) : count_(count) {
    EXPECT_EQ(cudaMalloc(&data_, count * sizeof(uint16_t)), cudaSuccess);
  }
  ~Elements() { cudaFree(data_); }
  Elements(const Elements&) = delete;
  Elements& operator=(const Elements&) = delete;

  void* data() const { return data_; }
  void Set(const std::vector<uint16_t>& values) const {
    EXPECT_EQ(
        cudaMemcpy(data_, values.data(), values.size() * sizeof(uint16_t), cudaMemcpyHostToDevice),
        cudaSuccess);
    // A small copy from pageable memory may return before it is there, and the session's stream
    // waits for no other.
    EXPECT_EQ(cudaStreamSynchronize(cudaStreamLegacy), cudaSuccess);
  }
  std::vector<float> Get(size_t count) const {
    std::vector<uint16_t> values(count);
    EXPECT_EQ(cudaMemcpy(values.data(), data_, count * sizeof(uint16_t), cudaMemcpyDeviceToHost),
              cudaSuccess);
    std::vector<float> floats(count);
    cpu::Convert(DType::kBf16, values.data(), DType::kF32, floats.data(), count);
    return floats;
  }

 private:
  const size_t count_;
  void* data_ = nullptr;
};

std::vector<uint16_t> Randoms(size_t count, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> floats(count);
  for (float& value : floats) value = normal(random);
  std::vector<uint16_t> values(count);
  cpu::Convert(DType::kF32, floats.data(), DType::kBf16, values.data(), count);
  return values;
}

// How the workers are spread, and which GPU the host computes on.
struct Case {
  bool processes;
  int workers;
  int host_gpu;
};

std::string NameOf(const ::testing::TestParamInfo<Case>& info) {
  return std::to_string(info.param.workers) + (info.param.processes ? "_processes" : "_embedded") +
         "_host_on_gpu_" + std::to_string(info.param.host_gpu);
}

class DeviceSessionTest : public ::testing::TestWithParam<Case> {
 protected:
  void SetUp() override {
    const int needed = std::max(GetParam().workers, GetParam().host_gpu + 1);
    if (const absl::Status gpus = worker::CheckGpus(0, needed); !gpus.ok()) {
      GTEST_SKIP() << gpus.message();
    }
    ASSERT_EQ(cudaSetDevice(GetParam().host_gpu), cudaSuccess);
    ASSERT_EQ(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), cudaSuccess);
    Coordinate();
    for (int rank = 0; rank < GetParam().workers && GetParam().processes; ++rank) {
      workers_.push_back(Worker(rank));
    }
    Connect();
  }
  void TearDown() override {
    if (stream_ != nullptr) cudaStreamDestroy(stream_);
  }

  void Coordinate() {
    const std::vector<std::string> flags = {"--device=cuda", "--step_timeout=10s"};
    coordinator_ = GetParam().processes ? StartCoordinator(directory_, GetParam().workers, flags)
                                        : StartEmbedded(directory_, GetParam().workers, flags);
  }
  std::unique_ptr<ChildProcess> Worker(int rank) {
    return StartWorker(directory_, WorkerAddress(directory_), rank, {"--device=cuda"});
  }
  void Connect() {
    auto client = Client::Connect({.target = PublicAddress(directory_), .timeout = kPatience});
    ASSERT_TRUE(client.ok()) << client.status();
    client_ = *std::move(client);
    v1::CacheSpec spec;
    spec.set_layers(kLayers);
    spec.set_q_heads(kQHeads);
    spec.set_kv_heads(kKvHeads);
    spec.set_head_dim(kDim);
    spec.set_page_size(16);
    spec.set_kv_dtype(v1::DTYPE_BF16);
    spec.set_capacity_tokens(1 << 16);
    ASSERT_TRUE(Eventually(kPatience, [&] { return client_->CreateCache(kCache, spec).ok(); }));
  }
  bool WaitReady() {
    return Eventually(kPatience, [&] {
      const auto topology = client_->GetTopology({});
      return topology.ok() && topology->state() == v1::GROUP_STATE_READY;
    });
  }
  bool WaitForSessions(int count) {
    return Eventually(kPatience, [&] {
      const auto topology = client_->GetTopology({});
      return topology.ok() && topology->sessions_size() == count;
    });
  }

  std::unique_ptr<DeviceSession> OpenSession(std::chrono::milliseconds wait_timeout = seconds(20)) {
    auto session = DeviceSession::Open({.target = PublicAddress(directory_), .timeout = kPatience},
                                       {.cache_id = kCache,
                                        .max_rows = kMostRows,
                                        .max_new_tokens = kMostRows,
                                        .wait_timeout = wait_timeout});
    EXPECT_TRUE(session.ok()) << session.status();
    return session.ok() ? *std::move(session) : nullptr;
  }
  static client::SessionStep StepOf(uint64_t sequence, int64_t position, int32_t rows,
                                    bool append_only = false) {
    return {.layers = kLayers,
            .entries = {{.sequence_id = sequence,
                         .first_position = position,
                         .query_rows = append_only ? 0 : rows,
                         .new_tokens = rows}},
            .append_only = append_only};
  }
  static client::HeadRows Rows(const Elements& data, int32_t rows, int32_t heads) {
    return {.data = data.data(), .rows = rows, .heads = heads, .dim = kDim};
  }

  // New tokens of two sequences alike: of `called` by a call per layer, of `stepped` by a step.
  void StepBoth(DeviceSession& session, uint64_t called, uint64_t stepped, int64_t position,
                int32_t rows, bool append_only = false) {
    const size_t q_count = size_t(rows) * kQHeads * kDim;
    const size_t kv_count = size_t(rows) * kKvHeads * kDim;
    const auto step = session.Submit(StepOf(stepped, position, rows, append_only));
    ASSERT_TRUE(step.ok()) << step.status();
    const Elements q_device(q_count), k_device(kv_count), v_device(kv_count), o_device(q_count);
    for (int32_t layer = 0; layer < kLayers; ++layer) {
      const uint64_t seed = uint64_t(position) * 8 + uint64_t(layer) * 4;
      const auto q = Randoms(q_count, seed);
      const auto k = Randoms(kv_count, seed + 1);
      const auto v = Randoms(kv_count, seed + 2);
      q_device.Set(q);
      k_device.Set(k);
      v_device.Set(v);
      const client::HeadRows k_rows = Rows(k_device, rows, kKvHeads);
      const client::HeadRows v_rows = Rows(v_device, rows, kKvHeads);
      const absl::Status launched =
          append_only ? session.Append(stream_, k_rows, v_rows)
                      : session.Attend(stream_, {.q = Rows(q_device, rows, kQHeads),
                                                 .k = k_rows,
                                                 .v = v_rows,
                                                 .output = Rows(o_device, rows, kQHeads)});
      ASSERT_TRUE(launched.ok()) << launched;
      ASSERT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);
      ASSERT_TRUE(session.status().ok()) << session.status();
      std::vector<uint16_t> want(q_count);
      client::AttendCall call{.cache_id = kCache,
                              .layer = layer,
                              .entries = {{called, position, rows, rows}},
                              .dtype = v1::DTYPE_BF16,
                              .q = q.data(),
                              .k = k.data(),
                              .v = v.data(),
                              .q_heads = kQHeads,
                              .kv_heads = kKvHeads,
                              .head_dim = kDim,
                              .output = want.data()};
      ASSERT_TRUE(client_->Attend(call).ok());
      if (append_only) continue;
      std::vector<float> expected(q_count);
      cpu::Convert(DType::kBf16, want.data(), DType::kF32, expected.data(), q_count);
      const std::vector<float> got = o_device.Get(q_count);
      for (size_t i = 0; i < q_count; ++i) {
        ASSERT_NEAR(got[i], expected[i], 2e-2f) << "element " << i << " at " << position;
      }
    }
    const absl::Status ended = session.Await(*step);
    ASSERT_TRUE(ended.ok()) << ended;
  }
  uint64_t OpenSequence() {
    const auto sequence = client_->OpenSequence(kCache);
    EXPECT_TRUE(sequence.ok()) << sequence.status();
    return sequence.value_or(0);
  }
  void ServesASession() {
    const auto session = OpenSession();
    ASSERT_NE(session, nullptr);
    StepBoth(*session, OpenSequence(), OpenSequence(), 0, 70);
  }

  // Hands a layer of one row over for which nothing comes back, as something has been done to the
  // service: the launch ends, its result is NaN, and the session says why.
  void ExpectEnd(DeviceSession& session) {
    const Elements q(kQHeads * kDim), kv(kKvHeads * kDim), o(kQHeads * kDim);
    const auto begin = std::chrono::steady_clock::now();
    ASSERT_TRUE(session
                    .Attend(stream_, {.q = Rows(q, 1, kQHeads),
                                      .k = Rows(kv, 1, kKvHeads),
                                      .v = Rows(kv, 1, kKvHeads),
                                      .output = Rows(o, 1, kQHeads)})
                    .ok());
    ASSERT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);
    EXPECT_LT(std::chrono::steady_clock::now() - begin, seconds(30));
    EXPECT_FALSE(session.status().ok());
    for (const float x : o.Get(kQHeads * kDim)) ASSERT_TRUE(std::isnan(x));
  }

  TemporaryDirectory directory_;
  std::unique_ptr<ChildProcess> coordinator_;
  std::vector<std::unique_ptr<ChildProcess>> workers_;  // by rank
  std::unique_ptr<Client> client_;
  cudaStream_t stream_ = nullptr;
};

TEST_P(DeviceSessionTest, GivesWhatCallsGive) {
  const auto session = OpenSession();
  ASSERT_NE(session, nullptr);
  std::printf("waiting: %s, a round trip takes %.1f us; %s\n",
              v1::Waiting_Name(session->opened().waiting()).c_str(),
              session->opened().round_trip_seconds() * 1e6, session->opened().warning().c_str());
  EXPECT_GT(session->opened().round_trip_seconds(), 0);
  ASSERT_TRUE(WaitForSessions(1));
  const uint64_t called = OpenSequence();
  const uint64_t stepped = OpenSequence();
  int64_t position = 0;
  for (const int32_t rows : {70, 1, 1, 4, 200, 1, 16, 1, 1, 1, 1, 1}) {
    ASSERT_NO_FATAL_FAILURE(StepBoth(*session, called, stepped, position, rows));
    position += rows;
    // What several ranks have written is there for all of them when the next step begins.
    ASSERT_NO_FATAL_FAILURE(StepBoth(*session, called, stepped, position, 17, true));
    position += 17;
  }
}

TEST_P(DeviceSessionTest, TwoSessionsTakeNoNoticeOfAThirdThatIsSilent) {
  const auto silent = OpenSession();
  const auto a = OpenSession();
  const auto b = OpenSession();
  ASSERT_TRUE(silent != nullptr && a != nullptr && b != nullptr);
  ASSERT_TRUE(silent->Submit(StepOf(OpenSequence(), 0, 1)).ok());
  const uint64_t sequences[] = {OpenSequence(), OpenSequence(), OpenSequence(), OpenSequence()};
  for (int64_t position = 0; position < 10; ++position) {
    ASSERT_NO_FATAL_FAILURE(StepBoth(*a, sequences[0], sequences[1], position, 1));
    ASSERT_NO_FATAL_FAILURE(StepBoth(*b, sequences[2], sequences[3], position, 1));
  }
}

TEST_P(DeviceSessionTest, ASilentHostLosesItsSessionAlone) {
  const auto silent = OpenSession(std::chrono::milliseconds(500));
  const auto other = OpenSession();
  ASSERT_TRUE(silent != nullptr && other != nullptr);
  const auto step = silent->Submit(StepOf(OpenSequence(), 0, 1));
  ASSERT_TRUE(step.ok());
  EXPECT_EQ(silent->Await(*step).code(), absl::StatusCode::kDeadlineExceeded);
  ASSERT_NO_FATAL_FAILURE(ExpectEnd(*silent));
  ASSERT_NO_FATAL_FAILURE(StepBoth(*other, OpenSequence(), OpenSequence(), 0, 5));
  EXPECT_TRUE(WaitForSessions(1));
}

TEST_P(DeviceSessionTest, AKilledCoordinatorEndsSessions) {
  const auto session = OpenSession();
  ASSERT_NE(session, nullptr);
  ASSERT_TRUE(session->Submit(StepOf(OpenSequence(), 0, 1)).ok());
  coordinator_->Signal(SIGKILL);
  ASSERT_EQ(coordinator_->Wait(seconds(20)), -SIGKILL);
  ASSERT_TRUE(Eventually(kPatience, [&] { return !session->status().ok(); }));
  ExpectEnd(*session);
}

TEST_P(DeviceSessionTest, AKilledWorkerEndsSessions) {
  if (!GetParam().processes) GTEST_SKIP() << "an embedded worker dies with its coordinator";
  for (size_t victim = 0; victim < workers_.size(); ++victim) {
    const auto session = OpenSession();
    ASSERT_NE(session, nullptr);
    const uint64_t sequence = OpenSequence();
    ASSERT_TRUE(session->Submit(StepOf(sequence, 0, 1)).ok());
    workers_[victim]->Signal(SIGKILL);
    ASSERT_EQ(workers_[victim]->Wait(seconds(20)), -SIGKILL);
    ASSERT_NO_FATAL_FAILURE(ExpectEnd(*session));
    workers_[victim] = Worker(static_cast<int>(victim));
    ASSERT_TRUE(WaitReady());
    ASSERT_NO_FATAL_FAILURE(ServesASession());
  }
}

// What it does when it goes on, nobody reads.
TEST_P(DeviceSessionTest, AStoppedWorkerEndsSessions) {
  if (!GetParam().processes) GTEST_SKIP() << "an embedded worker stops with its coordinator";
  const auto session = OpenSession();
  ASSERT_NE(session, nullptr);
  ASSERT_TRUE(session->Submit(StepOf(OpenSequence(), 0, 1)).ok());
  workers_.front()->Pause();
  ASSERT_TRUE(Eventually(kPatience, [&] { return !session->status().ok(); }));
  ASSERT_NO_FATAL_FAILURE(ExpectEnd(*session));
  workers_.front()->Resume();
  ASSERT_TRUE(WaitReady());
  ServesASession();
}

// The host is a process of its own that holds nothing but a session with a step that waits for it.
TEST_P(DeviceSessionTest, AKilledHostGivesItsSequenceBack) {
  const uint64_t sequence = OpenSequence();
  ChildProcess host(
      {"/proc/self/exe", "--host_of=" + PublicAddress(directory_),
       "--sequence=" + std::to_string(sequence), "--gpu=" + std::to_string(GetParam().host_gpu)},
      directory_.File("host.log"));
  ASSERT_TRUE(WaitForSessions(1));
  host.Signal(SIGKILL);
  ASSERT_EQ(host.Wait(seconds(20)), -SIGKILL);
  ASSERT_TRUE(WaitForSessions(0));
  const auto session = OpenSession();
  ASSERT_NE(session, nullptr);
  StepBoth(*session, OpenSequence(), sequence, 0, 3);
}

INSTANTIATE_TEST_SUITE_P(Groups, DeviceSessionTest,
                         ::testing::Values(Case{false, 1, 0}, Case{true, 1, 0}, Case{true, 1, 1},
                                           Case{false, 2, 0}, Case{true, 2, 0}, Case{true, 2, 1}),
                         NameOf);

// The host of AKilledHostGivesItsSequenceBack. Does not return.
[[noreturn]] void RunHost(const std::string& target, uint64_t sequence, int gpu) {
  cudaSetDevice(gpu);
  const auto session = DeviceSession::Open({.target = target, .timeout = kPatience},
                                           {.cache_id = kCache, .wait_timeout = seconds(60)});
  const client::SessionStep step{
      .layers = kLayers, .entries = {{.sequence_id = sequence, .query_rows = 1, .new_tokens = 1}}};
  if (!session.ok() || !(*session)->Submit(step).ok()) std::_Exit(1);
  while (true) pause();
}

}  // namespace
}  // namespace tributary::test

int main(int argc, char** argv) {
  std::string target, sequence, gpu;
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    const auto take = [&](const std::string& name, std::string* to) {
      if (argument.rfind(name, 0) == 0) *to = argument.substr(name.size());
    };
    take("--host_of=", &target);
    take("--sequence=", &sequence);
    take("--gpu=", &gpu);
  }
  if (!target.empty()) tributary::test::RunHost(target, std::stoull(sequence), std::stoi(gpu));
  ::testing::InitGoogleMock(&argc, argv);
  return RUN_ALL_TESTS();
}
