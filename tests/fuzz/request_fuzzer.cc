// The first byte chooses the kind of message, the rest are its bytes, or those of several, each
// behind its length. A message is refused with a status, or it holds what everything behind the
// checks relies on.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <deque>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/telemetry/trace.h"
#include "google/protobuf/stubs/logging.h"
#include "kernels/cpu/backend.h"
#include "service/data/resolve_spec.h"
#include "service/data/session_terms.h"
#include "service/data/shared_memory.h"
#include "service/schedule/range_steps.h"
#include "service/schedule/reconcile.h"
#include "service/schedule/sequence_table.h"
#include "service/schedule/session_step.h"
#include "service/schedule/step_batch.h"
#include "service/schedule/step_request.h"
#include "service/schedule/step_split.h"
#include "tributary/v1/attention.pb.h"
#include "tributary/v1/session.pb.h"
#include "tributary/v1/worker.pb.h"
#include "worker/backends.h"
#include "worker/cache_spec.h"
#include "worker/rpc/conversion.h"
#include "worker/rpc/holdings_conversion.h"
#include "worker/rpc/registration.h"

namespace tributary {

// Replies are not written here, so that the kernels need not be built.
namespace cpu {
void StoreOutput(const OutputFormat&, const float*, size_t, void*) { std::abort(); }
}  // namespace cpu

namespace {

// The kind that all messages are taken for, whatever their first byte; below 0: each as it says.
int only_kind = -1;

constexpr int kRanks = 4;
constexpr uint64_t kSequences = 4;

void Require(bool holds) {
  if (!holds) __builtin_trap();
}

service::TableGeometry FuzzedTable(const worker::CacheSpec& spec) {
  return {.layers = 2,
          .ranks = kRanks,
          .page_size = spec.page_size,
          .interleave = spec.interleave,
          .pages = spec.num_pages,
          .max_sequences = 16,
          .name = "fuzzed"};
}

worker::CacheSpec FuzzedSpec() {
  v1::CacheSpec asked;
  asked.set_layers(2);
  asked.set_q_heads(4);
  asked.set_kv_heads(2);
  asked.set_head_dim(64);
  asked.set_page_size(16);
  asked.set_kv_dtype(v1::DTYPE_BF16);
  asked.set_capacity_tokens(4096);
  absl::StatusOr<service::ResolvedSpec> resolved = service::ResolveSpec(asked, kRanks);
  if (!resolved.ok()) std::abort();
  return resolved->spec;
}

// Calls take(bytes, count) for each record: two bytes of length, the lower one first, and so many
// bytes. What is left at the end is a record, too.
template <typename Take>
void ForEachRecord(const uint8_t* data, size_t size, Take take) {
  while (size >= 2) {
    const size_t count = std::min<size_t>(data[0] + 256 * data[1], size - 2);
    take(data + 2, count);
    data += 2 + count, size -= 2 + count;
  }
}

// What the messages of a session's stream may ask: a session, or a step of one that is open.
class SessionMessages {
 public:
  void Take(const uint8_t* data, size_t size) {
    v1::SessionRequest message;
    if (!message.ParseFromArray(data, static_cast<int>(size))) return;
    if (message.has_open()) TakeOpen(message.open());
    if (message.has_submit()) TakeStep(message.submit());
  }

  // The steps of one stream, accepted on top of each other. The first byte of each record says what
  // becomes of those in flight before it: the oldest is settled, or all are undone, the last first.
  void TakeStream(const uint8_t* data, size_t size) const {
    service::SequenceTable table(FuzzedTable(spec_));
    for (uint64_t id = 1; id <= kSequences; ++id) {
      bool reopened = false;
      Require(table.Open(id, &reopened).ok());
    }
    service::RangeSteps steps(table);
    std::deque<service::AcceptedRange> in_flight;
    const auto settle_oldest = [&] {
      steps.Settle(&in_flight.front());
      in_flight.pop_front();
    };
    const auto undo_all = [&] {
      for (; !in_flight.empty(); in_flight.pop_back()) steps.Undo(&in_flight.back());
    };
    ForEachRecord(data, size, [&](const uint8_t* record, size_t count) {
      if (count == 0) return;
      v1::SessionRequest message;
      if (!message.ParseFromArray(record + 1, static_cast<int>(count - 1))) return;
      if (record[0] % 4 == 1 && !in_flight.empty()) settle_oldest();
      if (record[0] % 4 == 2) undo_all();
      if (!message.has_submit()) return;
      const auto step = service::CheckSessionStep(message.submit(), terms_, spec_, {}, backends_);
      if (!step.ok()) return;
      auto accepted = steps.Accept(step->range, step->kind, step->entries, step->changes, nullptr);
      if (accepted.ok()) in_flight.push_back(*std::move(accepted));
    });
    if (size % 2 == 0) undo_all();
    while (!in_flight.empty()) settle_oldest();
    std::vector<worker::SequenceId> open;
    for (const auto& [id, sequence] : table.sequences()) open.push_back(id);
    for (const worker::SequenceId id : open) Require(table.Close(id).ok());
    Require(table.pages().used() == 0);
  }

 private:
  void TakeOpen(const v1::OpenSession& asked) const {
    const auto terms = service::ResolveSessionTerms(asked, spec_);
    if (!terms.ok()) return;
    const mailbox::Layout& layout = terms->command.layout;
    Require(layout.slots > 0 && terms->command.max_rows >= 0 && terms->command.max_new_tokens >= 0);
    // What is shown can be asked for, and is the same.
    const auto again = service::ResolveSessionTerms(terms->public_terms, spec_);
    Require(again.ok() && again->command.layout.bytes == layout.bytes);
  }

  // Two steps on top of each other, of which the second fails: then nothing is held.
  void TakeStep(const v1::SubmitStep& asked) const {
    const auto step = service::CheckSessionStep(asked, terms_, spec_, {}, backends_);
    if (!step.ok()) return;
    service::SequenceTable table(FuzzedTable(spec_));
    for (uint64_t id = 1; id <= kSequences; ++id) {
      bool reopened = false;
      Require(table.Open(id, &reopened).ok());
    }
    service::RangeSteps steps(table);
    auto first = steps.Accept(step->range, step->kind, step->entries, step->changes, nullptr);
    auto second = steps.Accept(step->range, step->kind, step->entries, step->changes, nullptr);
    if (second.ok()) steps.Undo(&*second);
    if (first.ok()) steps.Settle(&*first);
    std::vector<worker::SequenceId> open;
    for (const auto& [id, sequence] : table.sequences()) open.push_back(id);
    for (const worker::SequenceId id : open) Require(table.Close(id).ok());
    Require(table.pages().used() == 0);
  }

  static service::SessionTerms FuzzedTerms(const worker::CacheSpec& spec) {
    v1::OpenSession asked;
    asked.set_cache_id("fuzzed");
    asked.set_memory(v1::SESSION_MEMORY_MESSAGES);
    asked.set_max_rows(64);
    asked.set_max_new_tokens(64);
    asked.set_q_dtype(v1::DTYPE_BF16);
    const auto terms = service::ResolveSessionTerms(asked, spec);
    if (!terms.ok()) std::abort();
    return *terms;
  }

  const worker::CacheSpec spec_ = FuzzedSpec();
  const worker::CacheBackends backends_{worker::RegisteredBackends(), spec_, {}};
  const service::SessionTerms terms_ = FuzzedTerms(spec_);
};

// Checks a request, and what the sequence table makes of it: all of it, or nothing.
class Requests {
 public:
  template <typename Request, typename Check>
  void Take(const uint8_t* data, size_t size, Check check) {
    const absl::StatusOr<service::StepRequest> checked = Checked<Request>(data, size, check);
    if (!checked.ok()) return;
    CheckTensors(*checked);
    CheckPlan(*checked);
  }

  // The calls of one stream, over the same sequences. The first byte of each record says what
  // becomes of it, and the second how much a step may take.
  void TakeStream(const uint8_t* data, size_t size) {
    service::SequenceTable table(FuzzedTable(spec_));
    for (uint64_t id = 1; id <= kSequences; ++id) {
      bool reopened = false;
      Require(table.Open(id, &reopened).ok());
    }
    ForEachRecord(data, size, [&](const uint8_t* record, size_t count) {
      if (count < 2) return;
      const auto request = Checked<v1::AttendRequest>(record + 2, count - 2, service::CheckAttend);
      if (!request.ok()) return;
      CheckTensors(*request);
      const auto plan = table.Reserve(request->key.layer, request->key.kind, request->entries);
      if (!plan.ok()) return;
      CheckPieces(*request, *plan, record[1]);
      if (record[0] % 4 == 0) {
        table.Rollback(*plan);
      } else {
        table.Commit(*plan);
      }
      if (record[0] % 16 == 5) table.Truncate(1, record[1]).status().IgnoreError();
    });
    for (uint64_t id = 1; id <= kSequences; ++id) Require(table.Close(id).ok());
    Require(table.pages().used() == 0);
  }

 private:
  template <typename Request, typename Check>
  absl::StatusOr<service::StepRequest> Checked(const uint8_t* data, size_t size, Check check) {
    auto request = std::make_shared<Request>();
    if (!request->ParseFromArray(data, static_cast<int>(size))) {
      return absl::InvalidArgumentError("no message");
    }
    const service::StepContext context = {.cache = 1,
                                          .spec = &spec_,
                                          .terms = &terms_,
                                          .backends = &backends_,
                                          .regions = &regions_,
                                          .max_message_bytes = size_t{1} << 20};
    return check(std::shared_ptr<const Request>(request), context);
  }

  // However little a step may take, the pieces are the call, and their tensors lie inside its own.
  void CheckPieces(const service::StepRequest& request, const service::StepReservation& plan,
                   int rows) const {
    const worker::LayerSpec& layer = spec_.layers[static_cast<size_t>(request.key.layer)];
    const worker::LayerGeometry geometry = worker::GeometryOf(spec_, layer);
    const service::StepLimits limits{.bytes = int64_t{4096} * rows, .flops = 1e9 * rows};
    const auto pieces =
        service::SplitStep(geometry, layer.window.left, request.key.kind, plan.entries, limits);
    if (!pieces.ok()) return;
    int64_t query_rows = 0, tokens = 0;
    v1::AttendReply reply;
    for (const service::StepPiece& piece : *pieces) {
      const service::StepRequest cut = service::PieceOf(request, piece);
      CheckTensors(cut);
      Require(piece.first_row == query_rows && piece.first_token == tokens);
      query_rows += cut.query_rows;
      tokens += cut.new_tokens;
      v1::AttendReply results;
      const auto fill = [](const auto& output, v1::Tensor* tensor) {
        if (!output.has_value()) return;
        tensor->add_shape(output->shape.front());
        tensor->mutable_inline_()->assign(output->bytes, 'x');
      };
      fill(cut.output, results.mutable_output());
      fill(cut.lse, results.mutable_lse());
      service::PlacePiece(request, piece, results, &reply);
    }
    Require(query_rows == request.query_rows && tokens == request.new_tokens);
    if (request.output.has_value()) {
      Require(reply.output().inline_() == std::string(request.output->bytes, 'x'));
    }
  }

  void CheckTensors(const service::StepRequest& request) const {
    int64_t rows = 0, tokens = 0;
    for (const worker::StepEntry& entry : request.entries) {
      Require(entry.query_rows >= 0 && entry.new_tokens >= 0 && entry.first_position >= 0);
      Require(entry.query_rows > 0 || entry.new_tokens > 0);
      rows += entry.query_rows;
      tokens += entry.new_tokens;
    }
    Require(!request.entries.empty());
    Require(rows == request.query_rows && tokens == request.new_tokens);
    Require(request.key.layer >= 0 &&
            request.key.layer < static_cast<int32_t>(spec_.layers.size()));
    Require(request.q.has_value() == (rows > 0));
    Require(request.k.has_value() == (tokens > 0) && request.v.has_value() == (tokens > 0));
    // Every byte a worker will read is there.
    const auto readable = [](const auto& tensor) {
      volatile std::byte sink{};
      for (size_t i = 0; i < tensor.view.bytes; ++i) sink = tensor.view.data[i];
      (void)sink;
    };
    if (request.q.has_value()) readable(*request.q);
    if (request.k.has_value()) readable(*request.k);
    if (request.v.has_value()) readable(*request.v);
  }

  void CheckPlan(const service::StepRequest& request) {
    service::SequenceTable table(FuzzedTable(spec_));
    for (uint64_t id = 1; id <= kSequences; ++id) {
      bool reopened = false;
      Require(table.Open(id, &reopened).ok());
    }
    const absl::StatusOr<service::StepReservation> plan =
        table.Reserve(request.key.layer, request.key.kind, request.entries);
    if (plan.ok()) {
      table.Commit(*plan);
      for (const service::StepReservation::Change& change : plan->changes) {
        const auto& pages = change.sequence->groups[plan->group].pages;
        Require(change.length >= 0 &&
                change.length <= static_cast<int64_t>(pages.size()) * table.page_tokens());
      }
    }
    for (uint64_t id = 1; id <= kSequences; ++id) Require(table.Close(id).ok());
    Require(table.pages().used() == 0);
  }

  const worker::CacheSpec spec_ = FuzzedSpec();
  const service::CacheTerms terms_{};  // any mode
  const worker::CacheBackends backends_{worker::RegisteredBackends(), spec_, {}};
  const service::SharedMemoryRegistry regions_;
};

void TakeSpec(const uint8_t* data, size_t size) {
  v1::CacheSpec asked;
  if (!asked.ParseFromArray(data, static_cast<int>(size))) return;
  for (const int ranks : {1, kRanks}) {
    const absl::StatusOr<service::ResolvedSpec> resolved = service::ResolveSpec(asked, ranks);
    if (!resolved.ok()) continue;
    Require(worker::ValidateCacheSpec(resolved->spec).ok());
    // What is shown can be asked for, and is the same.
    const absl::StatusOr<service::ResolvedSpec> again =
        service::ResolveSpec(resolved->public_spec, ranks);
    Require(again.ok() && worker::SameSpec(again->spec, resolved->spec));
  }
}

void TakeCommand(const uint8_t* data, size_t size) {
  v1::CoordinatorMessage message;
  if (!message.ParseFromArray(data, static_cast<int>(size))) return;
  const auto now = worker::TimePoint(std::chrono::hours(1));
  absl::StatusOr<worker::Command> command = worker::DecodeCommand(std::move(message), now);
  if (!command.ok()) return;
  // Encoded and decoded again it is the same command.
  const auto encoded =
      worker::EncodeCommand(std::make_shared<const worker::Command>(*std::move(command)), now);
  v1::CoordinatorMessage copy;
  Require(worker::DecodeMessage(encoded, &copy));
  Require(worker::DecodeCommand(std::move(copy), now).ok());
}

// A step's output, as a byte says it: its rows, its type, and what of it the reply has.
worker::StepOutput OutputOf(uint8_t byte) {
  constexpr DType kTypes[] = {DType::kF32, DType::kBf16, DType::kF16, DType::kFp8E4M3,
                              DType::kNvfp4};
  worker::StepOutput output;
  output.rows = byte % 4 + 1;
  output.format.dtype = kTypes[byte / 4 % 16 % 5];
  output.o.in_reply = (byte & 64) != 0;
  output.lse.in_reply = (byte & 128) != 0;
  return output;
}

// What a worker says to the coordinator. The first two bytes: the outputs of the step that a reply
// is for.
void TakeWorkerMessage(const uint8_t* data, size_t size) {
  if (size < 2) return;
  v1::WorkerMessage message;
  if (!message.ParseFromArray(data + 2, static_cast<int>(size - 2))) return;
  if (message.has_registration()) {
    const worker::GroupFacts group{.size = 2, .group_id = 7, .epoch = 3, .backend = "cpu"};
    if (!worker::CheckRegistration(group, message.epoch(), message.registration()).ok()) return;
    const std::vector<worker::RankHistory> ranks(2);
    const auto rank = worker::ChooseRank(ranks, message.registration());
    Require(!rank.ok() || (*rank >= 0 && *rank < 2));
  }
  if (message.has_reply()) {
    const auto reply = worker::DecodeReply(message.epoch(), message.reply());
    if (!reply.ok()) return;
    const worker::CacheSpec spec = FuzzedSpec();
    const worker::LayerGeometry geometry = worker::GeometryOf(spec, spec.layers[0]);
    const worker::StepOutput outputs[] = {OutputOf(data[0]), OutputOf(data[1])};
    if (service::CheckResult(geometry, outputs, *reply).ok()) {
      size_t read = 0;  // by whoever writes the hosts' replies
      for (const worker::StepOutput& output : outputs) {
        const size_t row_heads = static_cast<size_t>(output.rows) * 4;
        const size_t bits = static_cast<size_t>(BitsOf(output.format.dtype)) * row_heads * 64;
        const size_t scales = output.format.dtype == DType::kNvfp4 ? row_heads * 64 / 16 : 0;
        if (output.o.in_reply) read += bits / 8 + scales;
        if (output.lse.in_reply) read += row_heads * sizeof(float);
      }
      Require(reply->result.size() == read);
    }
    Require(worker::DecodeReply(reply->epoch, worker::EncodeReply(*reply).reply()).ok());
  }
}

// What all ranks say that they hold, a record for each.
void TakeHoldings(const uint8_t* data, size_t size) {
  std::vector<worker::Holdings> held;
  ForEachRecord(data, size, [&](const uint8_t* record, size_t count) {
    v1::Holdings message;
    if (!message.ParseFromArray(record, static_cast<int>(count))) return;
    absl::StatusOr<worker::Holdings> holdings = worker::DecodeHoldings(message);
    if (holdings.ok()) held.push_back(*std::move(holdings));
  });
  if (held.empty()) return;
  std::vector<const worker::Holdings*> ranks;
  for (const worker::Holdings& holdings : held) ranks.push_back(&holdings);
  const worker::CommandMark last = service::LastOfAll(ranks);
  for (const worker::HeldCache& cache : held.front().caches) {
    std::vector<const worker::HeldCache*> of_ranks;
    for (const worker::Holdings& holdings : held) {
      const auto found =
          std::find_if(holdings.caches.begin(), holdings.caches.end(),
                       [&](const worker::HeldCache& other) { return other.id == cache.id; });
      of_ranks.push_back(found == holdings.caches.end() ? nullptr : &*found);
    }
    const service::ReconciledCache reconciled = service::Reconcile(of_ranks, last, 64);
    for (const worker::HeldSequence& sequence : reconciled.whole) {
      Require(sequence.given_up >= 0 &&
              sequence.given_up <= static_cast<int64_t>(sequence.pages.size()));
      for (const int64_t length : sequence.lengths) {
        Require(length >= 0 && length <= static_cast<int64_t>(sequence.pages.size()) * 64);
      }
    }
  }
}

void TakeTraceparent(const uint8_t* data, size_t size) {
  const absl::string_view text(reinterpret_cast<const char*>(data), size);
  const auto context = telemetry::ParseTraceparent(text);
  if (!context.has_value()) return;
  const auto again = telemetry::ParseTraceparent(telemetry::FormatTraceparent(*context));
  Require(again.has_value() && again->trace_id == context->trace_id &&
          again->span_id == context->span_id && again->sampled == context->sampled);
}

}  // namespace
}  // namespace tributary

// Protobuf reports every string that is no UTF-8, which takes longer than the checks.
extern "C" int LLVMFuzzerInitialize(int*, char***) {
  google::protobuf::SetLogHandler(nullptr);
  if (const char* kind = std::getenv("FUZZ_KIND")) tributary::only_kind = std::atoi(kind);
  return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace tributary;  // NOLINT(google-build-using-namespace)
  static Requests* const requests = new Requests;
  static SessionMessages* const session = new SessionMessages;
  if (size == 0) return 0;
  const uint8_t kind = data[0];
  ++data, --size;
  switch (only_kind >= 0 ? only_kind : kind % 10) {
    case 0:
      requests->Take<v1::AttendRequest>(data, size, service::CheckAttend);
      break;
    case 1:
      requests->Take<v1::AppendRequest>(data, size, service::CheckAppend);
      break;
    case 2:
      TakeSpec(data, size);
      break;
    case 3:
      TakeCommand(data, size);
      break;
    case 4:
      TakeTraceparent(data, size);
      break;
    case 5:
      session->Take(data, size);
      break;
    case 6:
      requests->TakeStream(data, size);
      break;
    case 7:
      session->TakeStream(data, size);
      break;
    case 8:
      TakeWorkerMessage(data, size);
      break;
    default:
      TakeHoldings(data, size);
  }
  return 0;
}
