// tributary bench: a closed loop of attention calls, and how long they took.
#include <signal.h>

#include <atomic>
#include <cstdio>
#include <memory>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "base/status/rpc_errors.h"
#include "service/cli/bench_report.h"
#include "service/cli/commands.h"
#include "service/cli/connect_flags.h"
#include "service/cli/load.h"
#include "service/cli/progress.h"
#include "service/cli/terminal.h"
#include "service/embedded/embedded_service.h"

namespace tributary::cli {
namespace {

// Set by SIGINT and SIGTERM: the run ends, what was measured is shown, the cache is deleted.
std::atomic<bool> interrupted{false};

// While it lives, the first of these signals only asks to stop; the next one ends the process.
class Interruptible {
 public:
  Interruptible() {
    struct sigaction action {};
    action.sa_handler = [](int) { interrupted = true; };
    action.sa_flags = static_cast<int>(SA_RESETHAND);
    for (const int signal : {SIGINT, SIGTERM}) sigaction(signal, &action, nullptr);
  }
  ~Interruptible() {
    for (const int signal : {SIGINT, SIGTERM}) ::signal(signal, SIG_DFL);
  }
};

bool ParseDType(const std::string& name, DType* dtype) {
  for (const DType type :
       {DType::kF32, DType::kBf16, DType::kF16, DType::kFp8E4M3, DType::kFp8E5M2, DType::kNvfp4}) {
    if (name != Name(type)) continue;
    *dtype = type;
    return true;
  }
  return false;
}

bool ParseMemory(const std::string& name, v1::SessionMemory* memory) {
  constexpr std::pair<const char*, v1::SessionMemory> kMemories[] = {
      {"default", v1::SESSION_MEMORY_UNSPECIFIED},
      {"host", v1::SESSION_MEMORY_HOST},
      {"device", v1::SESSION_MEMORY_DEVICE},
      {"messages", v1::SESSION_MEMORY_MESSAGES}};
  for (const auto& [known, value] : kMemories) {
    if (name != known) continue;
    *memory = value;
    return true;
  }
  return false;
}

class Bench final : public Command {
 public:
  std::string name() const override { return "bench"; }
  std::string summary() const override { return "attention load, its latency and throughput"; }
  std::string description() const override {
    return "Fills sequences of --context tokens, then attends over them in a closed loop: each "
           "step\n"
           "sends --rows new tokens of --batch sequences through every layer, one call per layer.\n"
           "Shows latencies of calls and of steps, and tokens/s. Without --target it starts a\n"
           "coordinator with --workers embedded workers on a private socket. The cache it creates\n"
           "is deleted at the end, after SIGINT too.\n"
           "\n"
           "  tributary bench --context=32768 --sequences=8 --batch=8\n"
           "  tributary bench --target=unix:/run/tributary.sock --connections=16 --batch=1 "
           "--sequences=64\n";
  }
  void AddFlags(FlagSet& flags) override {
    AddConnectFlags(flags, &load_.target,
                    "The load goes to the service at this address, host:port or unix:/path; when "
                    "empty, to an embedded service.",
                    &load_.security);
    flags.Add("workers", &embedded_.workers, "The embedded service has this many workers.");
    flags.Add(
        "device", &device_,
        "The embedded service's workers compute on this device: cpu, or cuda (one GPU each).");
    flags.Add("threads", &embedded_.threads,
              "All workers of the embedded service together use this many CPU threads; 0 means all "
              "there are.");
    flags.Add("connections", &load_.connections, "The loops share this many connections in turn.");
    flags.Add("sequences", &load_.sequences,
              "The load has this many sequences; sequences / batch loops run at a time.");
    flags.Add("batch", &load_.batch, "One call covers this many sequences.");
    flags.Add("layers", &load_.layers, "The cache has this many layers.");
    flags.Add("context", &load_.context,
              "Each sequence holds this many tokens before the first step.");
    flags.Add("rows", &load_.rows,
              "A step brings this many new tokens, and query rows, per sequence: 1 decodes, more "
              "verify drafts.");
    flags.Add(
        "rollback_steps", &load_.rollback_steps,
        "Sequences are rolled back to --context after this many steps: 1 measures each step over "
        "the same context.");
    flags.Add("q_heads", &load_.q_heads, "The model has this many query heads.");
    flags.Add("kv_heads", &load_.kv_heads, "The model has this many key and value heads.");
    flags.Add("head_dim", &load_.head_dim,
              "Each head has this many dimensions: 64, 80, 96, 128, 192 or 256.");
    flags.Add(
        "value_head_dim", &load_.value_head_dim,
        "Values and outputs have this many dimensions per head; 0 means head_dim. Keys of 192 "
        "may have values of 128.");
    flags.Add("page_size", &load_.page_size,
              "A page holds this many local slots: 16, 32, 64 or 128.");
    flags.Add("dtype", &dtype_,
              "Queries, keys, values and outputs have this type: f32, bf16 or f16.");
    flags.Add("kv_dtype", &kv_dtype_,
              "The cache holds elements of this type: fp8_e4m3, fp8_e5m2, bf16 or f16; on CPUs f32 "
              "or nvfp4, too.");
    flags.Add("shm", &shared_memory_,
              "Tensors travel in shared memory. The service must run on this machine, and be "
              "called at its "
              "Unix socket unless it opens shared memory by name (--shared_memory_prefixes).");
    flags.Add("shm_bytes", &load_.shared_memory_bytes,
              "Each connection's shared memory region has this many bytes.");
    flags.Add("session", &load_.session,
              "Each step is submitted to a session, and its layers go through shared memory over a "
              "Unix socket, or in messages over TCP, instead of a call each.");
    flags.Add("session_memory", &session_memory_,
              "The session's tensors lie there: default, host (shared memory), device (a GPU) or "
              "messages.");
    flags.Add("slot_rows", &load_.slot_rows,
              "A slot of the session has room for this many rows and new tokens; layers of larger "
              "steps go in pieces. 0 means those of a step.");
    flags.Add(
        "host_gpu", &load_.host_gpu,
        "Queries, keys and values of a session with --session_memory=device lie on this GPU.");
    flags.Add("breakdown", &load_.breakdown,
              "Layers of a session with --session_memory=device are timed on the GPUs, and where "
              "their time goes is shown.");
    flags.Add("warmup", &warmup_, "The load runs for this long before it is measured.");
    flags.Add("duration", &duration_, "The load is measured for this long.");
    flags.Add("timeout", &timeout_, "A call, its repeats included, may take this long.");
    flags.Add("json", &json_, "The result is printed as one JSON object instead of tables.");
  }

  int Run() override {
    if (!ParseDType(dtype_, &load_.dtype)) return WrongDType("dtype", dtype_);
    if (!ParseDType(kv_dtype_, &load_.kv_dtype)) return WrongDType("kv_dtype", kv_dtype_);
    if (!ParseMemory(session_memory_, &load_.session_memory)) {
      Fail(name(), absl::StrCat("--session_memory: cannot be '", session_memory_,
                                "', only default, host, device or messages"));
      return kWrongUsage;
    }
    if (!worker::Parse(device_, &embedded_.device)) {
      Fail(name(), absl::StrCat("--device: cannot be '", device_, "', only cpu or cuda"));
      return kWrongUsage;
    }
    load_.warmup = absl::ToChronoMilliseconds(warmup_);
    load_.duration = absl::ToChronoMilliseconds(duration_);
    load_.timeout = absl::ToChronoMilliseconds(timeout_);
    if (!shared_memory_) load_.shared_memory_bytes = 0;
    if (const absl::Status status = CheckLoad(load_); !status.ok()) {
      Fail(name(), std::string(status.message()));
      return kWrongUsage;
    }
    const Interruptible interruptible;
    std::unique_ptr<service::EmbeddedService> service;
    if (load_.target.empty()) {
      auto started = service::EmbeddedService::Start(embedded_);
      if (!started.ok()) return Fail(name(), StatusText(started.status()));
      service = *std::move(started);
      load_.target = service->target();
    }

    Progress progress;
    const auto result = RunLoad(load_, interrupted,
                                [&](const std::string& what, double done, const std::string& note) {
                                  progress.Show(what, done, note);
                                });
    progress.Clear();
    if (NamesConnectFlag(result.status())) {
      Fail(name(), absl::StrCat("--", result.status().message()));
      return kWrongUsage;
    }
    if (!result.ok()) return Fail(name(), StatusText(result.status()));
    LoadResult measured = *result;
    const std::string report =
        json_ ? BenchJson(load_, measured)
              : BenchReport(load_, measured, service != nullptr, Style::For(stdout));
    std::fputs(report.c_str(), stdout);
    return measured.errors.empty() && measured.requests > 0 ? kDone : kFailed;
  }

 private:
  int WrongDType(const std::string& flag, const std::string& value) const {
    Fail(name(), absl::StrCat("--", flag, ": cannot be '", value, "'; see tributary help bench"));
    return kWrongUsage;
  }

  LoadOptions load_;
  service::EmbeddedServiceOptions embedded_{.workers = 4};
  std::string device_ = Name(worker::Device::kCpu);
  std::string dtype_ = Name(LoadOptions().dtype);
  std::string kv_dtype_ = Name(LoadOptions().kv_dtype);
  std::string session_memory_ = "default";
  bool shared_memory_ = true;
  bool json_ = false;
  absl::Duration warmup_ = absl::FromChrono(LoadOptions().warmup);
  absl::Duration duration_ = absl::FromChrono(LoadOptions().duration);
  absl::Duration timeout_ = absl::FromChrono(LoadOptions().timeout);
};

}  // namespace

std::unique_ptr<Command> MakeBench() { return std::make_unique<Bench>(); }

}  // namespace tributary::cli
