#include "worker/rpc/conversion.h"

#include <google/protobuf/io/coded_stream.h>
#include <google/protobuf/wire_format_lite.h>
#include <grpcpp/support/proto_buffer_reader.h>
#include <grpcpp/support/slice.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/cord.h"
#include "absl/strings/str_cat.h"
#include "base/status/errors.h"
#include "base/status/status_macros.h"
#include "kernels/head_dims.h"
#include "kernels/output_format.h"
#include "worker/rpc/dtype_conversion.h"
#include "worker/rpc/session_conversion.h"
#include "worker/rpc/step_conversion.h"

namespace tributary::worker {
namespace {

using google::protobuf::internal::WireFormatLite;
using google::protobuf::io::CodedOutputStream;
// Beside those below.
using worker::Decode;
using worker::Encode;

// Below this a copy is cheaper than one more reference-counted slice.
constexpr size_t kCopyBelowBytes = 4096;

void Encode(const CacheSpec& spec, const LayerSpec& layer, v1::LayerSpec* out) {
  if (layer.window.left >= 0) out->mutable_window()->set_left(layer.window.left);
  if (layer.window.right >= 0) out->mutable_window()->set_right(layer.window.right);
  out->mutable_sinks()->Add(layer.sinks.begin(), layer.sinks.end());
  out->mutable_k_scale()->Add(layer.k_scale.begin(), layer.k_scale.end());
  out->mutable_v_scale()->Add(layer.v_scale.begin(), layer.v_scale.end());
  out->set_window_base(layer.window_base == WindowBase::kAnchor ? v1::WINDOW_BASE_ANCHOR
                                                                : v1::WINDOW_BASE_QUERY);
  out->set_causal_block(layer.causal_block);
  out->set_kv_dtype(ToProto(KvDType(spec, layer)));
  out->set_soft_cap(SoftCap(spec, layer));
  out->set_q_heads(layer.q_heads);
  out->set_kv_heads(layer.kv_heads);
  out->set_head_dim(layer.head_dim);
  out->set_value_head_dim(layer.value_head_dim);
  out->set_sm_scale(layer.sm_scale);
  out->set_o_scale(layer.o_scale);
}

absl::StatusOr<LayerSpec> Decode(const v1::LayerSpec& layer, absl::string_view field) {
  LayerSpec out;
  if (layer.window().has_left()) out.window.left = layer.window().left();
  if (layer.window().has_right()) out.window.right = layer.window().right();
  out.sinks.assign(layer.sinks().begin(), layer.sinks().end());
  out.k_scale.assign(layer.k_scale().begin(), layer.k_scale().end());
  out.v_scale.assign(layer.v_scale().begin(), layer.v_scale().end());
  if (layer.window_base() == v1::WINDOW_BASE_ANCHOR) out.window_base = WindowBase::kAnchor;
  out.causal_block = layer.causal_block();
  TRIBUTARY_ASSIGN_OR_RETURN(out.kv_dtype,
                             DecodeDType(layer.kv_dtype(), absl::StrCat(field, ".kv_dtype")));
  out.soft_cap = layer.soft_cap();
  out.q_heads = layer.q_heads();
  out.kv_heads = layer.kv_heads();
  out.head_dim = layer.head_dim();
  out.value_head_dim = layer.value_head_dim();
  out.sm_scale = layer.sm_scale();
  if (layer.has_o_scale()) out.o_scale = layer.o_scale();
  return out;
}

void Encode(const CacheSpec& spec, v1::CreateCacheCommand* out) {
  out->set_q_heads(spec.q_heads);
  out->set_kv_heads(spec.kv_heads);
  out->set_head_dim(spec.head_dim);
  out->set_value_head_dim(spec.value_head_dim);
  out->set_page_size(spec.page_size);
  out->set_interleave(spec.interleave);
  out->set_kv_dtype(ToProto(spec.kv_dtype));
  out->set_sm_scale(spec.sm_scale);
  out->set_soft_cap(spec.soft_cap);
  out->set_num_pages(spec.num_pages);
  out->set_fp8_queries(spec.fp8_queries);
  out->set_fp8_weights(spec.fp8_weights);
  out->set_replica_stride(spec.replica_stride);
  for (const LayerSpec& layer : spec.layers) Encode(spec, layer, out->add_layers());
}

absl::StatusOr<CacheSpec> Decode(const v1::CreateCacheCommand& spec) {
  CacheSpec out;
  out.q_heads = spec.q_heads();
  out.kv_heads = spec.kv_heads();
  out.head_dim = spec.head_dim();
  out.value_head_dim = spec.value_head_dim();
  out.page_size = spec.page_size();
  out.interleave = spec.interleave();
  TRIBUTARY_ASSIGN_OR_RETURN(out.kv_dtype, DecodeDType(spec.kv_dtype(), "create_cache.kv_dtype"));
  out.sm_scale = spec.sm_scale();
  out.soft_cap = spec.soft_cap();
  out.num_pages = spec.num_pages();
  out.fp8_queries = spec.fp8_queries();
  out.fp8_weights = spec.fp8_weights();
  out.replica_stride = spec.replica_stride();
  out.layers.reserve(spec.layers_size());
  for (int i = 0; i < spec.layers_size(); ++i) {
    TRIBUTARY_ASSIGN_OR_RETURN(
        LayerSpec layer, Decode(spec.layers(i), absl::StrCat("create_cache.layers[", i, "]")));
    out.layers.push_back(std::move(layer));
  }
  return out;
}

void Encode(const Standing& standing, v1::Standing* out) {
  out->set_sequence(standing.sequence);
  out->set_given_up(standing.given_up);
  out->mutable_lengths()->Add(standing.lengths.begin(), standing.lengths.end());
}

std::vector<Standing> Decode(const google::protobuf::RepeatedPtrField<v1::Standing>& standings) {
  std::vector<Standing> out;
  out.reserve(standings.size());
  for (const v1::Standing& standing : standings) {
    out.push_back({.sequence = standing.sequence(),
                   .given_up = standing.given_up(),
                   .lengths = {standing.lengths().begin(), standing.lengths().end()}});
  }
  return out;
}

void Encode(const StepCommand& step, v1::StepCommand* out) {
  out->set_layer(step.layer);
  out->set_kind(EncodeKind(step.kind));
  Encode(step.page_copies, out->mutable_page_copies());
  for (const PageUpdate& update : step.page_updates) Encode(update, out->add_page_updates());
  Encode(step.entries, out->mutable_entries());
  out->set_q_dtype(ToProto(step.q.dtype));
  out->set_k_dtype(ToProto(step.k.dtype));
  out->set_v_dtype(ToProto(step.v.dtype));
  out->set_bf16_partials(step.bf16_partials);
  for (const Standing& standing : step.standings) Encode(standing, out->add_standings());
  for (const StepOutput& output : step.outputs) {
    v1::StepOutput* message = out->add_outputs();
    message->set_rows(output.rows);
    message->set_dtype(ToProto(output.format.dtype));
    message->set_scale(output.format.scale);
    message->set_o(output.o.in_reply);
    message->set_lse(output.lse.in_reply);
  }
}

MoveTokensCommand Decode(const v1::MoveTokensCommand& move) {
  MoveTokensCommand out{.from_cache = move.from_cache(),
                        .ranks = {.from = move.from_ranks(), .to = move.to_ranks()},
                        .keeper_stride = move.keeper_stride(),
                        .pages = {}};
  out.pages.reserve(static_cast<size_t>(move.pages_size()));
  for (const v1::MovedPage& page : move.pages()) {
    out.pages.push_back({.page = page.page(),
                         .index = page.index(),
                         .from = {page.from().begin(), page.from().end()}});
  }
  return out;
}

// What a step's tensor views point to.
struct Tensors {
  std::string q;
  std::string k;
  std::string v;
};

TensorView View(const std::string& bytes, DType dtype) {
  TensorView view{.dtype = dtype, .bytes = bytes.size()};
  if (!bytes.empty()) view.data = reinterpret_cast<const std::byte*>(bytes.data());
  return view;
}

absl::StatusOr<StepCommand> Decode(const v1::StepCommand& step, const Tensors& tensors) {
  StepCommand out;
  out.layer = step.layer();
  TRIBUTARY_ASSIGN_OR_RETURN(out.kind, DecodeKind(step.kind()));
  out.page_copies = Decode(step.page_copies());
  out.page_updates = Decode(step.page_updates());
  out.entries = Decode(step.entries());
  TRIBUTARY_ASSIGN_OR_RETURN(const DType q, DecodeDType(step.q_dtype(), "step.q_dtype"));
  TRIBUTARY_ASSIGN_OR_RETURN(const DType k, DecodeDType(step.k_dtype(), "step.k_dtype"));
  TRIBUTARY_ASSIGN_OR_RETURN(const DType v, DecodeDType(step.v_dtype(), "step.v_dtype"));
  out.q = View(tensors.q, q);
  out.k = View(tensors.k, k);
  out.v = View(tensors.v, v);
  out.bf16_partials = step.bf16_partials();
  out.standings = Decode(step.standings());
  for (const v1::StepOutput& output : step.outputs()) {
    TRIBUTARY_ASSIGN_OR_RETURN(const DType dtype,
                               DecodeDType(output.dtype(), "step.outputs.dtype"));
    out.outputs.push_back({.rows = output.rows(),
                           .format = {dtype, output.scale()},
                           .o = {.in_reply = output.o()},
                           .lse = {.in_reply = output.lse()}});
  }
  return out;
}

// One overload a command, chosen by std::visit.
struct BodyEncoder {
  v1::Command* out;

  void operator()(const CreateCacheCommand& c) const {
    Encode(c.spec, out->mutable_create_cache());
    out->mutable_create_cache()->set_existing(c.existing);
    out->mutable_create_cache()->set_ranks(c.ranks);
  }
  void operator()(const DropCacheCommand&) const { out->mutable_drop_cache(); }
  void operator()(const SetTablesCommand& c) const {
    v1::SetTablesCommand* tables = out->mutable_set_tables();
    for (const PageUpdate& table : c.tables) Encode(table, tables->add_tables());
    for (const Standing& standing : c.standings) Encode(standing, tables->add_standings());
  }
  void operator()(const DropTablesCommand& c) const {
    out->mutable_drop_tables()->mutable_sequences()->Add(c.sequences.begin(), c.sequences.end());
  }
  void operator()(const TransferPagesCommand& c) const {
    v1::TransferPagesCommand* transfer = out->mutable_transfer_pages();
    transfer->set_rank(c.rank);
    transfer->set_restore(c.restore);
    transfer->mutable_pages()->Add(c.pages.begin(), c.pages.end());
    transfer->set_complete(c.complete);
  }
  void operator()(const MoveTokensCommand& c) const {
    v1::MoveTokensCommand* move = out->mutable_move_tokens();
    move->set_from_cache(c.from_cache);
    move->set_from_ranks(c.ranks.from);
    move->set_to_ranks(c.ranks.to);
    move->set_keeper_stride(c.keeper_stride);
    for (const MovedPage& page : c.pages) {
      v1::MovedPage* moved = move->add_pages();
      moved->set_page(page.page);
      moved->set_index(page.index);
      moved->mutable_from()->Add(page.from.begin(), page.from.end());
    }
  }
  void operator()(const StepCommand& c) const { Encode(c, out->mutable_step()); }
  // Never sent to other processes (RemoteGroup::CheckRegions); a command without a body is refused.
  void operator()(const OpenRegionCommand&) const {}
  void operator()(const CloseRegionCommand&) const {}
  void operator()(const OpenSessionCommand& c) const { Encode(c, out->mutable_open_session()); }
  void operator()(const CloseSessionCommand& c) const { Encode(c, out->mutable_close_session()); }
  void operator()(const SessionStepCommand& c) const { Encode(c, out->mutable_session_step()); }
};

// Writes serialised fields one after the other. Fields of a message may follow each other in any
// order, so tensors can be put behind the encoded rest.
class SliceWriter {
 public:
  explicit SliceWriter(std::shared_ptr<const Command> owner) : owner_(std::move(owner)) {}

  void AppendMessage(const google::protobuf::Message& message) {
    message.AppendToString(&pending_);
  }

  void AppendBytesField(int number, const TensorView& tensor) {
    if (tensor.bytes == 0) return;
    AppendVarint(WireFormatLite::MakeTag(number, WireFormatLite::WIRETYPE_LENGTH_DELIMITED));
    AppendVarint(tensor.bytes);
    if (tensor.bytes < kCopyBelowBytes) {
      pending_.append(reinterpret_cast<const char*>(tensor.data), tensor.bytes);
      return;
    }
    Flush();
    // gRPC only reads the slice; its interface takes a mutable pointer.
    slices_.emplace_back(
        const_cast<std::byte*>(tensor.data), tensor.bytes,
        [](void* owner) { delete static_cast<std::shared_ptr<const Command>*>(owner); },
        new std::shared_ptr<const Command>(owner_));
  }

  grpc::ByteBuffer Finish() {
    Flush();
    return grpc::ByteBuffer(slices_.data(), slices_.size());
  }

 private:
  void AppendVarint(uint64_t value) {
    uint8_t bytes[10];
    const uint8_t* end = CodedOutputStream::WriteVarint64ToArray(value, bytes);
    pending_.append(reinterpret_cast<const char*>(bytes), end - bytes);
  }

  void Flush() {
    if (pending_.empty()) return;
    slices_.emplace_back(pending_);
    pending_.clear();
  }

  std::shared_ptr<const Command> owner_;
  std::string pending_;
  std::vector<grpc::Slice> slices_;
};

}  // namespace

void EncodeSpec(const CacheSpec& spec, v1::CreateCacheCommand* out) { Encode(spec, out); }

absl::StatusOr<CacheSpec> DecodeSpec(const v1::CreateCacheCommand& spec) { return Decode(spec); }

grpc::ByteBuffer EncodeCommand(std::shared_ptr<const Command> command, TimePoint now,
                               uint64_t settled) {
  using std::chrono::duration_cast;
  using std::chrono::microseconds;
  v1::CoordinatorMessage message;
  message.set_epoch(command->epoch);
  v1::Command* out = message.mutable_command();
  out->set_number(command->number);
  out->set_cache(command->cache);
  out->set_settled(settled);
  out->set_timeout_us(
      std::max<int64_t>(0, duration_cast<microseconds>(command->deadline - now).count()));
  if (command->trace.sampled) {
    out->set_traceparent(telemetry::FormatTraceparent(command->trace));
  }
  std::visit(BodyEncoder{out}, command->body);

  SliceWriter writer(command);
  writer.AppendMessage(message);
  if (const auto* step = std::get_if<StepCommand>(&command->body)) {
    writer.AppendBytesField(v1::CoordinatorMessage::kQFieldNumber, step->q);
    writer.AppendBytesField(v1::CoordinatorMessage::kKFieldNumber, step->k);
    writer.AppendBytesField(v1::CoordinatorMessage::kVFieldNumber, step->v);
  }
  return writer.Finish();
}

absl::StatusOr<Command> DecodeCommand(v1::CoordinatorMessage message, TimePoint now) {
  const v1::Command& in = message.command();
  Command out;
  out.epoch = message.epoch();
  out.number = in.number();
  out.cache = in.cache();
  out.settled = in.settled();
  out.trace = telemetry::ParseTraceparent(in.traceparent()).value_or(telemetry::TraceContext());
  // A timeout too large for the clock means "never"; a day is never here.
  constexpr uint64_t kLongest = 24ull * 3600 * 1'000'000;
  out.deadline = now + std::chrono::microseconds(std::min(in.timeout_us(), kLongest));
  switch (in.body_case()) {
    case v1::Command::kCreateCache: {
      TRIBUTARY_ASSIGN_OR_RETURN(CacheSpec spec, Decode(in.create_cache()));
      out.body = CreateCacheCommand{std::move(spec), in.create_cache().existing(),
                                    in.create_cache().ranks()};
      return out;
    }
    case v1::Command::kDropCache:
      out.body = DropCacheCommand{};
      return out;
    case v1::Command::kSetTables:
      out.body =
          SetTablesCommand{Decode(in.set_tables().tables()), Decode(in.set_tables().standings())};
      return out;
    case v1::Command::kMoveTokens:
      out.body = Decode(in.move_tokens());
      return out;
    case v1::Command::kDropTables:
      out.body = DropTablesCommand{
          {in.drop_tables().sequences().begin(), in.drop_tables().sequences().end()}};
      return out;
    case v1::Command::kTransferPages: {
      const v1::TransferPagesCommand& transfer = in.transfer_pages();
      out.body = TransferPagesCommand{.rank = transfer.rank(),
                                      .restore = transfer.restore(),
                                      .pages = {transfer.pages().begin(), transfer.pages().end()},
                                      .complete = transfer.complete()};
      return out;
    }
    case v1::Command::kStep: {
      auto tensors = std::make_shared<Tensors>();
      tensors->q = std::move(*message.mutable_q());
      tensors->k = std::move(*message.mutable_k());
      tensors->v = std::move(*message.mutable_v());
      TRIBUTARY_ASSIGN_OR_RETURN(StepCommand step, Decode(in.step(), *tensors));
      out.body = std::move(step);
      out.owner = std::move(tensors);
      return out;
    }
    case v1::Command::kOpenSession: {
      TRIBUTARY_ASSIGN_OR_RETURN(OpenSessionCommand open, Decode(in.open_session()));
      out.body = std::move(open);
      return out;
    }
    case v1::Command::kCloseSession:
      out.body = Decode(in.close_session());
      return out;
    case v1::Command::kSessionStep: {
      TRIBUTARY_ASSIGN_OR_RETURN(SessionStepCommand step, Decode(in.session_step()));
      out.body = std::move(step);
      return out;
    }
    case v1::Command::BODY_NOT_SET:
      break;
  }
  return InvalidField("command.body", "missing, or of a newer protocol");
}

size_t MostReplyBytes(const Command& command) {
  constexpr size_t kRest = 1024;  // number, rank, times and status
  const auto* step = std::get_if<StepCommand>(&command.body);
  if (step == nullptr || step->q.bytes == 0) return kRest;
  // O has at most as many elements as Q (the table of head dims has no value wider than its key),
  // and an LSE comes with at least 64 of them.
  static_assert(std::all_of(kHeadDims.begin(), kHeadDims.end(), [](const HeadDims& row) {
    return row.key_dim >= 64 && row.value_dim <= row.key_dim;
  }));
  const size_t elements = step->q.bytes * 8 / static_cast<size_t>(BitsOf(step->q.dtype));
  // The size is that of a reply in which all rows have the widest type of the outputs.
  size_t o = step->outputs.empty() ? sizeof(float) * elements : 0;
  bool lse = step->outputs.empty();
  for (const StepOutput& output : step->outputs) {
    const size_t bytes = OutputBytes(output.format.dtype, static_cast<int64_t>(elements));
    if (output.o.in_reply) o = std::max(o, bytes);
    lse |= output.lse.in_reply;
  }
  return kRest + o + (lse ? sizeof(float) * elements / 64 : 0);
}

v1::WorkerMessage EncodeReply(const Reply& reply) {
  v1::WorkerMessage message;
  message.set_epoch(reply.epoch);
  v1::CommandReply* out = message.mutable_reply();
  out->set_number(reply.number);
  out->set_rank(reply.rank);
  if (!reply.status.ok()) *out->mutable_status() = EncodeStatus(reply.status);
  out->mutable_conflicts()->Add(reply.conflicts.begin(), reply.conflicts.end());
  out->mutable_o()->Add(reply.o.begin(), reply.o.end());
  out->mutable_lse()->Add(reply.lse.begin(), reply.lse.end());
  if (!reply.result.empty()) {
    out->set_result(reply.result.data(), reply.result.size());
  }
  out->set_plan_seconds(reply.times.plan);
  out->set_append_seconds(reply.times.append);
  out->set_attend_seconds(reply.times.attend);
  out->set_exchange_seconds(reply.times.exchange);
  out->set_exchange_in_attend(reply.times.exchange_in_attend);
  out->set_more_memory(reply.more_memory);
  Encode(reply.mailbox, out);
  return message;
}

absl::StatusOr<Reply> DecodeReply(uint64_t epoch, v1::CommandReply message) {
  Reply out;
  out.epoch = epoch;
  out.number = message.number();
  out.rank = message.rank();
  if (message.has_status()) {
    // "OK" spelled out would be taken for success by one end only.
    if (message.status().code() == 0) return InvalidField("reply.status", "has code OK");
    out.status = DecodeStatus(message.status());
  }
  out.conflicts.assign(message.conflicts().begin(), message.conflicts().end());
  out.o.assign(message.o().begin(), message.o().end());
  out.lse.assign(message.lse().begin(), message.lse().end());
  out.result = ResultBytes(std::move(*message.mutable_result()));
  out.more_memory = message.more_memory();
  out.mailbox = DecodeMailbox(message);
  out.times = {.plan = message.plan_seconds(),
               .append = message.append_seconds(),
               .attend = message.attend_seconds(),
               .exchange = message.exchange_seconds(),
               .exchange_in_attend = message.exchange_in_attend()};
  return out;
}

google::rpc::Status EncodeStatus(const absl::Status& status) {
  google::rpc::Status out;
  out.set_code(status.raw_code());
  out.set_message(std::string(status.message()));
  status.ForEachPayload([&out](absl::string_view url, const absl::Cord& payload) {
    google::protobuf::Any* detail = out.add_details();
    detail->set_type_url(std::string(url));
    detail->set_value(std::string(payload));
  });
  return out;
}

absl::Status DecodeStatus(const google::rpc::Status& message) {
  absl::Status status(static_cast<absl::StatusCode>(message.code()), message.message());
  for (const google::protobuf::Any& detail : message.details()) {
    status.SetPayload(detail.type_url(), absl::Cord(detail.value()));
  }
  return status;
}

grpc::ByteBuffer EncodeMessage(const google::protobuf::Message& message) {
  const grpc::Slice slice(message.SerializeAsString());
  return grpc::ByteBuffer(&slice, 1);
}

bool DecodeMessage(const grpc::ByteBuffer& buffer, google::protobuf::Message* message) {
  grpc::ByteBuffer copy(buffer);  // the reader wants a mutable one; slices are shared
  grpc::ProtoBufferReader reader(&copy);
  return reader.status().ok() && message->ParseFromZeroCopyStream(&reader) && reader.status().ok();
}

}  // namespace tributary::worker
