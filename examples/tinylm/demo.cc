// tinylm-demo: a language model writes text while its attention is computed by a coordinator and
// its workers; then a table of what that costs and whether it changes the answers.
#include <chrono>
#include <cstdio>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/flags/usage.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "base/config/flag_help.h"
#include "examples/tinylm/evaluate.h"
#include "examples/tinylm/find_files.h"
#include "examples/tinylm/generate.h"
#include "examples/tinylm/host.h"
#include "examples/tinylm/local_attention.h"
#include "examples/tinylm/model.h"
#include "examples/tinylm/service_attention.h"
#include "examples/tinylm/session_attention.h"
#include "examples/tinylm/speculation_table.h"
#include "examples/tinylm/timed_attention.h"
#include "service/client/client.h"
#include "service/embedded/embedded_service.h"
#include "worker/backends.h"

ABSL_FLAG(std::string, prompt, "And it came to pass in those days, that the king of Israel",
          "what the model goes on from");
ABSL_FLAG(int32_t, tokens, 300, "how many tokens (bytes of text) to generate");
ABSL_FLAG(std::optional<int32_t>, workers, std::nullopt,
          "workers of the embedded service; default: 4, or 1 with --device=cuda");
ABSL_FLAG(std::string, device, "cpu",
          "what the embedded service's workers compute on: cpu, or cuda (a GPU each)");
ABSL_FLAG(
    std::string, kv_dtype, "fp8_e4m3",
    "what the text's KV cache holds: fp8_e4m3, fp8_e5m2, bf16 or f16; on CPUs f32 or nvfp4, too");
ABSL_FLAG(std::string, target, "",
          "a running service (host:port or unix:/path) to use instead of an embedded one");
ABSL_FLAG(double, temperature, 0.7, "of the text shown; 0: always the most likely byte");
ABSL_FLAG(uint64_t, seed, 1, "of the text shown");
ABSL_FLAG(std::string, weights, "",
          "folder with model.safetensors and config.json; default: found beside the program or "
          "under examples/tinylm");
ABSL_FLAG(std::string, heldout, "",
          "text that perplexity is measured on; default: heldout.txt beside the weights");
ABSL_FLAG(bool, table, true, "print the table after the text");
ABSL_FLAG(int32_t, table_tokens, 128, "tokens generated for each row of the table");
ABSL_FLAG(int32_t, heldout_windows, 4, "windows of held-out text scored for each row");
ABSL_FLAG(bool, speculate, false,
          "instead of text, a table of speculative decoding: a block-diffusion draft guesses in "
          "DFLASH mode, the model verifies in CAUSAL mode");
ABSL_FLAG(int32_t, block, 0, "tokens a draft's block has; 0: what the draft was made for");
ABSL_FLAG(int32_t, speculate_prompts, 4,
          "prompts for each row of that table; standard errors come from how much they differ");
ABSL_FLAG(int32_t, speculate_parallel, 1,
          "prompts written at a time for that table. More make better use of the machine; a "
          "token's time is then that of all divided by their number");
ABSL_FLAG(std::vector<std::string>, speculate_workers, (std::vector<std::string>{"1", "2", "4"}),
          "workers of the embedded services that are compared in that table, one after the other");

namespace tributary::tinylm {
namespace {

constexpr int64_t kWindowBytes = 1024;
// Tokens a call when scoring: the most the service still reads back from its cache.
constexpr int64_t kChunk = 64;
constexpr int kMaxWorkers = 64;  // and prompts at a time: threads of this process
constexpr int64_t kCalibrationBytes = 1024;
constexpr int64_t kPromptBytes = 64;  // of the prompts that speculation goes on from

absl::StatusOr<DType> ParseKvDType(const std::string& name) {
  for (const DType type :
       {DType::kFp8E4M3, DType::kFp8E5M2, DType::kBf16, DType::kF16, DType::kF32, DType::kNvfp4}) {
    if (name == Name(type)) return type;
  }
  return absl::InvalidArgumentError(
      absl::StrCat("--kv_dtype=", name, " is none of fp8_e4m3, fp8_e5m2, bf16, f16, f32, nvfp4"));
}

// The embedded service's, from the flags.
absl::StatusOr<service::EmbeddedServiceOptions> ReadServiceOptions() {
  service::EmbeddedServiceOptions options;
  const std::string device = absl::GetFlag(FLAGS_device);
  if (!worker::Parse(device, &options.device)) {
    return absl::InvalidArgumentError(
        absl::StrCat("--device=", device, " is neither cpu nor cuda"));
  }
  // A GPU more is asked for by name: not every machine has four.
  options.workers =
      absl::GetFlag(FLAGS_workers).value_or(options.device == worker::Device::kCuda ? 1 : 4);
  if (options.workers < 1 || options.workers > kMaxWorkers) {
    return absl::InvalidArgumentError(
        absl::StrCat("--workers=", options.workers, " is not in 1 .. ", kMaxWorkers));
  }
  return options;
}

// One sequence and the cache it is in.
struct Conversation {
  std::unique_ptr<ServiceCache> cache;
  std::unique_ptr<ServiceAttention> attention;
};

absl::StatusOr<Conversation> Converse(const Host& host, const Model& model, DType kv_dtype,
                                      const std::string& calibration_text) {
  Conversation conversation;
  absl::StatusOr<std::unique_ptr<ServiceCache>> cache =
      CreateModelCache(host, model, kv_dtype, calibration_text);
  if (!cache.ok()) return cache.status();
  conversation.cache = *std::move(cache);
  absl::StatusOr<std::unique_ptr<ServiceAttention>> attention =
      ServiceAttention::Open(conversation.cache.get());
  if (!attention.ok()) return attention.status();
  conversation.attention = *std::move(attention);
  return conversation;
}

void Show(Token token) {
  const bool printable = token == '\n' || (token >= ' ' && token < 0x7f);
  std::fputc(printable ? token : '?', stdout);
  std::fflush(stdout);
}

absl::Status ShowText(const Model& model, Attention& attention) {
  const std::string prompt = absl::GetFlag(FLAGS_prompt);
  std::printf("%s", prompt.c_str());
  std::fflush(stdout);
  const Sampler sampler(static_cast<float>(absl::GetFlag(FLAGS_temperature)),
                        absl::GetFlag(FLAGS_seed));
  const auto text = Generate(model, prompt, absl::GetFlag(FLAGS_tokens), sampler, attention, Show);
  std::printf("\n\n");
  return text.status();
}

// The table, printed row by row. The first row is what the others are compared with.
class Table {
 public:
  Table(const Model& model, std::vector<std::string> windows)
      : model_(model), windows_(std::move(windows)) {
    size_t bytes = 0;
    for (const std::string& window : windows_) bytes += window.size();
    std::printf(
        "Greedy decoding of %d tokens: how fast, and the share of the time that attention takes.\n"
        "%zu bytes of held-out text, %d per call: perplexity per byte, and how often the most "
        "likely\n"
        "byte is that of the first row.\n\n",
        absl::GetFlag(FLAGS_table_tokens), bytes, static_cast<int>(kChunk));
    std::printf("%-18s %9s %11s %12s %11s\n", "attention", "tokens/s", "its share", "perplexity/B",
                "same greedy");
  }

  absl::Status AddRow(const std::string& label, Attention& attention) {
    std::printf("%-18s ", label.c_str());
    std::fflush(stdout);
    TimedAttention timed(attention);
    const int64_t count = absl::GetFlag(FLAGS_table_tokens);
    const auto begin = std::chrono::steady_clock::now();
    const auto text = Generate(model_, absl::GetFlag(FLAGS_prompt), count, Sampler(), timed);
    if (!text.ok()) return text.status();
    const std::chrono::duration<double> spent = std::chrono::steady_clock::now() - begin;
    std::printf("%9.1f %10.0f%% ", static_cast<double>(count) / spent.count(),
                100 * timed.seconds() / spent.count());
    std::fflush(stdout);

    absl::StatusOr<Evaluation> evaluation = Evaluate(model_, windows_, kChunk, attention);
    if (!evaluation.ok()) return evaluation.status();
    if (baseline_.greedy.empty()) baseline_ = *evaluation;
    std::printf("%12.4f %10.2f%%\n", evaluation->perplexity,
                100 * GreedyAgreement(*evaluation, baseline_));
    std::fflush(stdout);
    return absl::OkStatus();
  }

 private:
  const Model& model_;
  const std::vector<std::string> windows_;
  Evaluation baseline_;
};

absl::Status AddServiceRow(const Host& host, const Model& model, DType kv_dtype,
                           const std::string& calibration_text, Table& table) {
  absl::StatusOr<Conversation> conversation = Converse(host, model, kv_dtype, calibration_text);
  if (!conversation.ok()) return conversation.status();
  const std::string label = absl::StrCat("DCP", conversation->cache->ranks(), " ", Name(kv_dtype));
  return table.AddRow(label, *conversation->attention);
}

// The last of them again, over a session: the same, faster.
absl::Status AddSessionRow(const Host& host, const Model& model, DType kv_dtype,
                           const std::string& calibration_text, Table& table) {
  const absl::StatusOr<std::unique_ptr<ServiceCache>> cache =
      CreateModelCache(host, model, kv_dtype, calibration_text);
  if (!cache.ok()) return cache.status();
  const absl::StatusOr<std::unique_ptr<SessionAttention>> attention =
      SessionAttention::Open(cache->get(), {.target = host.target});
  if (!attention.ok()) return attention.status();
  return table.AddRow("  over a session", **attention);
}

absl::Status ShowTable(const Host& host, service::EmbeddedServiceOptions service,
                       const Model& model, const std::string& held_out) {
  const std::string calibration = held_out.substr(0, kCalibrationBytes);
  // What scales are calibrated on is not scored.
  Table table(model, Windows(absl::string_view(held_out).substr(calibration.size()),
                             absl::GetFlag(FLAGS_heldout_windows), kWindowBytes));
  LocalAttention local(model.config());
  if (absl::Status status = table.AddRow("local f32", local); !status.ok()) return status;
  if (host.embedded != nullptr && service.workers > 1) {
    service.workers = 1;
    const absl::StatusOr<Host> alone = ConnectTo("", service);
    if (!alone.ok()) return alone.status();
    absl::Status status = AddServiceRow(*alone, model, DType::kBf16, calibration, table);
    if (!status.ok()) return status;
  }
  std::vector<DType> types = {DType::kBf16, DType::kFp8E4M3};
  if (host.embedded != nullptr && service.device == worker::Device::kCpu) {
    types.insert(types.end(), {DType::kNvfp4, DType::kF32});
  }
  for (const DType kv_dtype : types) {
    absl::Status status = AddServiceRow(host, model, kv_dtype, calibration, table);
    if (!status.ok()) return status;
  }
  return AddSessionRow(host, model, DType::kFp8E4M3, calibration, table);
}

absl::StatusOr<std::vector<int>> ReadSpeculateWorkers() {
  std::vector<int> workers;
  for (const std::string& text : absl::GetFlag(FLAGS_speculate_workers)) {
    int count = 0;
    if (!absl::SimpleAtoi(text, &count) || count < 1 || count > kMaxWorkers) {
      return absl::InvalidArgumentError(
          absl::StrCat("--speculate_workers=", text, " is not in 1 .. ", kMaxWorkers));
    }
    workers.push_back(count);
  }
  return workers;
}

absl::StatusOr<SpeculationTableOptions> ReadSpeculationOptions(const Draft& draft,
                                                               const std::string& held_out) {
  SpeculationTableOptions options;
  options.calibration_text = held_out.substr(0, kCalibrationBytes);
  options.prompts = Windows(absl::string_view(held_out).substr(options.calibration_text.size()),
                            absl::GetFlag(FLAGS_speculate_prompts), kPromptBytes);
  options.tokens = absl::GetFlag(FLAGS_table_tokens);
  const int32_t block = absl::GetFlag(FLAGS_block);
  options.block = block > 0 ? block : draft.config().block_size;
  options.parallel = absl::GetFlag(FLAGS_speculate_parallel);
  if (options.prompts.empty()) {
    return absl::InvalidArgumentError("--speculate_prompts: there is no prompt");
  }
  if (options.parallel < 1 || options.parallel > kMaxWorkers) {
    return absl::InvalidArgumentError(
        absl::StrCat("--speculate_parallel=", options.parallel, " is not in 1 .. ", kMaxWorkers));
  }
  return options;
}

absl::Status ShowSpeculation(service::EmbeddedServiceOptions service, const Model& model,
                             const std::string& weights_folder, const std::string& held_out) {
  absl::StatusOr<DraftWeights> weights = LoadDraft(weights_folder, model.config());
  if (!weights.ok()) return weights.status();
  const Draft draft(*std::move(weights), model);
  const absl::StatusOr<std::vector<int>> groups = ReadSpeculateWorkers();
  if (!groups.ok()) return groups.status();
  absl::StatusOr<SpeculationTableOptions> options = ReadSpeculationOptions(draft, held_out);
  if (!options.ok()) return options.status();
  SpeculationTable table(model, draft, *std::move(options));
  for (const int workers : *groups) {
    service.workers = workers;
    const absl::StatusOr<Host> host = ConnectTo(absl::GetFlag(FLAGS_target), service);
    if (!host.ok()) return host.status();
    if (absl::Status status = table.AddService(*host); !status.ok()) return status;
    if (host->embedded == nullptr) break;  // a service that runs already has the workers it has
  }
  table.PrintComparisons();
  return absl::OkStatus();
}

absl::Status Run() {
  const absl::StatusOr<DType> kv_dtype = ParseKvDType(absl::GetFlag(FLAGS_kv_dtype));
  if (!kv_dtype.ok()) return kv_dtype.status();
  std::string weights_folder = absl::GetFlag(FLAGS_weights);
  std::string held_out_path = absl::GetFlag(FLAGS_heldout);
  if (weights_folder.empty() || held_out_path.empty()) {
    const absl::StatusOr<std::string> folder = FindModelFolder();
    if (!folder.ok()) return folder.status();
    if (weights_folder.empty()) weights_folder = absl::StrCat(*folder, "/weights");
    if (held_out_path.empty()) held_out_path = absl::StrCat(*folder, "/heldout.txt");
  }
  absl::StatusOr<Weights> weights = LoadWeights(weights_folder);
  if (!weights.ok()) return weights.status();
  const absl::StatusOr<std::string> held_out = ReadText(held_out_path);
  if (!held_out.ok()) return held_out.status();
  const Model model(*std::move(weights));
  const absl::StatusOr<service::EmbeddedServiceOptions> service = ReadServiceOptions();
  if (!service.ok()) return service.status();
  if (absl::GetFlag(FLAGS_speculate)) {
    return ShowSpeculation(*service, model, weights_folder, *held_out);
  }
  const absl::StatusOr<Host> host = ConnectTo(absl::GetFlag(FLAGS_target), *service);
  if (!host.ok()) return host.status();
  {
    absl::StatusOr<Conversation> conversation =
        Converse(*host, model, *kv_dtype, held_out->substr(0, kCalibrationBytes));
    if (!conversation.ok()) return conversation.status();
    const ModelConfig& c = model.config();
    std::printf(
        "%d layers of attention by %s, %d workers on %s; KV cache %s; %d query and %d KV heads of "
        "%d\n\n",
        c.layers, host->embedded ? "an embedded coordinator" : absl::GetFlag(FLAGS_target).c_str(),
        conversation->cache->ranks(), conversation->cache->backend().c_str(), Name(*kv_dtype),
        c.q_heads, c.kv_heads, c.head_dim);
    if (absl::Status shown = ShowText(model, *conversation->attention); !shown.ok()) return shown;
  }
  return absl::GetFlag(FLAGS_table) ? ShowTable(*host, *service, model, *held_out)
                                    : absl::OkStatus();
}

}  // namespace
}  // namespace tributary::tinylm

int main(int argc, char** argv) {
  constexpr char kUsage[] =
      "A small language model writes text; its attention is computed by a Tributary service.";
  if (tributary::PrintsHelp(argc, argv, kUsage, "tinylm/demo.cc")) return 0;
  absl::SetProgramUsageMessage(kUsage);
  absl::ParseCommandLine(argc, argv);
  const absl::Status status = tributary::tinylm::Run();
  if (status.ok()) return 0;
  std::fflush(stdout);
  std::fprintf(stderr, "\ntinylm-demo: %s\n", status.ToString().c_str());
  return 1;
}
