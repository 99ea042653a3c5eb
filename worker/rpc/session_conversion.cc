#include "worker/rpc/session_conversion.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/mailbox/layout_message.h"
#include "base/status/errors.h"
#include "base/status/status_macros.h"
#include "worker/rpc/conversion.h"
#include "worker/rpc/dtype_conversion.h"
#include "worker/rpc/step_conversion.h"

namespace tributary::worker {
namespace {

using std::chrono::duration_cast;
using std::chrono::microseconds;

v1::Waiting EncodeWaiting(Waiting waiting) {
  return waiting == Waiting::kSpinningWarp ? v1::WAITING_SPINNING_WARP
                                           : v1::WAITING_STREAM_MEMORY_OPS;
}

absl::StatusOr<Waiting> DecodeWaiting(v1::Waiting waiting) {
  switch (waiting) {
    case v1::WAITING_SPINNING_WARP:
      return Waiting::kSpinningWarp;
    case v1::WAITING_STREAM_MEMORY_OPS:
      return Waiting::kStreamMemoryOps;
    default:
      return InvalidField("session_step.waiting",
                          absl::StrCat("unknown value ", static_cast<int>(waiting)));
  }
}

}  // namespace

void Encode(const OpenSessionCommand& command, v1::OpenSessionCommand* out) {
  out->set_session(command.session);
  out->set_max_rows(command.max_rows);
  out->set_max_new_tokens(command.max_new_tokens);
  out->set_max_steps(command.max_steps);
  out->set_q_dtype(ToProto(command.q_dtype));
  out->set_kv_dtype(ToProto(command.kv_dtype));
  out->set_output_dtype(ToProto(command.output_dtype));
  out->set_return_lse(command.return_lse);
  *out->mutable_layout() = mailbox::MessageOf(command.layout);
  out->set_wait_timeout_us(
      static_cast<uint64_t>(duration_cast<microseconds>(command.wait_timeout).count()));
  out->set_host_gpu(command.host_gpu);
  out->set_measures(command.measures);
  out->set_endpoints(command.endpoints);
}

absl::StatusOr<OpenSessionCommand> Decode(const v1::OpenSessionCommand& message) {
  OpenSessionCommand out;
  out.session = message.session();
  out.max_rows = message.max_rows();
  out.max_new_tokens = message.max_new_tokens();
  out.max_steps = message.max_steps();
  TRIBUTARY_ASSIGN_OR_RETURN(out.q_dtype, DecodeDType(message.q_dtype(), "open_session.q_dtype"));
  TRIBUTARY_ASSIGN_OR_RETURN(out.kv_dtype,
                             DecodeDType(message.kv_dtype(), "open_session.kv_dtype"));
  TRIBUTARY_ASSIGN_OR_RETURN(out.output_dtype,
                             DecodeDType(message.output_dtype(), "open_session.output_dtype"));
  out.return_lse = message.return_lse();
  out.layout = mailbox::ReadLayout(message.layout());
  out.wait_timeout = microseconds(message.wait_timeout_us());
  out.host_gpu = message.host_gpu();
  out.measures = message.measures();
  out.endpoints = std::max(message.endpoints(), 1);
  return out;
}

void Encode(const CloseSessionCommand& command, v1::CloseSessionCommand* out) {
  out->set_session(command.session);
  out->set_status(command.status);
}

CloseSessionCommand Decode(const v1::CloseSessionCommand& message) {
  return {message.session(), message.status()};
}

void Encode(const SessionStepCommand& command, v1::SessionStepCommand* out) {
  out->set_session(command.session);
  out->set_kind(EncodeKind(command.kind));
  out->set_first_count(command.first_count);
  for (const SessionLayer& layer : command.layers) {
    v1::SessionStepCommand::Layer* to = out->add_layers();
    to->set_cache(layer.cache);
    to->set_layer(layer.layer);
  }
  for (const PageChanges& changes : command.changes) {
    v1::SessionStepCommand::PageChanges* to = out->add_changes();
    to->set_cache(changes.cache);
    Encode(changes.page_copies, to->mutable_page_copies());
    for (const PageUpdate& update : changes.page_updates) Encode(update, to->add_page_updates());
  }
  Encode(command.entries, out->mutable_entries());
  out->set_waiting(EncodeWaiting(command.waiting));
}

absl::StatusOr<SessionStepCommand> Decode(const v1::SessionStepCommand& message) {
  SessionStepCommand out;
  out.session = message.session();
  TRIBUTARY_ASSIGN_OR_RETURN(out.kind, DecodeKind(message.kind()));
  out.first_count = message.first_count();
  for (const v1::SessionStepCommand::Layer& layer : message.layers()) {
    out.layers.push_back({layer.cache(), layer.layer()});
  }
  for (const v1::SessionStepCommand::PageChanges& changes : message.changes()) {
    out.changes.push_back(
        {changes.cache(), Decode(changes.page_copies()), Decode(changes.page_updates())});
  }
  out.entries = Decode(message.entries());
  TRIBUTARY_ASSIGN_OR_RETURN(out.waiting, DecodeWaiting(message.waiting()));
  return out;
}

void Encode(const DeviceMailbox& mailbox, v1::CommandReply* out) {
  if (mailbox.handle.empty()) return;
  v1::DeviceMailbox* to = out->mutable_mailbox();
  to->set_raw_handle(mailbox.handle);
  to->set_device_uuid(mailbox.gpu);
  to->set_address(mailbox.address);
  to->set_process_nonce(mailbox.process_nonce);
  to->set_several_gpus(mailbox.several_gpus);
  out->set_mailbox_machine(mailbox.machine);
}

DeviceMailbox DecodeMailbox(const v1::CommandReply& message) {
  const v1::DeviceMailbox& from = message.mailbox();
  return {.handle = from.raw_handle(),
          .gpu = from.device_uuid(),
          .address = from.address(),
          .process_nonce = from.process_nonce(),
          .machine = message.mailbox_machine(),
          .several_gpus = from.several_gpus()};
}

v1::SessionNews EncodeNews(const SessionNews& news) {
  v1::SessionNews out;
  out.set_session(news.session);
  out.set_ended(news.ended);
  if (!news.status.ok()) *out.mutable_status() = EncodeStatus(news.status);
  for (const auto& [first_count, entry] : news.conflicts) {
    v1::SessionNews::Conflict* conflict = out.add_conflicts();
    conflict->set_first_count(first_count);
    conflict->set_entry(entry);
  }
  return out;
}

SessionNews DecodeNews(int32_t rank, const v1::SessionNews& message) {
  SessionNews out{.session = message.session(), .rank = rank, .ended = message.ended()};
  if (message.has_status()) out.status = DecodeStatus(message.status());
  for (const v1::SessionNews::Conflict& conflict : message.conflicts()) {
    out.conflicts.emplace_back(conflict.first_count(), conflict.entry());
  }
  return out;
}

}  // namespace tributary::worker
