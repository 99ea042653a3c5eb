// What deaths and restarts of programs cost, and what it costs to be ready for them: a coordinator
// and workers as processes of this machine.
#include <dirent.h>
#include <grpcpp/create_channel.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "service/client/client.h"
#include "tests/fault/programs.h"
#include "tests/support/process.h"
#include "tributary/v1/operations.grpc.pb.h"

ABSL_FLAG(std::vector<std::string>, what,
          (std::vector<std::string>{"coordinator", "worker", "rolling", "resize", "cost"}),
          "What to measure: coordinator, worker, rolling, resize, cost.");
ABSL_FLAG(std::string, device, "cpu",
          "The workers compute on this device: cpu, or cuda, where they share the machine's GPUs.");
ABSL_FLAG(int, ranks, 4, "Workers of the group.");
ABSL_FLAG(int, threads, 1, "Threads of each worker.");
ABSL_FLAG(bool, forked, false,
          "The worker that is killed has its tokens from forks that begin with a page of their own "
          "each, so that few are sent.");
ABSL_FLAG(bool, logs, false,
          "The logs of the coordinator and of the spare are printed when a worker was killed.");
ABSL_FLAG(int, sequences, 4096, "Sequences that are open when the coordinator is killed.");
ABSL_FLAG(int, shard_mib, 1024, "MiB of tokens on the worker that is killed.");
ABSL_FLAG(int, moved_mib, 1024, "MiB of tokens that all workers hold when their number changes.");
ABSL_FLAG(int, steps, 3000, "Decode steps whose costs are measured.");
ABSL_FLAG(int, prefills, 5, "Prompts of 4,096 tokens whose costs are measured.");

namespace tributary {
namespace {

using Clock = std::chrono::steady_clock;
using client::AppendCall;
using client::AttendCall;
using client::Client;
using client::SequenceUpdate;

int Ranks() { return absl::GetFlag(FLAGS_ranks); }
bool OnGpus() { return absl::GetFlag(FLAGS_device) == "cuda"; }
std::string DeviceFlag() { return absl::StrCat("--device=", absl::GetFlag(FLAGS_device)); }
// Of each case in turn, where costs are measured.
constexpr int kStepsOfABlock = 50;
constexpr std::chrono::seconds kPatience{300};
const char* const kCache = "bench";

double SecondsSince(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

void Must(const absl::Status& status, const char* what) {
  if (status.ok()) return;
  std::fprintf(stderr, "%s: %s\n", what, status.ToString().c_str());
  std::exit(1);
}

// CPU seconds of all threads of a process so far.
double CpuSecondsOf(pid_t pid) {
  const std::string tasks = absl::StrCat("/proc/", pid, "/task");
  const std::unique_ptr<DIR, int (*)(DIR*)> directory(opendir(tasks.c_str()), closedir);
  double nanoseconds = 0;
  while (const dirent* entry = directory == nullptr ? nullptr : readdir(directory.get())) {
    std::ifstream file(absl::StrCat(tasks, "/", entry->d_name, "/schedstat"));
    double running = 0;
    if (file >> running) nanoseconds += running;
  }
  return nanoseconds * 1e-9;
}

struct Shape {
  int layers = 1;
  int q_heads = 8;
  int kv_heads = 8;
  int head_dim = 128;
  int page_size = 64;
  int64_t capacity = 0;  // tokens
};

// The programs, and a client with default retries.
class Service {
 public:
  explicit Service(std::vector<std::string> flags) : flags_(std::move(flags)) {
    flags_.push_back(DeviceFlag());
    Coordinate();
    for (int rank = 0; rank < Ranks(); ++rank) workers_.push_back(Worker(rank));
    client_ = *Client::Connect({.target = test::PublicAddress(directory_),
                                .timeout = kPatience,
                                .shared_memory_bytes = size_t{128} << 20});
  }

  void Coordinate() { coordinator_ = test::StartCoordinator(directory_, Ranks(), flags_); }
  std::unique_ptr<test::ChildProcess> Worker(int rank) {
    return test::StartWorker(
        directory_, test::WorkerAddress(directory_), rank,
        {DeviceFlag(), absl::StrCat("--threads=", absl::GetFlag(FLAGS_threads)),
         "--drain_timeout=120s"});
  }
  test::ChildProcess& coordinator() { return *coordinator_; }
  std::vector<std::unique_ptr<test::ChildProcess>>& workers() { return workers_; }
  Client& client() { return *client_; }
  double WorkersCpu() const {
    double seconds = 0;
    for (const auto& worker : workers_) seconds += CpuSecondsOf(worker->pid());
    return seconds;
  }

  void CreateCache(const Shape& shape) {
    shape_ = shape;
    v1::CacheSpec spec;
    spec.set_layers(shape.layers);
    spec.set_q_heads(shape.q_heads);
    spec.set_kv_heads(shape.kv_heads);
    spec.set_head_dim(shape.head_dim);
    spec.set_page_size(shape.page_size);
    spec.set_kv_dtype(v1::DTYPE_BF16);
    spec.set_capacity_tokens(shape.capacity);
    Must(client_->CreateCache(kCache, spec).status(), "CreateCache");
    values_.assign(size_t{4096} * static_cast<size_t>(shape.q_heads * shape.head_dim), 0x3f80);
  }
  std::vector<uint64_t> Open(int count) {
    return *client_->UpdateSequences(kCache, std::vector<SequenceUpdate>(count));
  }
  // Sequences that begin as `parent` does, in pages of their own.
  std::vector<uint64_t> Fork(uint64_t parent, int count) {
    const SequenceUpdate fork{.kind = SequenceUpdate::Kind::kFork, .parent_id = parent};
    return *client_->UpdateSequences(kCache, std::vector<SequenceUpdate>(count, fork));
  }
  void Append(const std::vector<uint64_t>& sequences, int32_t tokens, int64_t first = 0) {
    for (int layer = 0; layer < shape_.layers; ++layer) {
      AppendCall call{.cache_id = kCache,
                      .layer = layer,
                      .dtype = v1::DTYPE_BF16,
                      .k = values_.data(),
                      .v = values_.data(),
                      .kv_heads = shape_.kv_heads,
                      .head_dim = shape_.head_dim};
      for (const uint64_t id : sequences) call.entries.push_back({id, first, tokens});
      Must(client_->Append(call), "Append");
    }
  }
  // New rows with tokens, or queries alone, of each sequence.
  absl::Status Attend(const std::vector<uint64_t>& sequences, int64_t first, int32_t rows,
                      int32_t new_tokens) {
    AttendCall call{.cache_id = kCache,
                    .dtype = v1::DTYPE_BF16,
                    .q = values_.data(),
                    .k = new_tokens > 0 ? values_.data() : nullptr,
                    .v = new_tokens > 0 ? values_.data() : nullptr,
                    .q_heads = shape_.q_heads,
                    .kv_heads = shape_.kv_heads,
                    .head_dim = shape_.head_dim};
    for (const uint64_t id : sequences) call.entries.push_back({id, first, rows, new_tokens});
    output_.resize(values_.size());
    call.output = output_.data();
    return client_->Attend(call);
  }
  v1::ChangeWorkersReply Resize(int workers) {
    v1::ChangeWorkersRequest request;
    request.set_workers(workers);
    v1::ChangeWorkersReply reply;
    const auto stub = v1::OperationsService::NewStub(
        grpc::CreateChannel(test::PublicAddress(directory_), grpc::InsecureChannelCredentials()));
    grpc::ClientContext context;
    const grpc::Status status = stub->ChangeWorkers(&context, request, &reply);
    if (!status.ok()) Must(absl::UnknownError(status.error_message()), "ChangeWorkers");
    return reply;
  }
  void WaitWhole() {
    const auto whole = [&] {
      const auto topology = client_->GetTopology({});
      if (!topology.ok() || topology->state() != v1::GROUP_STATE_READY) return false;
      for (const v1::CacheInfo& cache : topology->caches()) {
        if (cache.pages_restoring() + cache.pages_without_replica() > 0) return false;
      }
      return true;
    };
    if (!test::Eventually(kPatience, whole)) Must(absl::DeadlineExceededError(""), "WaitWhole");
  }

 private:
  test::TemporaryDirectory directory_;
  std::vector<std::string> flags_;
  std::unique_ptr<test::ChildProcess> coordinator_;
  std::vector<std::unique_ptr<test::ChildProcess>> workers_;
  std::unique_ptr<Client> client_;
  Shape shape_;
  std::vector<uint16_t> values_;  // ones
  std::vector<uint16_t> output_;
};

// Given to a coordinator, whose directory it is.
struct StateDirectory {
  test::TemporaryDirectory directory;
  std::string flag() const { return "--state_dir=" + directory.File("."); }
};

void KilledCoordinator() {
  const int count = absl::GetFlag(FLAGS_sequences);
  const StateDirectory state;
  Service service({state.flag(), "--max_sequences=100000"});
  service.CreateCache({.capacity = int64_t{count} * 256});
  std::vector<std::vector<uint64_t>> calls;
  for (int i = 0; i < count; i += 64) {
    calls.push_back(service.Open(std::min(64, count - i)));
    service.Append(calls.back(), 64);
  }
  service.coordinator().Signal(SIGKILL);
  service.coordinator().Wait(kPatience);
  const Clock::time_point start = Clock::now();
  service.Coordinate();
  Must(service.Attend(calls.front(), 63, 1, 0), "Attend");
  const double first = SecondsSince(start);
  for (const auto& call : calls) Must(service.Attend(call, 63, 1, 0), "Attend");
  std::printf(
      "coordinator killed, %d sequences: serving %.2f s after its start; all attended over "
      "after %.2f s, 0 tokens sent again\n",
      count, first, SecondsSince(start));
}

// Sequences with tokens, of which every worker holds as much as it is to lose.
struct Filled {
  std::vector<uint64_t> sequences;
  int32_t length = 0;  // of each, tokens
  int64_t shard_bytes = 0;
};

// What the log says of the pages that were restored.
std::string Restored(const std::string& log) {
  const size_t at = log.rfind("pages restored from replicas");
  if (at == std::string::npos) return "not restored";
  return log.substr(at, log.find('\n', at) - at);
}

Filled Fill(Service& service, Shape shape) {
  const int64_t shard = int64_t{absl::GetFlag(FLAGS_shard_mib)} << 20;
  const int64_t token = int64_t{2} * shape.layers * shape.kv_heads * shape.head_dim * 2;
  const bool forked = absl::GetFlag(FLAGS_forked);
  Filled filled;
  filled.length = forked ? shape.page_size * Ranks() : 4096;
  const auto count =
      static_cast<int>(std::max<int64_t>(1, shard * Ranks() / token / filled.length));
  filled.shard_bytes = count * token * filled.length / Ranks();
  shape.capacity = int64_t{count + 2} * (filled.length + 256);
  service.CreateCache(shape);
  if (!forked) {
    filled.sequences = service.Open(count);
    for (const uint64_t id : filled.sequences) service.Append({id}, filled.length);
    return filled;
  }
  const std::vector<uint64_t> parent = service.Open(1);
  service.Append(parent, filled.length - 1);
  constexpr int kAtOnce = 32;
  for (int i = 0; i < count; i += kAtOnce) {
    const auto forks = service.Fork(parent.front(), std::min(kAtOnce, count - i));
    service.Append(forks, 1, filled.length - 1);
    filled.sequences.insert(filled.sequences.end(), forks.begin(), forks.end());
  }
  return filled;
}

void KilledWorker() {
  Service service({"--replicas=1"});
  const bool forked = absl::GetFlag(FLAGS_forked);
  const auto [sequences, length, shard_bytes] =
      Fill(service, {.layers = forked ? 32 : 8, .page_size = forked ? 128 : 64});
  const auto spare = service.Worker(-1);
  test::Eventually(kPatience, [&] {
    return spare->Log().find("are held by live workers") != std::string::npos;
  });
  service.workers()[1]->Signal(SIGKILL);
  const Clock::time_point killed = Clock::now();
  double first = 0;
  for (const uint64_t id : sequences) {
    Must(service.Attend({id}, length - 1, 1, 0), "Attend");
    if (first == 0) first = SecondsSince(killed);
  }
  const double all = SecondsSince(killed);
  service.WaitWhole();
  const double again = SecondsSince(killed);
  std::printf(
      "worker killed, %.2f GiB of tokens on it, a spare, replicas 1: first sequence attended "
      "over after %.2f s, all %zu after %.2f s; replicas whole again after %.2f s; 0 tokens "
      "sent again\n  the coordinator's log: %s\n",
      static_cast<double>(shard_bytes) / (1 << 30), first, sequences.size(), all, again,
      Restored(service.coordinator().Log()).c_str());
  if (!absl::GetFlag(FLAGS_logs)) return;
  std::printf("the coordinator:\n%sthe spare:\n%s", service.coordinator().Log().c_str(),
              spare->Log().c_str());
}

void RollingRestart(int replicas) {
  const StateDirectory state;
  Service service({state.flag(), absl::StrCat("--replicas=", replicas)});
  service.CreateCache({.layers = 1, .capacity = 1 << 16});
  std::atomic<bool> stopping = false;
  double longest = 0;
  int64_t calls = 0;
  std::thread host([&] {
    const std::vector<uint64_t> ids = service.Open(4);
    for (int64_t position = 0; !stopping; ++position, ++calls) {
      const Clock::time_point begin = Clock::now();
      Must(service.Attend(ids, position % 1024, 1, 1), "Attend");
      longest = std::max(longest, SecondsSince(begin));
    }
  });
  const Clock::time_point begin = Clock::now();
  for (auto& worker : service.workers()) {
    worker->Signal(SIGTERM);
    worker->Wait(kPatience);
    worker = service.Worker(static_cast<int>(&worker - service.workers().data()));
    std::this_thread::sleep_for(std::chrono::milliseconds(300));
    service.WaitWhole();
  }
  service.coordinator().Signal(SIGTERM);
  service.coordinator().Wait(kPatience);
  service.Coordinate();
  service.WaitWhole();
  std::this_thread::sleep_for(std::chrono::seconds(1));
  stopping = true;
  host.join();
  std::printf(
      "rolling restart of %d workers and the coordinator, replicas %d: %.1f s, longest call "
      "%.2f s, %lld calls, none failed\n",
      Ranks(), replicas, SecondsSince(begin), longest, static_cast<long long>(calls));
}

// The workers become half as many, and as many again, while a host goes on.
void Resized(int replicas) {
  const int64_t all = int64_t{absl::GetFlag(FLAGS_moved_mib)} << 20;
  Shape shape{.layers = 8};
  const int64_t token = int64_t{2} * shape.layers * shape.kv_heads * shape.head_dim * 2;
  const auto count = static_cast<int>(std::max<int64_t>(1, all / token / 4096));
  shape.capacity = int64_t{count + 1} * 4608;
  Service service({absl::StrCat("--replicas=", replicas)});
  service.CreateCache(shape);
  const std::vector<uint64_t> sequences = service.Open(count);
  for (const uint64_t id : sequences) service.Append({id}, 4096);
  for (const int workers : {Ranks() / 2, Ranks()}) {
    std::atomic<bool> stopping = false;
    double longest = 0;
    std::thread host([&] {
      for (size_t i = 0; !stopping; ++i) {
        const Clock::time_point begin = Clock::now();
        Must(service.Attend({sequences[i % sequences.size()]}, 4095, 1, 0), "Attend");
        longest = std::max(longest, SecondsSince(begin));
      }
    });
    std::this_thread::sleep_for(std::chrono::milliseconds(500));
    const v1::ChangeWorkersReply changed = service.Resize(workers);
    std::this_thread::sleep_for(std::chrono::milliseconds(500));
    stopping = true;
    host.join();
    std::printf(
        "%d -> %d workers, %.2f GiB of tokens, replicas %d: calls waited for %.2f s, %.2f GiB "
        "filled, longest call %.2f s, none failed, 0 tokens sent again\n",
        changed.workers_before(), changed.workers(),
        static_cast<double>(count) * 4096 * static_cast<double>(token) / (1 << 30), replicas,
        changed.seconds(), static_cast<double>(changed.bytes_moved()) / (1 << 30), longest);
  }
}

// One way to be ready, and what its programs took for each block of steps, and for each prompt: CPU
// time, or on GPUs the time until the host had its answers.
struct Case {
  Case(const char* called, std::vector<std::string> flags)
      : name(called), service(std::move(flags)) {}

  const char* name;
  Service service;
  std::vector<uint64_t> ids;
  int64_t position = 500;
  std::vector<double> step_us, coordinator_us, prefill_s;

  void Begin(int prefills) {
    service.CreateCache(
        {.q_heads = 32,
         .capacity = 8 * (500 + absl::GetFlag(FLAGS_steps) + 512) + (prefills + 2) * 4608});
    ids = service.Open(8);
    service.Append(ids, static_cast<int32_t>(position));
    Must(service.Attend(ids, position++, 1, 1), "Attend");
  }
  double Spent() const {
    return OnGpus() ? SecondsSince(Clock::time_point{}) : service.WorkersCpu();
  }
  void Steps(int count) {
    const double workers = Spent();
    const double coordinator = CpuSecondsOf(service.coordinator().pid());
    for (int i = 0; i < count; ++i) Must(service.Attend(ids, position++, 1, 1), "Attend");
    step_us.push_back((Spent() - workers) / count * 1e6);
    coordinator_us.push_back((CpuSecondsOf(service.coordinator().pid()) - coordinator) / count *
                             1e6);
  }
  void Prompt() {
    const std::vector<uint64_t> prompt = service.Open(1);
    const double workers = Spent();
    Must(service.Attend(prompt, 0, 4096, 4096), "Attend");
    prefill_s.push_back(Spent() - workers);
  }
};

double Median(std::vector<double> values) {
  if (values.empty()) return 0;
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

// By how much each value is above the one of the same round, as parts of it: the quartiles.
std::string MoreThan(const std::vector<double>& base, const std::vector<double>& values) {
  std::vector<double> ratios;
  for (size_t i = 0; i < values.size() && i < base.size(); ++i) {
    ratios.push_back(values[i] / base[i] - 1);
  }
  if (ratios.empty()) return "-";
  std::sort(ratios.begin(), ratios.end());
  return absl::StrFormat("%+.1f%% (quartiles %+.1f%% to %+.1f%%)", 100 * Median(ratios),
                         100 * ratios[ratios.size() / 4], 100 * ratios[ratios.size() * 3 / 4]);
}

// All cases run side by side, a block of steps of each in turn, so that what else the machine does
// meets all of them alike. (CPU time does not count what others take.)
void CostOfReadiness() {
  const int prefills = absl::GetFlag(FLAGS_prefills);
  const int blocks = std::max(1, absl::GetFlag(FLAGS_steps) / kStepsOfABlock);
  const StateDirectory state;
  std::vector<std::unique_ptr<Case>> cases;
  cases.push_back(std::make_unique<Case>("nothing kept", std::vector<std::string>()));
  cases.push_back(std::make_unique<Case>("nothing again", std::vector<std::string>()));
  cases.push_back(std::make_unique<Case>("replicas 1", std::vector<std::string>{"--replicas=1"}));
  cases.push_back(std::make_unique<Case>("journal", std::vector<std::string>{state.flag()}));
  for (const auto& one : cases) one->Begin(prefills);
  for (int block = 0; block < blocks; ++block) {
    for (size_t i = 0; i < cases.size(); ++i) {
      cases[(i + static_cast<size_t>(block)) % cases.size()]->Steps(kStepsOfABlock);
    }
  }
  for (int prompt = 0; prompt < prefills; ++prompt) {
    for (size_t i = 0; i < cases.size(); ++i) {
      cases[(i + static_cast<size_t>(prompt)) % cases.size()]->Prompt();
    }
  }
  const Case& base = *cases.front();
  for (const auto& one : cases) {
    std::printf(
        "%-13s %s, medians: decode step of 8 sequences, workers %.1f us, %s; coordinator (CPU "
        "time) "
        "%.1f us, %s; prompt of 4,096 tokens, workers %.4f s, %s\n",
        one->name, OnGpus() ? "time until the answer" : "CPU time", Median(one->step_us),
        MoreThan(base.step_us, one->step_us).c_str(), Median(one->coordinator_us),
        MoreThan(base.coordinator_us, one->coordinator_us).c_str(), Median(one->prefill_s),
        MoreThan(base.prefill_s, one->prefill_s).c_str());
  }
}

}  // namespace
}  // namespace tributary

int main(int argc, char** argv) {
  absl::ParseCommandLine(argc, argv);
  for (const std::string& what : absl::GetFlag(FLAGS_what)) {
    if (what == "coordinator") tributary::KilledCoordinator();
    if (what == "worker") tributary::KilledWorker();
    if (what == "rolling") {
      tributary::RollingRestart(0);
      tributary::RollingRestart(1);
    }
    if (what == "resize") {
      tributary::Resized(0);
      tributary::Resized(1);
    }
    if (what == "cost") tributary::CostOfReadiness();
    std::fflush(stdout);
  }
  return 0;
}
