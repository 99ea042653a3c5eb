// What the service adds to an Attend of one token, and where: the same calls (a) in process, (b)
// unary over a Unix socket, (c) on an open stream, with tensors in messages, in shared memory and
// in memory of a GPU, and (d) as layers of a session over shared memory. The host is a process of
// its own; both read one clock, so that a call's time falls into stages without a gap (stages.h).
#include <sys/wait.h>
#include <unistd.h>

#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "bench/service/rpc_client.h"
#include "bench/service/stages.h"
#include "nlohmann/json.hpp"
#include "service/api/server.h"
#include "service/coordinator/coordinator.h"
#include "service/observe/telemetry.h"
#include "service/workers/embedded_group.h"
#include "worker/cuda_backend.h"

ABSL_FLAG(std::string, device, "cpu", "What workers compute on: cpu or cuda.");
ABSL_FLAG(int32_t, workers, 1, "Embedded workers.");
ABSL_FLAG(std::string, device_exchange, "host", "As the coordinator's.");
ABSL_FLAG(std::vector<std::string>, tensors, std::vector<std::string>({"inline", "shm"}),
          "Where tensors travel: inline, shm, or cuda_ipc, with GPUs.");
ABSL_FLAG(std::vector<std::string>, ways, std::vector<std::string>({"unary", "stream", "session"}),
          "How calls are made: unary, stream, or session, with tensors in shm.");
ABSL_FLAG(int32_t, gpu, 0, "Where the host's memory lies, with cuda_ipc.");
ABSL_FLAG(int32_t, q_heads, 32, "");
ABSL_FLAG(int32_t, kv_heads, 4, "");
ABSL_FLAG(int32_t, head_dim, 128, "");
ABSL_FLAG(int64_t, context, 256, "Tokens held before the first call.");
ABSL_FLAG(int32_t, calls, 2000, "Of each kind; a tenth as many before, to warm up.");
ABSL_FLAG(std::string, json, "", "Where to write the figures, as JSON.");
// Of the host's process.
ABSL_FLAG(std::string, client_target, "", "For this program's own use.");
ABSL_FLAG(std::string, client_out, "", "For this program's own use.");

namespace tributary::service::bench {
namespace {

constexpr char kCache[] = "bench";
constexpr uint64_t kParent = 1;
constexpr int32_t kLayers = 8;
constexpr int64_t kChunk = 1024;  // tokens of an Append

void Require(bool ok, const std::string& what) {
  if (ok) return;
  std::fprintf(stderr, "rpc_overhead_bench: %s\n", what.c_str());
  std::exit(1);
}
void Require(const absl::Status& status) { Require(status.ok(), status.ToString()); }

// Runs a callback-style call to its end, as a host in the same process would.
template <typename Reply, typename Call>
Reply Await(Call call) {
  std::mutex mutex;
  std::condition_variable changed;
  std::optional<absl::StatusOr<Reply>> result;
  call([&](absl::StatusOr<Reply> reply) {
    std::lock_guard lock(mutex);
    result = std::move(reply);
    changed.notify_one();
  });
  std::unique_lock lock(mutex);
  changed.wait(lock, [&] { return result.has_value(); });
  Require(result->status());
  return **std::move(result);
}

// What the service's side of every Attend took, in the order of calls: one is in flight at a time.
// Passes everything on to the observer that the coordinator program has.
class Recorder final : public Observer {
 public:
  explicit Recorder(std::shared_ptr<Observer> observer) : observer_(std::move(observer)) {}

  struct Seen {
    TimePoint begun;
    CallTimes times;  // all but what the client sees
    TimePoint ended;
  };
  std::vector<Seen> Take() {
    std::lock_guard lock(mutex_);
    return std::exchange(seen_, {});
  }

  bool traces() const override { return observer_->traces(); }
  CallRecord OnCallBegun(Method method, absl::string_view traceparent, size_t bytes) override {
    return observer_->OnCallBegun(method, traceparent, bytes);
  }
  telemetry::TraceContext OnStepSubmitted(const StepRecord& step) override {
    return observer_->OnStepSubmitted(step);
  }
  void OnCallEnded(const CallRecord& call, const absl::Status& status, size_t bytes) override {
    observer_->OnCallEnded(call, status, bytes);
    if (call.method != Method::kAttend && call.method != Method::kAttendStream) return;
    const TimePoint now = Clock::now();
    std::lock_guard lock(mutex_);
    ended_ = {call.begin, now};
  }
  // After the call's end.
  void OnStepEnded(const StepRecord& step, const absl::Status& status,
                   const std::vector<worker::Reply>& replies) override {
    observer_->OnStepEnded(step, status, replies);
    const auto last =
        std::max_element(replies.begin(), replies.end(),
                         [](const auto& a, const auto& b) { return a.arrived < b.arrived; });
    if (last == replies.end() || step.query_rows == 0) return;
    std::lock_guard lock(mutex_);
    // In process nobody tells of a call.
    const auto [begun, ended] =
        ended_.value_or(std::make_pair(step.calls[0].accepted, step.answered));
    ended_.reset();
    CallTimes t;
    t.at(Stage::kCheck) = Microseconds(begun, step.calls[0].accepted);
    t.at(Stage::kQueue) = Microseconds(step.calls[0].accepted, step.begun);
    t.at(Stage::kCommand) = Microseconds(step.begun, step.submitted);
    t.at(Stage::kWake) = Microseconds(step.submitted, last->begun);
    t.at(Stage::kPlan) = 1e6 * last->times.plan;
    t.at(Stage::kAttend) = 1e6 * (last->times.append + last->times.attend);
    t.at(Stage::kExchange) = 1e6 * last->times.exchange;
    t.at(Stage::kLaunch) = Microseconds(last->begun, last->arrived) - t.at(Stage::kPlan) -
                           t.at(Stage::kAttend) - t.at(Stage::kExchange);
    t.at(Stage::kCollect) = Microseconds(last->arrived, step.done);
    t.at(Stage::kReply) = Microseconds(step.done, ended);
    seen_.push_back({begun, t, ended});
  }

 private:
  const std::shared_ptr<Observer> observer_;
  std::mutex mutex_;
  std::optional<std::pair<TimePoint, TimePoint>> ended_;
  std::vector<Seen> seen_;
};

// ------------------------------------------------------------------------------- the host's
// process

std::vector<std::pair<TimePoint, TimePoint>> ReadTimes(const std::string& path) {
  std::ifstream file(path);
  std::vector<std::pair<TimePoint, TimePoint>> times;
  for (int64_t begin = 0, end = 0; file >> begin >> end;) {
    times.emplace_back(TimePoint(std::chrono::nanoseconds(begin)),
                       TimePoint(std::chrono::nanoseconds(end)));
  }
  return times;
}

int ClientMain() {
  const ClientOptions options{.target = absl::GetFlag(FLAGS_client_target),
                              .cache = kCache,
                              .tensors = absl::GetFlag(FLAGS_tensors).at(0),
                              .way = absl::GetFlag(FLAGS_ways).at(0),
                              .gpu = absl::GetFlag(FLAGS_gpu),
                              .sequence = kParent,
                              .q_heads = absl::GetFlag(FLAGS_q_heads),
                              .kv_heads = absl::GetFlag(FLAGS_kv_heads),
                              .head_dim = absl::GetFlag(FLAGS_head_dim),
                              .layers = kLayers,
                              .calls = absl::GetFlag(FLAGS_calls)};
  const auto times = RunClient(options);
  Require(times.status());
  std::ofstream file(absl::GetFlag(FLAGS_client_out));
  for (const auto& [begin, end] : *times) {
    file << begin.time_since_epoch().count() << ' ' << end.time_since_epoch().count() << '\n';
  }
  return file.good() ? 0 : 1;
}

// Starts this program as the host, and waits for it.
std::vector<std::pair<TimePoint, TimePoint>> RunHost(const std::string& target,
                                                     const std::string& tensors,
                                                     const std::string& way, int calls) {
  const std::string out = absl::StrCat("/tmp/tributary-bench-", getpid(), ".times");
  std::vector<std::string> arguments = {std::filesystem::read_symlink("/proc/self/exe"),
                                        absl::StrCat("--client_target=", target),
                                        absl::StrCat("--client_out=", out),
                                        absl::StrCat("--tensors=", tensors),
                                        absl::StrCat("--ways=", way),
                                        absl::StrCat("--calls=", calls),
                                        absl::StrCat("--gpu=", absl::GetFlag(FLAGS_gpu)),
                                        absl::StrCat("--q_heads=", absl::GetFlag(FLAGS_q_heads)),
                                        absl::StrCat("--kv_heads=", absl::GetFlag(FLAGS_kv_heads)),
                                        absl::StrCat("--head_dim=", absl::GetFlag(FLAGS_head_dim))};
  std::vector<char*> argv;
  for (std::string& argument : arguments) argv.push_back(argument.data());
  argv.push_back(nullptr);
  const pid_t child = fork();
  Require(child >= 0, "cannot fork");
  if (child == 0) {
    execv(argv[0], argv.data());
    _exit(127);
  }
  int status = 0;
  Require(waitpid(child, &status, 0) == child && status == 0, "the host failed");
  auto times = ReadTimes(out);
  std::filesystem::remove(out);
  return times;
}

// --------------------------------------------------------------------------------------- the
// service

class Service {
 public:
  Service() {
    CoordinatorOptions options;
    options.shared_memory_prefixes = {"/tributary"};
    options.observer = recorder_;
    options.on_readiness = [this](bool now) {
      std::lock_guard lock(mutex_);
      ready_ = now;
      changed_.notify_all();
    };
    const bool cuda = absl::GetFlag(FLAGS_device) == "cuda";
    EmbeddedGroupOptions group{.workers = absl::GetFlag(FLAGS_workers),
                               .device = cuda ? worker::Device::kCuda : worker::Device::kCpu};
    if (absl::GetFlag(FLAGS_device_exchange) == "auto") {
      group.exchange_place = worker::ExchangePlace::kAuto;
    }
    coordinator_ = std::make_unique<Coordinator>(options, CreateEmbeddedGroup(group), log_);
    Require(coordinator_->Start());
    {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [&] { return ready_; });
    }
    auto server = Server::Start({.listen = {target_}, .drain_settle = std::chrono::milliseconds(0)},
                                coordinator_.get());
    Require(server.status());
    server_ = *std::move(server);
    FillCache();
  }
  ~Service() {
    server_->Drain(std::chrono::steady_clock::now() + std::chrono::seconds(10));
    coordinator_->Stop();
  }

  Coordinator& coordinator() { return *coordinator_; }
  Recorder& recorder() { return *recorder_; }
  const std::string& target() const { return target_; }

 private:
  void FillCache() {
    const int64_t context = absl::GetFlag(FLAGS_context);
    v1::CreateCacheRequest create;
    create.set_cache_id(kCache);
    v1::CacheSpec* spec = create.mutable_spec();
    spec->set_layers(kLayers);  // sessions take them in turn, calls the first alone
    spec->set_q_heads(absl::GetFlag(FLAGS_q_heads));
    spec->set_kv_heads(absl::GetFlag(FLAGS_kv_heads));
    spec->set_head_dim(absl::GetFlag(FLAGS_head_dim));
    // The runs' own tokens: two sequences each, closed with the process.
    spec->set_capacity_tokens(context + 16 * (absl::GetFlag(FLAGS_calls) + 4096));
    Await<v1::CreateCacheReply>([&](auto done) { coordinator_->CreateCache(create, {}, done); });
    v1::OpenSequenceRequest open;
    open.set_cache_id(kCache);
    open.set_sequence_id(kParent);
    Await<v1::OpenSequenceReply>([&](auto done) { coordinator_->OpenSequence(open, {}, done); });
    for (int32_t layer = 0; layer < kLayers; ++layer) Fill(*spec, layer);
  }

  void Fill(const v1::CacheSpec& spec, int32_t layer) {
    const int64_t context = absl::GetFlag(FLAGS_context);
    for (int64_t first = 0; first < context; first += kChunk) {
      const int64_t tokens = std::min(kChunk, context - first);
      auto append = std::make_shared<v1::AppendRequest>();
      append->set_cache_id(kCache);
      append->set_layer(layer);
      v1::AppendEntry* entry = append->add_entries();
      entry->set_sequence_id(kParent);
      entry->set_first_position(first);
      entry->set_tokens(static_cast<int32_t>(tokens));
      for (v1::Tensor* tensor : {append->mutable_k(), append->mutable_v()}) {
        tensor->set_dtype(v1::DTYPE_BF16);
        for (const int64_t extent : {tokens, int64_t{spec.kv_heads()}, int64_t{spec.head_dim()}})
          tensor->add_shape(extent);
        std::string bytes(static_cast<size_t>(tokens) * spec.kv_heads() * spec.head_dim() * 2, 0);
        for (size_t i = 0; i < bytes.size(); i += 2) {  // 1 to 2, of either sign
          bytes[i] = static_cast<char>((i * 37 + static_cast<size_t>(first)) % 128);
          bytes[i + 1] = static_cast<char>(i % 6 == 0 ? 0xbf : 0x3f);
        }
        tensor->set_inline_(std::move(bytes));
      }
      Await<v1::AppendReply>([&](auto done) { coordinator_->Append(append, {}, done); });
    }
  }

  const std::string target_ = absl::StrCat("unix:/tmp/tributary-bench-", getpid(), ".sock");
  const std::shared_ptr<const telemetry::Logger> log_ = std::make_shared<const telemetry::Logger>(
      telemetry::LogLevel::kWarning, telemetry::LogFormat::kText);
  const std::shared_ptr<Recorder> recorder_ = std::make_shared<Recorder>(
      std::make_shared<Telemetry>(absl::GetFlag(FLAGS_workers), log_, nullptr));
  std::mutex mutex_;
  std::condition_variable changed_;
  bool ready_ = false;
  std::unique_ptr<Coordinator> coordinator_;
  std::unique_ptr<Server> server_;
};

// ----------------------------------------------------------------------------------------- the
// runs

struct Run {
  std::string name;
  std::vector<CallTimes> calls;
};

// The last calls of both sides, which are the timed ones.
Run Measure(Service& service, const std::string& tensors, const std::string& way) {
  const int calls = absl::GetFlag(FLAGS_calls);
  service.recorder().Take();
  const auto host = RunHost(service.target(), tensors, way, calls + calls / 10);
  const std::vector<Recorder::Seen> seen = service.recorder().Take();
  Run run{absl::StrCat(way, ", ", tensors), {}};
  if (way == "session") {  // no stages are told of its layers
    for (auto time = host.end() - calls; time != host.end(); ++time) {
      run.calls.push_back({.total = Microseconds(time->first, time->second)});
    }
    return run;
  }
  Require(host.size() >= calls && seen.size() >= calls, "calls were not recorded");
  for (size_t i = 0; i < static_cast<size_t>(calls); ++i) {
    const auto& [begin, end] = host[host.size() - calls + i];
    const Recorder::Seen& server = seen[seen.size() - calls + i];
    CallTimes times = server.times;
    times.at(Stage::kRpcIn) = Microseconds(begin, server.begun);
    times.at(Stage::kRpcOut) = Microseconds(server.ended, end);
    times.total = Microseconds(begin, end);
    run.calls.push_back(times);
  }
  return run;
}

// By the same coordinator from this process, tensors in the message: what the others are beside.
Run MeasureInProcess(Service& service) {
  const int calls = absl::GetFlag(FLAGS_calls);
  v1::ForkSequenceRequest fork_request;
  fork_request.set_cache_id(kCache);
  fork_request.set_parent_id(kParent);
  const auto forked = Await<v1::ForkSequenceReply>(
      [&](auto done) { service.coordinator().ForkSequence(fork_request, {}, done); });
  service.recorder().Take();
  std::vector<double> totals;
  for (int64_t call = 0; call < calls + calls / 10; ++call) {
    auto request = std::make_shared<v1::AttendRequest>();
    request->set_cache_id(kCache);
    request->set_mode(v1::ATTEND_MODE_CAUSAL);
    v1::AttendEntry* entry = request->add_entries();
    entry->set_sequence_id(forked.sequence_id());
    entry->set_first_position(forked.length() + call);
    entry->set_query_rows(1);
    entry->set_new_tokens(1);
    const auto fill = [&](v1::Tensor* tensor, int32_t heads) {
      tensor->set_dtype(v1::DTYPE_BF16);
      for (const int32_t extent : {1, heads, absl::GetFlag(FLAGS_head_dim)}) {
        tensor->add_shape(extent);
      }
      tensor->set_inline_(std::string(size_t(heads) * absl::GetFlag(FLAGS_head_dim) * 2, 0x3e));
    };
    fill(request->mutable_q(), absl::GetFlag(FLAGS_q_heads));
    fill(request->mutable_k(), absl::GetFlag(FLAGS_kv_heads));
    fill(request->mutable_v(), absl::GetFlag(FLAGS_kv_heads));
    const TimePoint begin = std::chrono::steady_clock::now();
    Await<v1::AttendReply>(
        [&](auto done) { service.coordinator().Attend(request, {}, std::move(done)); });
    totals.push_back(Microseconds(begin, std::chrono::steady_clock::now()));
  }
  // The last step is told of after its call is answered.
  std::vector<Recorder::Seen> seen;
  while (seen.size() < totals.size()) {
    for (Recorder::Seen& one : service.recorder().Take()) seen.push_back(one);
  }
  Run run{"in process, inline", {}};
  for (size_t i = totals.size() - static_cast<size_t>(calls); i < totals.size(); ++i) {
    run.calls.push_back(seen[i].times);
    run.calls.back().total = totals[i];
  }
  return run;
}

std::vector<double> Of(const Run& run, size_t stage) {
  std::vector<double> values;
  for (const CallTimes& call : run.calls) {
    values.push_back(stage == kStages ? call.total : call.stages[stage]);
  }
  return values;
}

void Print(const std::vector<Run>& runs) {
  std::printf("%-10s", "us");
  for (const Run& run : runs) std::printf(" %22s", run.name.c_str());
  std::printf("\n%-10s", "");
  for (size_t i = 0; i < runs.size(); ++i) std::printf(" %12s %9s", "p50", "p99");
  for (size_t stage = 0; stage <= kStages; ++stage) {
    std::printf("\n%-10s", stage == kStages ? "total" : kStageNames[stage]);
    for (const Run& run : runs) {
      const std::vector<double> values = Of(run, stage);
      std::printf(" %12.1f %9.1f", Percentile(values, 0.5), Percentile(values, 0.99));
    }
  }
  std::printf("\n");
}

void WriteJson(const std::vector<Run>& runs, const std::string& path) {
  nlohmann::json out;
  out["device"] = absl::GetFlag(FLAGS_device);
  out["workers"] = absl::GetFlag(FLAGS_workers);
  out["context"] = absl::GetFlag(FLAGS_context);
  out["calls"] = absl::GetFlag(FLAGS_calls);
  for (const Run& run : runs) {
    nlohmann::json& one = out["runs"][run.name];
    for (size_t stage = 0; stage <= kStages; ++stage) {
      const std::vector<double> values = Of(run, stage);
      one[stage == kStages ? "total" : kStageNames[stage]] = {{"p50_us", Percentile(values, 0.5)},
                                                              {"p99_us", Percentile(values, 0.99)}};
    }
  }
  std::ofstream file(path);
  file << out.dump(2) << '\n';
  Require(file.good(), absl::StrCat("cannot write ", path));
}

int ServiceMain() {
  Service service;
  std::printf("Attend of one layer, %d/%d heads of %d, one token over %lld, %d %s worker(s)\n",
              absl::GetFlag(FLAGS_q_heads), absl::GetFlag(FLAGS_kv_heads),
              absl::GetFlag(FLAGS_head_dim), static_cast<long long>(absl::GetFlag(FLAGS_context)),
              absl::GetFlag(FLAGS_workers), absl::GetFlag(FLAGS_device).c_str());
  std::vector<Run> runs = {MeasureInProcess(service)};
  for (const std::string& tensors : absl::GetFlag(FLAGS_tensors)) {
    for (const std::string& way : absl::GetFlag(FLAGS_ways)) {
      if (way == "session" && tensors != "shm") continue;
      runs.push_back(Measure(service, tensors, way));
    }
  }
  Print(runs);
  if (const std::string path = absl::GetFlag(FLAGS_json); !path.empty()) WriteJson(runs, path);
  return 0;
}

}  // namespace
}  // namespace tributary::service::bench

int main(int argc, char** argv) {
  tributary::worker::SetCudaEnvironment();
  absl::ParseCommandLine(argc, argv);
  if (!absl::GetFlag(FLAGS_client_target).empty()) return tributary::service::bench::ClientMain();
  return tributary::service::bench::ServiceMain();
}
