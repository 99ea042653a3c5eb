// Sessions whose mailbox lies on a GPU, with service, workers and host as processes of their own:
// they give what calls give, for embedded workers and worker processes, one rank and several, with
// one process of the host and with several; and how they end when a process is killed or stopped.
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
#include <fstream>
#include <map>
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

// The tokens that a step brings to a sequence at `position`, in one layer.
struct Inputs {
  Inputs(int64_t position, int32_t layer, int32_t rows)
      : q(Randoms(size_t(rows) * kQHeads * kDim, Seed(position, layer))),
        k(Randoms(size_t(rows) * kKvHeads * kDim, Seed(position, layer) + 1)),
        v(Randoms(size_t(rows) * kKvHeads * kDim, Seed(position, layer) + 2)) {}
  std::vector<uint16_t> q, k, v;

 private:
  static uint64_t Seed(int64_t position, int32_t layer) {
    return uint64_t(position) * 8 + uint64_t(layer) * 4;
  }
};

client::SessionStep StepOf(uint64_t sequence, int64_t position, int32_t rows,
                           bool append_only = false) {
  return {.layers = kLayers,
          .entries = {{.sequence_id = sequence,
                       .first_position = position,
                       .query_rows = append_only ? 0 : rows,
                       .new_tokens = rows}},
          .append_only = append_only};
}

// How many rows the steps have that a host of several processes makes. The last is larger than a
// slot.
constexpr int32_t kSharedSteps[] = {70, 1, 1, 4, 200, 1, 16, 600};

// An endpoint's part of such a step, layer by layer: it calls `done` with the output of its heads,
// as bf16, and their first one. Ends at once when the session does, with why.
template <typename Done>
absl::Status DriveEndpoint(DeviceSession& session, cudaStream_t stream, uint64_t sequence,
                           int64_t position, int32_t rows, const Done& done) {
  const auto step = session.Submit(StepOf(sequence, position, rows));
  if (!step.ok()) return step.status();
  const v1::LayerShape& shape = session.opened().shapes(0);
  const size_t own = size_t(rows) * size_t(shape.q_heads()) * kDim;
  const Elements q(size_t(rows) * kQHeads * kDim), k(size_t(rows) * kKvHeads * kDim),
      v(size_t(rows) * kKvHeads * kDim), o(own);
  const auto part = [rows](const Elements& all, int32_t heads, int32_t first, int32_t count) {
    client::HeadRows own_part{
        .rows = rows, .heads = count, .dim = kDim, .row_stride = heads * kDim};
    if (count > 0) own_part.data = static_cast<uint16_t*>(all.data()) + size_t(first) * kDim;
    return own_part;
  };
  for (int32_t layer = 0; layer < kLayers; ++layer) {
    const Inputs inputs(position, layer, rows);
    q.Set(inputs.q);
    k.Set(inputs.k);
    v.Set(inputs.v);
    const absl::Status launched =
        session.Attend(stream, {.q = part(q, kQHeads, shape.first_q_head(), shape.q_heads()),
                                .k = part(k, kKvHeads, shape.first_kv_head(), shape.kv_heads()),
                                .v = part(v, kKvHeads, shape.first_kv_head(), shape.kv_heads()),
                                .output = part(o, shape.q_heads(), 0, shape.q_heads())});
    if (!launched.ok()) return launched;
    if (cudaStreamSynchronize(stream) != cudaSuccess) return absl::InternalError("CUDA");
    if (!session.status().ok()) return session.status();
    done(layer, shape.first_q_head(), o.Get(own));
  }
  return session.Await(*step);
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
  static client::HeadRows Rows(const Elements& data, int32_t rows, int32_t heads) {
    return {.data = data.data(), .rows = rows, .heads = heads, .dim = kDim};
  }

  // What a call gives for these tokens of a sequence, whose output is bf16.
  std::vector<float> Call(uint64_t sequence, int64_t position, int32_t layer, int32_t rows) {
    const Inputs inputs(position, layer, rows);
    std::vector<uint16_t> want(inputs.q.size());
    const client::AttendCall call{.cache_id = kCache,
                                  .layer = layer,
                                  .entries = {{sequence, position, rows, rows}},
                                  .dtype = v1::DTYPE_BF16,
                                  .q = inputs.q.data(),
                                  .k = inputs.k.data(),
                                  .v = inputs.v.data(),
                                  .q_heads = kQHeads,
                                  .kv_heads = kKvHeads,
                                  .head_dim = kDim,
                                  .output = want.data()};
    const absl::Status called = client_->Attend(call);
    EXPECT_TRUE(called.ok()) << called;
    std::vector<float> expected(want.size());
    cpu::Convert(DType::kBf16, want.data(), DType::kF32, expected.data(), want.size());
    return expected;
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
      const Inputs inputs(position, layer, rows);
      q_device.Set(inputs.q);
      k_device.Set(inputs.k);
      v_device.Set(inputs.v);
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
      const std::vector<float> expected = Call(called, position, layer, rows);
      if (append_only) continue;
      const std::vector<float> got = o_device.Get(q_count);
      for (size_t i = 0; i < q_count; ++i) {
        ASSERT_NEAR(got[i], expected[i], 2e-2f) << "element " << i << " at " << position;
      }
    }
    const absl::Status ended = session.Await(*step);
    ASSERT_TRUE(ended.ok()) << ended;
  }

  // A session with so many endpoints, of which this process is the first; the others are processes
  // that make kSharedSteps of `sequence`, and stop before layer 1 of step `stop_at`.
  std::unique_ptr<DeviceSession> OpenShared(int32_t endpoints, uint64_t sequence, int stop_at = -1,
                                            std::chrono::milliseconds wait_timeout = seconds(20)) {
    auto session = DeviceSession::Open({.target = PublicAddress(directory_), .timeout = kPatience},
                                       {.cache_id = kCache,
                                        .max_rows = kMostRows,
                                        .max_new_tokens = kMostRows,
                                        .wait_timeout = wait_timeout,
                                        .endpoints = endpoints});
    EXPECT_TRUE(session.ok()) << session.status();
    if (!session.ok()) return nullptr;
    int gpus = 1;
    cudaGetDeviceCount(&gpus);
    for (int32_t e = 1; e < endpoints; ++e) {
      const std::string number = std::to_string(e);
      std::string secret;
      for (const char c : (*session)->opened().endpoint_secret()) {
        secret += "0123456789abcdef"[uint8_t(c) >> 4];
        secret += "0123456789abcdef"[uint8_t(c) & 15];
      }
      endpoints_.push_back(std::make_unique<ChildProcess>(
          std::vector<std::string>{"/proc/self/exe", "--endpoint_of=" + PublicAddress(directory_),
                                   "--session=" + std::to_string((*session)->opened().session_id()),
                                   "--secret=" + secret, "--endpoint=" + number,
                                   "--sequence=" + std::to_string(sequence),
                                   "--gpu=" + std::to_string((GetParam().host_gpu + e) % gpus),
                                   "--stop_at=" + std::to_string(stop_at),
                                   "--results=" + Results(e)},
          directory_.File("endpoint" + number + ".log")));
    }
    return *std::move(session);
  }
  std::string Results(int32_t endpoint) const {
    return directory_.File("results" + std::to_string(endpoint));
  }
  bool WaitForEndpoints(int count) {
    return Eventually(kPatience, [&] {
      const auto topology = client_->GetTopology({});
      return topology.ok() && topology->sessions_size() == 1 &&
             topology->sessions(0).endpoints_joined() == count;
    });
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
  std::vector<std::unique_ptr<ChildProcess>> workers_;    // by rank
  std::vector<std::unique_ptr<ChildProcess>> endpoints_;  // from endpoint 1 on
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

// Steps that are larger than a slot, alone and among others.
TEST_P(DeviceSessionTest, PromptsGoInPieces) {
  const auto session = OpenSession();
  ASSERT_NE(session, nullptr);
  const uint64_t called = OpenSequence();
  const uint64_t stepped = OpenSequence();
  int64_t position = 0;
  for (const int32_t rows : {kMostRows * 4 + 17, 1, kMostRows + 1, 3}) {
    ASSERT_NO_FATAL_FAILURE(StepBoth(*session, called, stepped, position, rows));
    position += rows;
    ASSERT_NO_FATAL_FAILURE(StepBoth(*session, called, stepped, position, 2 * kMostRows, true));
    position += 2 * kMostRows;
  }
  // Nobody has submitted a step of so many rows.
  const Elements q(size_t(kMostRows + 9) * kQHeads * kDim);
  const client::HeadRows rows = Rows(q, kMostRows + 9, kQHeads);
  const absl::Status refused = session->Attend(stream_, {.q = rows});
  EXPECT_EQ(refused.code(), absl::StatusCode::kInvalidArgument) << refused;
  ASSERT_NO_FATAL_FAILURE(StepBoth(*session, called, stepped, position, 1));
}

TEST_P(DeviceSessionTest, LayersAreTimedOnTheGpus) {
  auto session = DeviceSession::Open(
      {.target = PublicAddress(directory_), .timeout = kPatience},
      {.cache_id = kCache, .max_rows = 64, .max_new_tokens = 64, .timed = true});
  ASSERT_TRUE(session.ok()) << session.status();
  const uint64_t called = OpenSequence();
  const uint64_t stepped = OpenSequence();
  for (int64_t position = 0; position < 5; ++position) {
    ASSERT_NO_FATAL_FAILURE(StepBoth(**session, called, stepped, position, 1));
  }
  const std::vector<client::LayerTimes> times = (*session)->TakeTimes();
  ASSERT_EQ(times.size(), size_t{5 * kLayers});
  for (const client::LayerTimes& layer : times) {
    EXPECT_GE(layer.fill, 0);
    EXPECT_GT(layer.attention, 0);
    EXPECT_GE(layer.wait, layer.attention + layer.exchange);
    EXPECT_EQ(layer.exchange > 0, GetParam().workers > 1);
    EXPECT_LT(layer.wait, 20);
    EXPECT_GE(layer.ring_seen, 0);
    EXPECT_GE(layer.ring_back, 0);
  }
  const client::LayerTimes& last = times.back();
  std::printf("fill %.1f, ring seen %.1f, attention %.1f, exchange %.1f, ring back %.1f us\n",
              last.fill * 1e6, last.ring_seen * 1e6, last.attention * 1e6, last.exchange * 1e6,
              last.ring_back * 1e6);
  EXPECT_TRUE((*session)->TakeTimes().empty());
}

// The host is several processes, each with some of the heads.
TEST_P(DeviceSessionTest, EndpointsTogetherGetWhatCallsGive) {
  for (const int32_t endpoints : {2, 4}) {
    const uint64_t called = OpenSequence();
    const uint64_t stepped = OpenSequence();
    const auto session = OpenShared(endpoints, stepped);
    ASSERT_NE(session, nullptr);
    std::map<std::pair<int64_t, int32_t>, std::vector<float>> expected;  // by position and layer
    std::vector<std::vector<float>> own;
    int64_t position = 0;
    for (const int32_t rows : kSharedSteps) {
      const absl::Status done = DriveEndpoint(
          *session, stream_, stepped, position, rows,
          [&own](int32_t, int32_t, std::vector<float> output) { own.push_back(output); });
      ASSERT_TRUE(done.ok()) << done;
      for (int32_t layer = 0; layer < kLayers; ++layer) {
        expected[{position, layer}] = Call(called, position, layer, rows);
      }
      position += rows;
    }
    const auto check = [&](int32_t e, const std::vector<std::vector<float>>& outputs) {
      const int32_t heads = kQHeads / endpoints;
      size_t next = 0;
      int64_t at = 0;
      for (const int32_t rows : kSharedSteps) {
        for (int32_t layer = 0; layer < kLayers; ++layer, ++next) {
          ASSERT_LT(next, outputs.size());
          const std::vector<float>& want = expected[{at, layer}];
          const std::vector<float>& got = outputs[next];
          ASSERT_EQ(got.size(), size_t(rows) * size_t(heads) * kDim);
          for (size_t i = 0; i < got.size(); ++i) {
            const size_t row = i / (size_t(heads) * kDim);
            const size_t of_row = i % (size_t(heads) * kDim);
            const size_t all = (row * kQHeads + size_t(e * heads)) * kDim + of_row;
            ASSERT_NEAR(got[i], want[all], 2e-2f) << "endpoint " << e << ", step at " << at;
          }
        }
        at += rows;
      }
    };
    check(0, own);
    for (int32_t e = 1; e < endpoints; ++e) {
      ASSERT_EQ(endpoints_[size_t(e - 1)]->Wait(seconds(60)), 0) << "endpoint " << e;
      std::ifstream file(Results(e), std::ios::binary);
      std::vector<std::vector<float>> outputs;
      for (const int32_t rows : kSharedSteps) {
        for (int32_t layer = 0; layer < kLayers; ++layer) {
          outputs.emplace_back(size_t(rows) * size_t(kQHeads / endpoints) * kDim);
          file.read(reinterpret_cast<char*>(outputs.back().data()),
                    std::streamsize(outputs.back().size() * sizeof(float)));
        }
      }
      ASSERT_TRUE(file.good());
      check(e, outputs);
    }
    endpoints_.clear();
  }
}

TEST_P(DeviceSessionTest, AnEndpointKilledInTheMidstOfAStepEndsTheSession) {
  const uint64_t sequence = OpenSequence();
  const auto session = OpenShared(2, sequence, /*stop_at=*/0);
  ASSERT_NE(session, nullptr);
  ASSERT_TRUE(WaitForEndpoints(2));
  const absl::Status ended = DriveEndpoint(*session, stream_, sequence, 0, kSharedSteps[0],
                                           [&](int32_t, int32_t, const std::vector<float>&) {
                                             // Layer 0 is through on both sides.
                                             endpoints_[0]->Signal(SIGKILL);
                                           });
  EXPECT_FALSE(ended.ok());
  const absl::Status why = session->Await(1);
  EXPECT_EQ(why.code(), absl::StatusCode::kAborted) << why;
  EXPECT_THAT(std::string(why.message()), ::testing::HasSubstr("endpoint 1"));
  ASSERT_TRUE(WaitForSessions(0));
  const auto other = OpenSession();  // and the sequence is as it was
  ASSERT_NE(other, nullptr);
  StepBoth(*other, OpenSequence(), sequence, 0, 3);
}

TEST_P(DeviceSessionTest, ASilentEndpointEndsTheSession) {
  const uint64_t sequence = OpenSequence();
  const auto session = OpenShared(2, sequence, /*stop_at=*/0, seconds(3));
  ASSERT_NE(session, nullptr);
  ASSERT_TRUE(WaitForEndpoints(2));
  const absl::Status ended = DriveEndpoint(*session, stream_, sequence, 0, kSharedSteps[0],
                                           [](int32_t, int32_t, const std::vector<float>&) {});
  EXPECT_FALSE(ended.ok());
  const absl::Status why = session->Await(1);
  EXPECT_EQ(why.code(), absl::StatusCode::kDeadlineExceeded) << why;
  if (session->opened().waiting() == v1::WAITING_SPINNING_WARP) {
    EXPECT_THAT(std::string(why.message()), ::testing::HasSubstr("endpoint 1"));
  }
  EXPECT_TRUE(WaitForSessions(0));
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

// What an endpoint is told by the process that opened the session.
struct EndpointFlags {
  std::string target, session, secret, endpoint, sequence, gpu, stop_at, results;
};

std::string FromHex(const std::string& digits) {
  std::string bytes;
  for (size_t i = 0; i + 1 < digits.size(); i += 2) {
    bytes += static_cast<char>(std::stoi(digits.substr(i, 2), nullptr, 16));
  }
  return bytes;
}

// An endpoint of OpenShared. Writes the outputs of its heads to a file, and returns the program's
// exit code; or stops where it is told to.
int RunEndpoint(const EndpointFlags& flags) {
  cudaStream_t stream = nullptr;
  if (cudaSetDevice(std::stoi(flags.gpu)) != cudaSuccess ||
      cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) != cudaSuccess) {
    return 1;
  }
  const auto session = DeviceSession::Join({.target = flags.target, .timeout = kPatience},
                                           {.session_id = std::stoull(flags.session),
                                            .secret = FromHex(flags.secret),
                                            .endpoint = std::stoi(flags.endpoint)});
  if (!session.ok()) {
    std::fprintf(stderr, "%s\n", session.status().ToString().c_str());
    return 1;
  }
  std::ofstream file(flags.results, std::ios::binary);
  int64_t position = 0;
  int number = 0;
  for (const int32_t rows : kSharedSteps) {
    const absl::Status done =
        DriveEndpoint(**session, stream, std::stoull(flags.sequence), position, rows,
                      [&](int32_t, int32_t, const std::vector<float>& output) {
                        file.write(reinterpret_cast<const char*>(output.data()),
                                   std::streamsize(output.size() * sizeof(float)));
                        while (number == std::stoi(flags.stop_at)) pause();
                      });
    if (!done.ok()) {
      std::fprintf(stderr, "step %d: %s\n", number, done.ToString().c_str());
      return 1;
    }
    position += rows;
    ++number;
  }
  return file.flush().good() ? 0 : 1;
}

}  // namespace
}  // namespace tributary::test

int main(int argc, char** argv) {
  std::string host_of;
  tributary::test::EndpointFlags flags;
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    const auto take = [&](const std::string& name, std::string* to) {
      if (argument.rfind(name, 0) == 0) *to = argument.substr(name.size());
    };
    take("--host_of=", &host_of);
    take("--endpoint_of=", &flags.target);
    take("--session=", &flags.session);
    take("--secret=", &flags.secret);
    take("--endpoint=", &flags.endpoint);
    take("--sequence=", &flags.sequence);
    take("--gpu=", &flags.gpu);
    take("--stop_at=", &flags.stop_at);
    take("--results=", &flags.results);
  }
  if (!host_of.empty()) {
    tributary::test::RunHost(host_of, std::stoull(flags.sequence), std::stoi(flags.gpu));
  }
  if (!flags.target.empty()) return tributary::test::RunEndpoint(flags);
  ::testing::InitGoogleMock(&argc, argv);
  return RUN_ALL_TESTS();
}
