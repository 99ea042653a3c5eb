// The functions of tributary.h that are of sessions.
#include <algorithm>
#include <chrono>
#include <cstring>
#include <utility>

#include "service/client/c/boundary.h"
#include "service/client/c/session.h"

struct tributary_session {
  std::unique_ptr<tributary::client::AnySession> session;
};

namespace tributary::client {
namespace {

static_assert(TRIBUTARY_MEMORY_DEFAULT == static_cast<int>(v1::SESSION_MEMORY_UNSPECIFIED));
static_assert(TRIBUTARY_MEMORY_HOST == static_cast<int>(v1::SESSION_MEMORY_HOST));
static_assert(TRIBUTARY_MEMORY_DEVICE == static_cast<int>(v1::SESSION_MEMORY_DEVICE));
static_assert(TRIBUTARY_MEMORY_MESSAGES == static_cast<int>(v1::SESSION_MEMORY_MESSAGES));

HostSessionOptions FromC(const tributary_session_options& given) {
  HostSessionOptions options{.cache_id = Text(given.cache),
                             .max_rows = given.max_rows,
                             .max_new_tokens = given.max_new_tokens,
                             .return_lse = given.return_lse != 0,
                             .memory = static_cast<v1::SessionMemory>(given.memory)};
  if (given.dtype != 0) options.dtype = static_cast<v1::DType>(given.dtype);
  options.output_dtype = static_cast<v1::DType>(given.output_dtype);
  if (given.max_steps != 0) options.max_steps = given.max_steps;
  if (given.wait_timeout_ms != 0) {
    options.wait_timeout = std::chrono::milliseconds(given.wait_timeout_ms);
  }
  if (given.spin_us != 0) options.spin = std::chrono::microseconds(std::max(0, given.spin_us));
  if (given.endpoints != 0) options.endpoints = given.endpoints;
  options.kv_replicated = given.kv_replicated != 0;
  return options;
}

EndpointOptions FromC(const tributary_endpoint& given) {
  EndpointOptions options{
      .session_id = given.session,
      .secret = std::string(reinterpret_cast<const char*>(given.secret), sizeof(given.secret)),
      .endpoint = given.endpoint};
  if (given.spin_us != 0) options.spin = std::chrono::microseconds(std::max(0, given.spin_us));
  return options;
}

absl::StatusOr<SessionStep> FromC(const tributary_step& given) {
  if (given.entry_count == 0 || given.entries == nullptr) {
    return InvalidField("entries", "must not be empty");
  }
  SessionStep step{.first_layer = given.first_layer,
                   .layers = given.layers,
                   .append_only = given.append_only != 0};
  if (given.mode != 0) step.mode = static_cast<v1::AttendMode>(given.mode);
  step.entries.reserve(given.entry_count);
  for (size_t i = 0; i < given.entry_count; ++i) {
    const tributary_step_entry& entry = given.entries[i];
    SessionEntry& to = step.entries.emplace_back();
    to.sequence_id = entry.sequence;
    to.first_position = entry.first_position;
    to.query_rows = entry.rows;
    to.new_tokens = entry.new_tokens;
    if (entry.has_truncate_to != 0) to.truncate_to = entry.truncate_to;
    if (entry.has_fork_from == 0) continue;
    to.fork_from = entry.fork_from;
    if (entry.fork_length >= 0) to.fork_length = entry.fork_length;
  }
  return step;
}

// The session only reads q, k and v.
HeadRows FromC(const tributary_rows& rows) {
  return {.data = const_cast<void*>(rows.data),
          .rows = rows.rows,
          .heads = rows.heads,
          .dim = rows.dim,
          .row_stride = rows.row_stride,
          .head_stride = rows.head_stride};
}

void Describe(const v1::SessionOpened& opened, tributary_session_info& info) {
  const v1::OpenSession& terms = opened.terms();
  tributary_session_info told{.size = info.size,
                              .memory = static_cast<tributary_memory>(terms.memory()),
                              .max_rows = terms.max_rows(),
                              .max_new_tokens = terms.max_new_tokens(),
                              .max_steps = terms.max_steps(),
                              .dtype = static_cast<tributary_dtype>(terms.q_dtype()),
                              .return_lse = terms.return_lse(),
                              .endpoint = opened.endpoint(),
                              .endpoints = terms.endpoints(),
                              .session = opened.session_id()};
  const std::string& secret = opened.endpoint_secret();
  told.output_dtype = static_cast<tributary_dtype>(terms.output_dtype());
  std::memcpy(told.secret, secret.data(), std::min(secret.size(), sizeof(told.secret)));
  std::memcpy(&info, &told, std::min(info.size, sizeof(told)));
}

}  // namespace
}  // namespace tributary::client

using namespace tributary::client;  // NOLINT(google-build-using-namespace): C names stand outside

tributary_code tributary_open_session(tributary_client* client,
                                      const tributary_session_options* options,
                                      tributary_session** session, tributary_session_info* info,
                                      tributary_error** error) {
  return GuardedWith(client, "client", error, [&]() -> absl::Status {
    if (auto s = Present(session, "session"); !s.ok()) return s;
    const auto known = Known(options, "options");
    if (!known.ok()) return known.status();
    const HostSessionOptions wanted = FromC(*known);
    auto opened = known->memory == TRIBUTARY_MEMORY_DEVICE
                      ? OpenDeviceSession(client->options, wanted)
                      : OpenHostSession(client->options, wanted);
    if (!opened.ok()) return opened.status();
    if (info != nullptr) Describe((*opened)->opened(), *info);
    *session = new tributary_session{*std::move(opened)};
    return absl::OkStatus();
  });
}

tributary_code tributary_join_session(tributary_client* client, const tributary_endpoint* endpoint,
                                      tributary_session** session, tributary_session_info* info,
                                      tributary_error** error) {
  return GuardedWith(client, "client", error, [&]() -> absl::Status {
    if (auto s = Present(session, "session"); !s.ok()) return s;
    const auto known = Known(endpoint, "endpoint");
    if (!known.ok()) return known.status();
    const bool on_gpu = known->memory == TRIBUTARY_MEMORY_DEVICE;
    if (!on_gpu && known->memory != TRIBUTARY_MEMORY_DEFAULT &&
        known->memory != TRIBUTARY_MEMORY_HOST) {
      return tributary::InvalidField("endpoint.memory", "must be HOST or DEVICE");
    }
    auto joined = on_gpu ? JoinDeviceSession(client->options, FromC(*known))
                         : JoinHostSession(client->options, FromC(*known));
    if (!joined.ok()) return joined.status();
    if (info != nullptr) Describe((*joined)->opened(), *info);
    *session = new tributary_session{*std::move(joined)};
    return absl::OkStatus();
  });
}

const char* tributary_session_warning(const tributary_session* session) {
  return session == nullptr ? "" : session->session->opened().warning().c_str();
}

tributary_code tributary_session_layer_shape(const tributary_session* session, int32_t layer,
                                             tributary_layer_shape* shape,
                                             tributary_error** error) {
  return GuardedWith(session, "session", error, [&]() -> absl::Status {
    if (auto s = Present(shape, "shape"); !s.ok()) return s;
    const auto& shapes = session->session->opened().shapes();
    const bool alike = shapes.size() == 1;  // one stands for all layers
    if (layer < 0 || (!alike && layer >= shapes.size())) {
      return tributary::InvalidField("layer", "the cache has no such layer");
    }
    const auto& of = shapes[alike ? 0 : layer];
    const tributary_layer_shape told{.size = shape->size,
                                     .q_heads = of.q_heads(),
                                     .kv_heads = of.kv_heads(),
                                     .head_dim = of.head_dim(),
                                     .value_head_dim = of.value_head_dim(),
                                     .first_q_head = of.first_q_head(),
                                     .first_kv_head = of.first_kv_head()};
    std::memcpy(shape, &told, std::min(shape->size, sizeof(told)));
    return absl::OkStatus();
  });
}

tributary_code tributary_session_submit(tributary_session* session, const tributary_step* step,
                                        uint64_t* number, tributary_error** error) {
  return GuardedWith(session, "session", error, [&]() -> absl::Status {
    const auto known = Known(step, "step");
    if (!known.ok()) return known.status();
    const auto wanted = FromC(*known);
    if (!wanted.ok()) return wanted.status();
    const auto accepted = session->session->Submit(*wanted);
    if (accepted.ok() && number != nullptr) *number = *accepted;
    return accepted.status();
  });
}

tributary_code tributary_session_attend(tributary_session* session,
                                        const tributary_session_layer* layer,
                                        tributary_error** error) {
  return GuardedWith(session, "session", error, [&]() -> absl::Status {
    const auto known = Known(layer, "layer");
    if (!known.ok()) return known.status();
    return session->session->Attend({.q = FromC(known->q),
                                     .k = FromC(known->k),
                                     .v = FromC(known->v),
                                     .output = FromC(known->output),
                                     .lse = known->lse},
                                    known->stream);
  });
}

tributary_code tributary_session_append(tributary_session* session,
                                        const tributary_session_layer* layer,
                                        tributary_error** error) {
  return GuardedWith(session, "session", error, [&]() -> absl::Status {
    const auto known = Known(layer, "layer");
    if (!known.ok()) return known.status();
    return session->session->Append(FromC(known->k), FromC(known->v), known->stream);
  });
}

tributary_code tributary_session_await(tributary_session* session, uint64_t step,
                                       tributary_error** error) {
  return GuardedWith(session, "session", error, [&] { return session->session->Await(step); });
}

tributary_code tributary_session_status(const tributary_session* session, tributary_error** error) {
  return GuardedWith(session, "session", error, [&] { return session->session->status(); });
}

tributary_code tributary_session_close(tributary_session* session, tributary_error** error) {
  if (session == nullptr) return TRIBUTARY_OK;
  const tributary_code code = Guarded(error, [&] { return session->session->Close(); });
  delete session;
  return code;
}

void tributary_session_abandon(tributary_session* session) { delete session; }
