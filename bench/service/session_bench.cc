// What a layer costs a host whose GPU drives the layers of a session: one process is the host, the
// coordinator with its GPU worker is another, or the same (--embedded). `dcp_step_bench --ranks 1`
// says in the same run what the GPU alone takes. See README.md.
#include <cuda_runtime.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <latch>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "nlohmann/json.hpp"
#include "service/client/client.h"
#include "service/client/cuda/device_session.h"
#include "service/embedded/embedded_service.h"
#include "worker/backends.h"
#include "worker/cuda_backend.h"

ABSL_FLAG(std::string, target, "unix:/tmp/tributary.sock", "Where the coordinator listens.");
ABSL_FLAG(bool, embedded, false,
          "The service is in this process, on the host's GPU, with its socket at --target.");
ABSL_FLAG(std::vector<std::string>, cases,
          std::vector<std::string>({"1x4096", "32x4096", "1x65536"}), "BATCHxTOKENS each.");
ABSL_FLAG(int32_t, layers, 32, "Layers of the model.");
ABSL_FLAG(int32_t, q_heads, 32, "Query heads.");
ABSL_FLAG(int32_t, kv_heads, 4, "Key-value heads.");
ABSL_FLAG(int32_t, head_dim, 128, "Dimensions of a head.");
ABSL_FLAG(int32_t, rows, 1,
          "Query rows per sequence: 1 decodes, more verify, or are a draft's block.");
ABSL_FLAG(bool, dflash, false, "Rows are a draft's block.");
ABSL_FLAG(int32_t, steps, 300, "Steps measured per case.");
ABSL_FLAG(bool, copy_out, false, "Results are copied out of the slot.");
ABSL_FLAG(int32_t, gpu, 0, "The host's GPU, by CUDA's ordinal.");
ABSL_FLAG(int32_t, endpoints, 1,
          "Endpoints that the heads are split over, here threads of the one process.");
ABSL_FLAG(bool, spread, false, "Endpoints take the GPUs in turn, from --gpu on.");
ABSL_FLAG(std::string, json, "", "Where to write the figures.");

namespace tributary::client {
namespace {

[[noreturn]] void Fail(const std::string& why) {
  std::fprintf(stderr, "session_bench: %s\n", why.c_str());
  std::exit(1);
}
void Check(const absl::Status& status, const std::string& what) {
  if (!status.ok()) Fail(what + ": " + status.ToString());
}
template <typename T>
T Value(absl::StatusOr<T> value, const std::string& what) {
  Check(value.status(), what);
  return *std::move(value);
}
void Check(cudaError_t error, const char* what) {
  if (error != cudaSuccess) Fail(std::string(what) + ": " + cudaGetErrorString(error));
}

constexpr int32_t kFillTokens = 2048;

struct Case {
  int32_t batch = 1;
  int64_t tokens = 0;
  std::string name;
};

struct Figures {
  double us_per_layer = 0;  // median
  double wall_us_per_layer = 0;
  double p99_over_p50 = 0;
  double worst_error = 0;  // of the first step against calls
  std::string waiting;     // v1::Waiting
  double round_trip_us = 0;
};

// bf16 values about 1 in size, on the device.
class Values {
 public:
  Values(size_t count, uint32_t seed) : host_(count) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    for (uint16_t& x : host_) {
      const float value = normal(random);
      uint32_t bits;
      std::memcpy(&bits, &value, sizeof(bits));
      x = static_cast<uint16_t>(bits >> 16);
    }
    Check(cudaMalloc(&device_, count * sizeof(uint16_t)), "memory");
    Check(cudaMemcpy(device_, host_.data(), count * sizeof(uint16_t), cudaMemcpyHostToDevice),
          "values");
  }
  ~Values() { cudaFree(device_); }
  Values(const Values&) = delete;
  Values& operator=(const Values&) = delete;

  uint16_t* device() const { return device_; }
  const uint16_t* host() const { return host_.data(); }

 private:
  std::vector<uint16_t> host_;
  uint16_t* device_ = nullptr;
};

// q, k and v of all heads, and an output. Every endpoint has the same values.
struct Tensors {
  explicit Tensors(int32_t step_rows, int32_t most_tokens)
      : rows(step_rows),
        q(static_cast<size_t>(rows) * q_heads * dim, 1),
        k(static_cast<size_t>(most_tokens) * kv_heads * dim, 2),
        v(static_cast<size_t>(most_tokens) * kv_heads * dim, 3),
        o(static_cast<size_t>(rows) * q_heads * dim, 4) {}

  // Heads [first, first + heads) of [count, all, dim].
  HeadRows Part(const Values& values, int32_t count, int32_t all, int32_t first,
                int32_t heads) const {
    if (heads == 0) return {.rows = count};
    return {.data = values.device() + static_cast<size_t>(first) * dim,
            .rows = count,
            .heads = heads,
            .dim = dim,
            .row_stride = int64_t{all} * dim};
  }
  SessionLayer LayerOf(const v1::LayerShape& shape, bool copy_out) const {
    SessionLayer layer{.q = Part(q, rows, q_heads, shape.first_q_head(), shape.q_heads()),
                       .k = Part(k, rows, kv_heads, shape.first_kv_head(), shape.kv_heads()),
                       .v = Part(v, rows, kv_heads, shape.first_kv_head(), shape.kv_heads())};
    if (copy_out) layer.output = Part(o, rows, q_heads, shape.first_q_head(), shape.q_heads());
    return layer;
  }

  const int32_t q_heads = absl::GetFlag(FLAGS_q_heads);
  const int32_t kv_heads = absl::GetFlag(FLAGS_kv_heads);
  const int32_t dim = absl::GetFlag(FLAGS_head_dim);
  const int32_t rows;
  const Values q, k, v, o;
};

// All layers of a step.
void LaunchLayers(DeviceSession& session, cudaStream_t stream, const Tensors& tensors,
                  bool copy_out) {
  const SessionLayer layer = tensors.LayerOf(session.opened().shapes(0), copy_out);
  const int32_t layers = absl::GetFlag(FLAGS_layers);
  for (int32_t i = 0; i < layers; ++i) Check(session.Attend(stream, layer), "a layer");
}

// The same as a graph.
cudaGraphExec_t CaptureLayers(DeviceSession& session, cudaStream_t stream, const Tensors& tensors) {
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t replay = nullptr;
  Check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "capture");
  LaunchLayers(session, stream, tensors, absl::GetFlag(FLAGS_copy_out));
  Check(cudaStreamEndCapture(stream, &graph), "capture");
  Check(cudaGraphInstantiate(&replay, graph, 0), "capture");
  cudaGraphDestroy(graph);
  return replay;
}

// Another endpoint of a session, which makes so many steps.
class OtherEndpoint {
 public:
  OtherEndpoint(const ConnectOptions& connect, const v1::SessionOpened& opened, int32_t endpoint,
                const SessionStep& step, int32_t rows, int32_t steps)
      : thread_([=, this,
                 options = EndpointOptions{.session_id = opened.session_id(),
                                           .secret = opened.endpoint_secret(),
                                           .endpoint = endpoint}] {
          int gpus = 1;
          Check(cudaGetDeviceCount(&gpus), "the GPUs");
          const int gpu = absl::GetFlag(FLAGS_gpu);
          Check(cudaSetDevice(absl::GetFlag(FLAGS_spread) ? (gpu + endpoint) % gpus : gpu),
                "an endpoint's GPU");
          cudaStream_t stream = nullptr;
          Check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "a stream");
          const Tensors tensors(rows, rows);
          const auto session = Value(DeviceSession::Join(connect, options), "joining");
          const cudaGraphExec_t replay = CaptureLayers(*session, stream, tensors);
          ready_.count_down();
          uint64_t number = 0;
          for (int i = 0; i < steps; ++i) {
            number = Value(session->Submit(step), "a step of an endpoint");
            Check(cudaGraphLaunch(replay, stream), "a step of an endpoint");
          }
          Check(session->Await(number), "the last step of an endpoint");
          Check(cudaStreamSynchronize(stream), "the last step of an endpoint");
        }) {}
  ~OtherEndpoint() { thread_.join(); }

  // Waits until all that is left for it to do are steps. What it does before would wait for
  // launches of this process that wait for it.
  void AwaitReady() { ready_.wait(); }

 private:
  std::latch ready_{1};
  std::thread thread_;
};

float FromBf16(uint16_t bits) {
  const uint32_t wide = uint32_t{bits} << 16;
  float value;
  std::memcpy(&value, &wide, sizeof(value));
  return value;
}

class Host {
 public:
  Host(Client* client, const ConnectOptions& connect, const Case& size)
      : client_(*client),
        connect_(connect),
        case_(size),
        rows_each_(absl::GetFlag(FLAGS_rows)),
        rows_(size.batch * rows_each_),
        tensors_(rows_, std::max(rows_, kFillTokens)) {
    Check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "a stream");
    v1::CacheSpec spec;
    spec.set_layers(layers_);
    spec.set_q_heads(q_heads_);
    spec.set_kv_heads(kv_heads_);
    spec.set_head_dim(dim_);
    spec.set_page_size(64);
    // Steps in flight hold what they roll back until they are over.
    spec.set_capacity_tokens(size.batch * (size.tokens + 6 * int64_t{rows_each_} + 2048));
    client_.DeleteCache(kCache).IgnoreError();  // of a run that failed
    Check(client_.CreateCache(kCache, spec).status(), "creating the cache");
    for (int32_t i = 0; i < size.batch; ++i) {
      sequences_.push_back(Value(client_.OpenSequence(kCache), "opening a sequence"));
    }
  }
  ~Host() {
    session_.reset();
    client_.DeleteCache(kCache).IgnoreError();
    cudaStreamDestroy(stream_);
  }
  Host(const Host&) = delete;
  Host& operator=(const Host&) = delete;

  Figures Measure() {
    Fill();
    session_ = Value(DeviceSession::Open(connect_, {.cache_id = kCache,
                                                    .max_rows = rows_,
                                                    .max_new_tokens = rows_,
                                                    .max_steps = 4,
                                                    .endpoints = absl::GetFlag(FLAGS_endpoints)}),
                     "opening a session");
    Figures figures;
    const v1::SessionOpened& opened = session_->opened();
    std::vector<std::unique_ptr<OtherEndpoint>> others;
    for (int32_t e = 1; e < absl::GetFlag(FLAGS_endpoints); ++e) {
      others.push_back(std::make_unique<OtherEndpoint>(connect_, opened, e, Step(), rows_,
                                                       1 + kWarm + absl::GetFlag(FLAGS_steps) + 2));
    }
    for (const auto& other : others) other->AwaitReady();
    figures.waiting = v1::Waiting_Name(opened.waiting());
    figures.round_trip_us = 1e6 * opened.round_trip_seconds();
    if (!opened.warning().empty()) {
      std::fprintf(stderr, "session_bench: %s\n", opened.warning().c_str());
    }
    figures.worst_error = FirstStep();
    Time(&figures);
    return figures;
  }

 private:
  static constexpr const char* kCache = "session-bench";
  static constexpr int kWarm = 20;

  // Context for every layer of every sequence, by append-only steps.
  void Fill() {
    const auto session =
        Value(DeviceSession::Open(connect_, {.cache_id = kCache, .max_new_tokens = kFillTokens}),
              "opening a session to fill the cache");
    for (const uint64_t sequence : sequences_) {
      for (int64_t at = 0; at < case_.tokens; at += kFillTokens) {
        const auto tokens = static_cast<int32_t>(std::min<int64_t>(kFillTokens, case_.tokens - at));
        const uint64_t step = Value(
            session->Submit(
                {.layers = layers_,
                 .entries = {{.sequence_id = sequence, .first_position = at, .new_tokens = tokens}},
                 .append_only = true}),
            "filling");
        for (int32_t layer = 0; layer < layers_; ++layer) {
          const auto all = [&](const Values& values) {
            return tensors_.Part(values, tokens, kv_heads_, 0, kv_heads_);
          };
          Check(session->Append(stream_, all(tensors_.k), all(tensors_.v)), "filling");
        }
        Check(session->Await(step), "filling");
      }
    }
  }

  SessionStep Step() const {
    const bool draft = absl::GetFlag(FLAGS_dflash);
    SessionStep step{.mode = draft ? v1::ATTEND_MODE_DFLASH : v1::ATTEND_MODE_CAUSAL,
                     .layers = layers_};
    for (const uint64_t sequence : sequences_) {
      SessionEntry entry{.sequence_id = sequence,
                         .first_position = case_.tokens,
                         .query_rows = rows_each_,
                         .new_tokens = rows_each_};
      if (!draft) entry.truncate_to = case_.tokens;  // so that all steps are alike
      step.entries.push_back(entry);
    }
    return step;
  }

  // One step, and what a call of the last layer gives for the same rows.
  double FirstStep() {
    const uint64_t step = Value(session_->Submit(Step()), "the first step");
    LaunchLayers(*session_, stream_, tensors_, /*copy_out=*/true);
    Check(cudaStreamSynchronize(stream_), "the first step");
    Check(session_->Await(step), "the first step");
    const size_t count = static_cast<size_t>(rows_) * q_heads_ * dim_;
    std::vector<uint16_t> got(count);
    Check(cudaMemcpy(got.data(), tensors_.o.device(), count * 2, cudaMemcpyDeviceToHost),
          "results");
    std::vector<uint16_t> want(count);
    const bool draft = absl::GetFlag(FLAGS_dflash);
    AttendCall call{.cache_id = kCache,
                    .layer = layers_ - 1,
                    .mode = draft ? v1::ATTEND_MODE_DFLASH : v1::ATTEND_MODE_CAUSAL,
                    .dtype = v1::DTYPE_BF16,
                    .q = tensors_.q.host(),
                    .q_heads = q_heads_,
                    .kv_heads = kv_heads_,
                    .head_dim = dim_,
                    .output = want.data()};
    if (draft) {
      call.k = tensors_.k.host();
      call.v = tensors_.v.host();
    }
    for (const uint64_t sequence : sequences_) {
      call.entries.push_back({sequence, case_.tokens, rows_each_, draft ? rows_each_ : 0});
    }
    Check(client_.Attend(call), "a call of the same rows");
    double worst = 0;
    // Of the heads that this endpoint, the first, has.
    const auto row = static_cast<size_t>(q_heads_) * dim_;
    const size_t own = row / static_cast<size_t>(absl::GetFlag(FLAGS_endpoints));
    for (size_t i = 0; i < count; ++i) {
      if (i % row >= own) continue;
      const double error = std::abs(FromBf16(got[i]) - FromBf16(want[i]));
      worst = std::isnan(error) ? INFINITY : std::max(worst, error);
    }
    return worst;
  }

  void Time(Figures* figures) {
    const cudaGraphExec_t replay = CaptureLayers(*session_, stream_, tensors_);
    cudaEvent_t begin = nullptr;
    cudaEvent_t end = nullptr;
    Check(cudaEventCreate(&begin), "an event");
    Check(cudaEventCreate(&end), "an event");
    const int steps = absl::GetFlag(FLAGS_steps);
    std::vector<double> us;
    std::chrono::steady_clock::time_point wall_begin;
    // Two steps are submitted ahead of the one that runs.
    Value(session_->Submit(Step()), "a step");
    uint64_t step = Value(session_->Submit(Step()), "a step");
    for (int i = -kWarm; i < steps; ++i) {
      if (i == 0) wall_begin = std::chrono::steady_clock::now();
      Check(cudaEventRecord(begin, stream_), "an event");
      Check(cudaGraphLaunch(replay, stream_), "a step's graph");
      Check(cudaEventRecord(end, stream_), "an event");
      step = Value(session_->Submit(Step()), "a step");  // ahead
      Check(cudaEventSynchronize(end), "a step");
      float ms = 0;
      Check(cudaEventElapsedTime(&ms, begin, end), "an event");
      if (i >= 0) us.push_back(1e3 * ms / layers_);
      Check(session_->status(), "the session");
    }
    const std::chrono::duration<double, std::micro> wall =
        std::chrono::steady_clock::now() - wall_begin;
    Check(cudaGraphLaunch(replay, stream_), "the last steps");
    Check(cudaGraphLaunch(replay, stream_), "the last steps");
    Check(session_->Await(step), "the last step");
    std::sort(us.begin(), us.end());
    figures->us_per_layer = us[us.size() / 2];
    figures->p99_over_p50 = us[us.size() * 99 / 100] / us[us.size() / 2];
    figures->wall_us_per_layer = wall.count() / steps / layers_;
    cudaEventDestroy(begin);
    cudaEventDestroy(end);
    cudaGraphExecDestroy(replay);
  }

  Client& client_;
  const ConnectOptions connect_;
  const Case case_;
  const int32_t layers_ = absl::GetFlag(FLAGS_layers);
  const int32_t q_heads_ = absl::GetFlag(FLAGS_q_heads);
  const int32_t kv_heads_ = absl::GetFlag(FLAGS_kv_heads);
  const int32_t dim_ = absl::GetFlag(FLAGS_head_dim);
  const int32_t rows_each_;
  const int32_t rows_;
  const Tensors tensors_;
  cudaStream_t stream_ = nullptr;
  std::vector<uint64_t> sequences_;
  std::unique_ptr<DeviceSession> session_;
};

Case ParseCase(const std::string& text) {
  const std::vector<std::string> parts = absl::StrSplit(text, 'x');
  if (parts.size() != 2) Fail("--cases wants BATCHxTOKENS, not " + text);
  return {std::stoi(parts[0]), std::stoll(parts[1]), text};
}

// Null where the service is another process.
std::unique_ptr<service::EmbeddedService> ServiceOfThisProcess(const std::string& target) {
  if (!absl::GetFlag(FLAGS_embedded)) return nullptr;
  return Value(
      service::EmbeddedService::Start({.socket = std::string(absl::StripPrefix(target, "unix:")),
                                       .device = worker::Device::kCuda,
                                       .first_gpu = absl::GetFlag(FLAGS_gpu)}),
      "starting the service");
}

void Run() {
  const ConnectOptions connect{.target = absl::GetFlag(FLAGS_target)};
  const auto service = ServiceOfThisProcess(connect.target);
  const std::unique_ptr<Client> client = Value(Client::Connect(connect), "connecting");
  nlohmann::json figures = nlohmann::json::array();
  Check(cudaSetDevice(absl::GetFlag(FLAGS_gpu)), "the host's GPU");
  std::printf("%-10s %5s %12s %12s %9s %9s %10s  %s\n", "case", "rows", "us/layer", "wall/layer",
              "p99/p50", "error", "round trip", "waiting");
  for (const std::string& text : absl::GetFlag(FLAGS_cases)) {
    const Case size = ParseCase(text);
    const Figures f = Host(client.get(), connect, size).Measure();
    std::printf("%-10s %5d %12.2f %12.2f %9.3f %9.2g %10.2f  %s\n", text.c_str(),
                absl::GetFlag(FLAGS_rows), f.us_per_layer, f.wall_us_per_layer, f.p99_over_p50,
                f.worst_error, f.round_trip_us, f.waiting.c_str());
    std::fflush(stdout);
    figures.push_back({{"case", text},
                       {"rows", absl::GetFlag(FLAGS_rows)},
                       {"us_per_layer", f.us_per_layer},
                       {"wall_us_per_layer", f.wall_us_per_layer},
                       {"p99_over_p50", f.p99_over_p50},
                       {"worst_error", f.worst_error},
                       {"round_trip_us", f.round_trip_us},
                       {"waiting", f.waiting}});
  }
  if (const std::string path = absl::GetFlag(FLAGS_json); !path.empty()) {
    std::FILE* file = std::fopen(path.c_str(), "w");
    if (file == nullptr) Fail("cannot write " + path);
    std::fputs(figures.dump(2).c_str(), file);
    std::fclose(file);
  }
}

}  // namespace
}  // namespace tributary::client

int main(int argc, char** argv) {
  absl::ParseCommandLine(argc, argv);
  // Streams of one process that share a queue of the GPU would wait for each other.
  tributary::worker::SetCudaEnvironment();
  tributary::client::Run();
}
