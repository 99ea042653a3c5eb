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
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "examples/tinylm/evaluate.h"
#include "examples/tinylm/find_files.h"
#include "examples/tinylm/generate.h"
#include "examples/tinylm/local_attention.h"
#include "examples/tinylm/model.h"
#include "examples/tinylm/service_attention.h"
#include "examples/tinylm/speculate.h"
#include "examples/tinylm/timed_attention.h"
#include "service/cli/embedded_service.h"
#include "service/client/client.h"
#include "worker/backends.h"

ABSL_FLAG(std::string, prompt, "And it came to pass in those days, that the king of Israel",
          "what the model goes on from");
ABSL_FLAG(int32_t, tokens, 300, "how many tokens (bytes of text) to generate");
ABSL_FLAG(std::optional<int32_t>, workers, std::nullopt,
          "workers of the embedded service; default: 4, or 1 with --device=cuda");
ABSL_FLAG(std::string, device, "cpu",
          "what the embedded service's workers compute on: cpu, or cuda (a GPU each)");
ABSL_FLAG(std::string, kv_dtype, "fp8_e4m3",
          "what the text's KV cache holds: fp8_e4m3, fp8_e5m2, bf16 or f16");
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
ABSL_FLAG(int32_t, speculate_prompts, 4, "prompts for each row of that table");

namespace tributary::tinylm {
namespace {

constexpr int64_t kWindowBytes = 1024;
// Tokens a call when scoring: the most the service still reads back from its cache.
constexpr int64_t kChunk = 64;
constexpr size_t kSharedMemoryBytes = size_t{16} << 20;
constexpr int kMaxWorkers = 64;  // threads of this process
constexpr int64_t kCalibrationBytes = 1024;
constexpr int64_t kPromptBytes = 64;  // of the prompts that speculation goes on from

absl::StatusOr<DType> ParseKvDType(const std::string& name) {
  for (const DType type : {DType::kFp8E4M3, DType::kFp8E5M2, DType::kBf16, DType::kF16}) {
    if (name == Name(type)) return type;
  }
  return absl::InvalidArgumentError(
      absl::StrCat("--kv_dtype=", name, " is none of fp8_e4m3, fp8_e5m2, bf16, f16"));
}

// The embedded service's, from the flags.
absl::StatusOr<cli::EmbeddedServiceOptions> ReadServiceOptions() {
  cli::EmbeddedServiceOptions options;
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

// A service and the connection to it.
struct Host {
  std::unique_ptr<cli::EmbeddedService> embedded;  // null when the service is another process
  std::unique_ptr<client::Client> client;
};

absl::StatusOr<Host> ConnectTo(const std::string& target,
                               const cli::EmbeddedServiceOptions& service) {
  Host host;
  client::ConnectOptions options{.target = target};
  if (target.empty()) {
    auto embedded = cli::EmbeddedService::Start(service);
    if (!embedded.ok()) return embedded.status();
    host.embedded = *std::move(embedded);
    options.target = host.embedded->target();
    options.shared_memory_bytes = kSharedMemoryBytes;
  }
  absl::StatusOr<std::unique_ptr<client::Client>> client = client::Client::Connect(options);
  if (!client.ok()) return client.status();
  host.client = *std::move(client);
  return host;
}

// One sequence and the cache it is in.
struct Conversation {
  std::unique_ptr<ServiceCache> cache;
  std::unique_ptr<ServiceAttention> attention;
};

absl::StatusOr<Conversation> Converse(const Host& host, const Model& model, DType kv_dtype,
                                      const std::string& calibration_text) {
  absl::StatusOr<std::vector<LayerScales>> scales =
      CalibrateScales(model, calibration_text, kv_dtype);
  if (!scales.ok()) return scales.status();
  Conversation conversation;
  absl::StatusOr<std::unique_ptr<ServiceCache>> cache = ServiceCache::Create(
      host.client.get(), model.config(), {.kv_dtype = kv_dtype, .scales = *std::move(scales)});
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
    std::printf("Greedy decoding of %d tokens; %zu bytes of held-out text, %d a call.\n\n",
                absl::GetFlag(FLAGS_table_tokens), bytes, static_cast<int>(kChunk));
    std::printf("%-18s %9s %11s %12s %11s\n", "attention", "tokens/s", "of the time",
                "perplexity/B", "same greedy");
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

absl::Status ShowTable(const Host& host, cli::EmbeddedServiceOptions service, const Model& model,
                       const std::string& held_out) {
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
  for (const DType kv_dtype : {DType::kBf16, DType::kFp8E4M3}) {
    absl::Status status = AddServiceRow(host, model, kv_dtype, calibration, table);
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

// A draft's sequence and the cache it is in.
struct DraftConversation {
  std::unique_ptr<ServiceCache> cache;
  std::unique_ptr<ServiceDraftAttention> attention;
};

absl::StatusOr<DraftConversation> ConverseWithDraft(const Host& host, const Model& model,
                                                    const Draft& draft, DType kv_dtype,
                                                    int64_t window_left,
                                                    const std::string& calibration_text) {
  absl::StatusOr<std::vector<LayerScales>> scales =
      CalibrateDraftScales(model, draft, calibration_text, kv_dtype);
  if (!scales.ok()) return scales.status();
  DraftConversation conversation;
  absl::StatusOr<std::unique_ptr<ServiceCache>> cache =
      ServiceCache::Create(host.client.get(), draft.config().shape,
                           {.kv_dtype = kv_dtype,
                            .scales = *std::move(scales),
                            .window_left = window_left,
                            .mode = v1::ATTEND_MODE_DFLASH});
  if (!cache.ok()) return cache.status();
  conversation.cache = *std::move(cache);
  absl::StatusOr<std::unique_ptr<ServiceDraftAttention>> attention =
      ServiceDraftAttention::Open(conversation.cache.get());
  if (!attention.ok()) return attention.status();
  conversation.attention = *std::move(attention);
  return conversation;
}

// Greedy texts of all prompts, and what they took.
struct Written {
  std::vector<std::string> texts;
  double seconds = 0;
};

template <typename Write>
absl::StatusOr<Written> WriteAll(const std::vector<std::string>& prompts, Write write) {
  Written written;
  const auto begin = std::chrono::steady_clock::now();
  for (const std::string& prompt : prompts) {
    absl::StatusOr<std::string> text = write(prompt);
    if (!text.ok()) return text.status();
    written.texts.push_back(*std::move(text));
  }
  written.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  return written;
}

void PrintSpeculation(const std::string& model_cache, const std::string& draft_cache,
                      const std::string& mask, double acceptance, double seconds_per_token,
                      double speed_up, const char* text) {
  std::printf("%-16s %-10s %-8s %10.3f %9.2f %8.2fx  %s\n", model_cache.c_str(),
              draft_cache.c_str(), mask.c_str(), acceptance, 1e3 * seconds_per_token, speed_up,
              text);
  std::fflush(stdout);
}

// Rows of the table for one service and one type of the model's cache: plain decoding, then drafts
// whose own caches are of `draft_dtypes`, with full and with sliding attention.
absl::Status AddSpeculationRows(const Host& host, const Model& model, const Draft& draft,
                                DType kv_dtype, const std::vector<DType>& draft_dtypes,
                                const std::vector<std::string>& prompts,
                                const std::string& calibration_text) {
  absl::StatusOr<Conversation> target = Converse(host, model, kv_dtype, calibration_text);
  if (!target.ok()) return target.status();
  const int64_t count = absl::GetFlag(FLAGS_table_tokens);
  const int32_t asked = absl::GetFlag(FLAGS_block);
  const int64_t block = asked > 0 ? asked : draft.config().block_size;
  const double tokens = static_cast<double>(count) * static_cast<double>(prompts.size());
  const absl::StatusOr<Written> plain = WriteAll(prompts, [&](const std::string& prompt) {
    return Generate(model, prompt, count, Sampler(), *target->attention);
  });
  if (!plain.ok()) return plain.status();
  const std::string label = absl::StrFormat("DCP%d %s", target->cache->ranks(), Name(kv_dtype));
  PrintSpeculation(label, "-", "-", 1, plain->seconds / tokens, 1, "");
  for (const DType draft_dtype : draft_dtypes) {
    for (const int64_t window : {int64_t{-1}, draft.config().sliding_window_left}) {
      absl::StatusOr<DraftConversation> context =
          ConverseWithDraft(host, model, draft, draft_dtype, window, calibration_text);
      if (!context.ok()) return context.status();
      SpeculationCounts counts;
      const absl::StatusOr<Written> written = WriteAll(prompts, [&](const std::string& prompt) {
        return Speculate(model, draft, prompt, count, block, *target->attention,
                         *context->attention, &counts);
      });
      if (!written.ok()) return written.status();
      PrintSpeculation(label, Name(draft_dtype), window < 0 ? "full" : "sliding",
                       counts.acceptance_length(), written->seconds / tokens,
                       plain->seconds / written->seconds,
                       written->texts == plain->texts ? "same text" : "OTHER TEXT");
    }
  }
  return absl::OkStatus();
}

absl::Status ShowSpeculation(cli::EmbeddedServiceOptions service, const Model& model,
                             const std::string& weights_folder, const std::string& held_out) {
  absl::StatusOr<DraftWeights> weights = LoadDraft(weights_folder, model.config());
  if (!weights.ok()) return weights.status();
  const Draft draft(*std::move(weights), model);
  const std::string calibration = held_out.substr(0, kCalibrationBytes);
  const std::vector<std::string> prompts =
      Windows(absl::string_view(held_out).substr(calibration.size()),
              absl::GetFlag(FLAGS_speculate_prompts), kPromptBytes);
  std::printf("Greedy decoding of %d tokens after each of %zu prompts of %d bytes.\n\n",
              absl::GetFlag(FLAGS_table_tokens), prompts.size(), static_cast<int>(kPromptBytes));
  std::printf("%-16s %-10s %-8s %10s %9s %9s\n", "model's cache", "draft's", "mask", "acceptance",
              "ms/token", "speed-up");
  for (const int workers : {1, 2, 4}) {
    service.workers = workers;
    const absl::StatusOr<Host> host = ConnectTo(absl::GetFlag(FLAGS_target), service);
    if (!host.ok()) return host.status();
    const std::pair<DType, std::vector<DType>> types[] = {
        {DType::kBf16, {DType::kBf16, DType::kFp8E4M3}}, {DType::kFp8E4M3, {DType::kFp8E4M3}}};
    for (const auto& [kv_dtype, draft_dtypes] : types) {
      absl::Status status =
          AddSpeculationRows(*host, model, draft, kv_dtype, draft_dtypes, prompts, calibration);
      if (!status.ok()) return status;
    }
    if (host->embedded == nullptr) break;  // a service that runs already has the workers it has
  }
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
  const absl::StatusOr<cli::EmbeddedServiceOptions> service = ReadServiceOptions();
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
  absl::SetProgramUsageMessage(
      "A small language model writes text; its attention is computed by a Tributary service.");
  absl::ParseCommandLine(argc, argv);
  const absl::Status status = tributary::tinylm::Run();
  if (status.ok()) return 0;
  std::fflush(stdout);
  std::fprintf(stderr, "\ntinylm-demo: %s\n", status.ToString().c_str());
  return 1;
}
