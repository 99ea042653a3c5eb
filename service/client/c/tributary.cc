#include "service/client/c/tributary.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <memory>
#include <new>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "service/client/c/boundary.h"
#include "service/client/client.h"
#include "service/client/describe_options.h"

namespace tributary::client {
namespace {

static_assert(TRIBUTARY_F32 == static_cast<int>(v1::DTYPE_F32));
static_assert(TRIBUTARY_FP8_E5M2 == static_cast<int>(v1::DTYPE_FP8_E5M2));
static_assert(TRIBUTARY_NVFP4 == static_cast<int>(v1::DTYPE_NVFP4));
static_assert(TRIBUTARY_DFLASH == static_cast<int>(v1::ATTEND_MODE_DFLASH));
static_assert(TRIBUTARY_WINDOW_ANCHOR == static_cast<int>(v1::WINDOW_BASE_ANCHOR));
static_assert(TRIBUTARY_UNAUTHENTICATED == static_cast<int>(absl::StatusCode::kUnauthenticated));

absl::StatusOr<ConnectOptions> FromC(const tributary_options& given) {
  ConnectOptions options{.target = Text(given.target),
                         .security = {.tls = {.certificate = Text(given.tls_certificate),
                                              .key = Text(given.tls_key),
                                              .authorities = Text(given.tls_authorities)},
                                      .token_file = Text(given.token_file)},
                         .shared_memory_bytes = given.shared_memory_bytes,
                         .lease = Text(given.lease)};
  if (given.timeout_ms != 0) options.timeout = std::chrono::milliseconds(given.timeout_ms);
  if (given.max_attempts != 0) options.max_attempts = given.max_attempts;
  if (given.max_message_bytes != 0) options.max_message_bytes = given.max_message_bytes;
  return options;
}

absl::Status FromC(const tributary_layer& given, v1::LayerSpec& layer) {
  if (given.has_window_left != 0) layer.mutable_window()->set_left(given.window_left);
  if (given.has_window_right != 0) layer.mutable_window()->set_right(given.window_right);
  layer.set_window_base(static_cast<v1::WindowBase>(given.window_base));
  layer.set_causal_block(given.causal_block != 0);
  if (given.o_scale != 0) layer.set_o_scale(given.o_scale);
  if (given.has_soft_cap != 0) layer.set_soft_cap(given.soft_cap);
  layer.set_sm_scale(given.sm_scale);
  layer.set_kv_dtype(static_cast<v1::DType>(given.kv_dtype));
  layer.set_q_heads(given.q_heads);
  layer.set_kv_heads(given.kv_heads);
  layer.set_head_dim(given.head_dim);
  layer.set_value_head_dim(given.value_head_dim);
  const auto copy = [](absl::string_view field, const float* values, int32_t count,
                       google::protobuf::RepeatedField<float>* to) -> absl::Status {
    if (count < 0 || (count > 0 && values == nullptr)) {
      return InvalidField(field, "its count and its values do not agree");
    }
    if (count > 0) to->Add(values, values + count);
    return absl::OkStatus();
  };
  if (auto s = copy("sinks", given.sinks, given.sink_count, layer.mutable_sinks()); !s.ok()) {
    return s;
  }
  if (auto s = copy("k_scale", given.k_scale, given.k_scale_count, layer.mutable_k_scale());
      !s.ok()) {
    return s;
  }
  return copy("v_scale", given.v_scale, given.v_scale_count, layer.mutable_v_scale());
}

absl::StatusOr<v1::CacheSpec> FromC(const tributary_cache_spec& given) {
  v1::CacheSpec spec;
  spec.set_layers(given.layers);
  spec.set_q_heads(given.q_heads);
  spec.set_kv_heads(given.kv_heads);
  spec.set_head_dim(given.head_dim);
  spec.set_value_head_dim(given.value_head_dim);
  spec.set_page_size(given.page_size);
  spec.set_kv_dtype(static_cast<v1::DType>(given.kv_dtype));
  spec.set_sm_scale(given.sm_scale);
  spec.set_soft_cap(given.soft_cap);
  spec.set_capacity_tokens(given.capacity_tokens);
  if (given.window_capacity_tokens != 0) {
    spec.set_window_capacity_tokens(given.window_capacity_tokens);
  }
  if (given.rollback_tokens != 0) spec.set_rollback_tokens(given.rollback_tokens);
  spec.set_interleave(given.interleave);
  spec.set_fp8_queries(given.fp8_queries != 0);
  spec.set_fp8_weights(given.fp8_weights != 0);
  if (given.has_replicas != 0) spec.set_replicas(given.replicas);
  if (given.mode_count < 0 || (given.mode_count > 0 && given.modes == nullptr)) {
    return InvalidField("modes", "mode_count does not agree with them");
  }
  for (int i = 0; i < given.mode_count; ++i) {
    spec.add_modes(static_cast<v1::AttendMode>(given.modes[i]));
  }
  if (given.layer_count < 0 || (given.layer_count > 0 && given.layer_specs == nullptr)) {
    return InvalidField("layer_specs", "layer_count does not agree with them");
  }
  // The caller's layers lie as far apart as the caller's structure is large.
  const char* at = reinterpret_cast<const char*>(given.layer_specs);
  for (int i = 0; i < given.layer_count; ++i) {
    const std::string field = absl::StrCat("layer_specs[", i, "]");
    const auto layer = Known(reinterpret_cast<const tributary_layer*>(at), field);
    if (!layer.ok()) return layer.status();
    if (auto s = FromC(*layer, *spec.add_layer_specs()); !s.ok()) return PrefixField(field, s);
    at += layer->size;
  }
  return spec;
}

absl::Status CheckEntries(const tributary_call& call) {
  if (call.entry_count == 0 || call.entries == nullptr) {
    return InvalidField("entries", "must not be empty");
  }
  return absl::OkStatus();
}

absl::StatusOr<AttendCall> ToAttend(const tributary_call* given) {
  const auto call = Known(given, "call");
  if (!call.ok()) return call.status();
  if (auto s = CheckEntries(*call); !s.ok()) return s;
  AttendCall attend{.cache_id = Text(call->cache),
                    .layer = call->layer,
                    .dtype = static_cast<v1::DType>(call->dtype),
                    .q = call->q,
                    .k = call->k,
                    .v = call->v,
                    .q_heads = call->q_heads,
                    .kv_heads = call->kv_heads,
                    .head_dim = call->head_dim,
                    .value_head_dim = call->value_head_dim,
                    .output = call->output,
                    .output_dtype = static_cast<v1::DType>(call->output_dtype),
                    .lse = call->lse,
                    .yield = std::chrono::milliseconds(call->yield_ms)};
  if (call->mode != 0) attend.mode = static_cast<v1::AttendMode>(call->mode);
  if (call->o_scale != 0) attend.o_scale = call->o_scale;
  attend.entries.reserve(call->entry_count);
  for (size_t i = 0; i < call->entry_count; ++i) {
    const tributary_entry& entry = call->entries[i];
    attend.entries.push_back({entry.sequence, entry.first_position, entry.rows, entry.new_tokens});
  }
  return attend;
}

absl::StatusOr<AppendCall> ToAppend(const tributary_call* given) {
  const auto call = Known(given, "call");
  if (!call.ok()) return call.status();
  if (auto s = CheckEntries(*call); !s.ok()) return s;
  AppendCall append{.cache_id = Text(call->cache),
                    .layer = call->layer,
                    .dtype = static_cast<v1::DType>(call->dtype),
                    .k = call->k,
                    .v = call->v,
                    .kv_heads = call->kv_heads,
                    .head_dim = call->head_dim,
                    .value_head_dim = call->value_head_dim};
  append.entries.reserve(call->entry_count);
  for (size_t i = 0; i < call->entry_count; ++i) {
    const tributary_entry& entry = call->entries[i];
    append.entries.push_back({entry.sequence, entry.first_position, entry.rows});
  }
  return append;
}

// The value where there is one, if the caller wants it.
template <typename T>
absl::Status Take(absl::StatusOr<T> result, T* to) {
  if (result.ok() && to != nullptr) *to = *result;
  return result.status();
}

}  // namespace
}  // namespace tributary::client

using namespace tributary::client;  // NOLINT(google-build-using-namespace): C names stand outside

const char* tributary_code_name(int code) {
  // Of absl's own table, which lives as long as the process.
  static const std::string* const names = [] {
    auto* table = new std::string[TRIBUTARY_UNAUTHENTICATED + 1];
    for (int i = 0; i <= TRIBUTARY_UNAUTHENTICATED; ++i) {
      table[i] = absl::StatusCodeToString(static_cast<absl::StatusCode>(i));
    }
    return table;
  }();
  const bool known = code >= 0 && code <= TRIBUTARY_UNAUTHENTICATED;
  return names[known ? code : TRIBUTARY_UNKNOWN].c_str();
}

const char* tributary_version(void) { return TRIBUTARY_VERSION; }

tributary_code tributary_error_code(const tributary_error* error) { return error->code; }
const char* tributary_error_message(const tributary_error* error) { return error->message.c_str(); }
const char* tributary_error_field(const tributary_error* error) { return error->field.c_str(); }
int64_t tributary_error_retry_delay_ms(const tributary_error* error) {
  return error->retry_delay_ms;
}
int64_t tributary_error_length(const tributary_error* error) { return error->length; }
int32_t tributary_error_missing(const tributary_error* error, uint64_t* sequence, int32_t* layer,
                                const tributary_range** ranges) {
  if (sequence != nullptr) *sequence = error->lost_sequence;
  if (layer != nullptr) *layer = error->lost_layer;
  if (ranges != nullptr) *ranges = error->missing.data();
  return static_cast<int32_t>(error->missing.size());
}
void tributary_error_free(tributary_error* error) { delete error; }

tributary_code tributary_connect(const tributary_options* options, tributary_client** client,
                                 tributary_error** error) {
  return GuardedWith(client, "client", error, [&]() -> absl::Status {
    const auto known = Known(options, "options");
    if (!known.ok()) return known.status();
    const auto connect = FromC(*known);
    if (!connect.ok()) return connect.status();
    auto connected = Client::Connect(*connect);
    if (!connected.ok()) return connected.status();
    *client = new tributary_client{*std::move(connected), *connect};
    return absl::OkStatus();
  });
}

size_t tributary_client_options(const tributary_client* client, char* text, size_t size) {
  if (client == nullptr) {
    if (size > 0 && text != nullptr) text[0] = '\0';
    return 0;
  }
  try {
    const std::string options =
        tributary::client::OptionsText(tributary::client::Describe(client->options));
    if (size > 0) text[options.copy(text, size - 1)] = '\0';
    return options.size();
  } catch (const std::bad_alloc&) {
    return 0;
  }
}

tributary_code tributary_with_timeout(tributary_client* client, int64_t timeout_ms,
                                      tributary_client** other, tributary_error** error) {
  return GuardedWith(client, "client", error, [&]() -> absl::Status {
    if (auto s = Present(other, "other"); !s.ok()) return s;
    if (timeout_ms < 1) return tributary::InvalidField("timeout_ms", "must be at least 1");
    ConnectOptions options = client->options;
    options.timeout = std::chrono::milliseconds(timeout_ms);
    *other = new tributary_client{client->client->WithTimeout(options.timeout), std::move(options)};
    return absl::OkStatus();
  });
}

void tributary_close(tributary_client* client) { delete client; }

tributary_code tributary_create_cache(tributary_client* client, const char* id,
                                      const tributary_cache_spec* spec, tributary_cache_info* info,
                                      tributary_error** error) {
  return GuardedWith(client, "client", error, [&]() -> absl::Status {
    const auto known = Known(spec, "spec");
    if (!known.ok()) return known.status();
    const auto wanted = FromC(*known);
    if (!wanted.ok()) return wanted.status();
    const auto reply = client->client->CreateCache(Text(id), *wanted);
    if (!reply.ok() || info == nullptr) return reply.status();
    const tributary_cache_info told{.size = info->size,
                                    .ranks = reply->ranks(),
                                    .page_size = reply->spec().page_size(),
                                    .capacity_tokens = reply->spec().capacity_tokens()};
    std::memcpy(info, &told, std::min(info->size, sizeof(told)));
    return absl::OkStatus();
  });
}

tributary_code tributary_delete_cache(tributary_client* client, const char* id,
                                      tributary_error** error) {
  return GuardedWith(client, "client", error,
                     [&] { return client->client->DeleteCache(Text(id)); });
}

tributary_code tributary_open_sequence(tributary_client* client, const char* cache,
                                       uint64_t* sequence, tributary_error** error) {
  return GuardedWith(client, "client", error,
                     [&] { return Take(client->client->OpenSequence(Text(cache)), sequence); });
}

tributary_code tributary_reopen_sequence(tributary_client* client, const char* cache,
                                         uint64_t sequence, tributary_error** error) {
  return GuardedWith(client, "client", error,
                     [&] { return client->client->ReopenSequence(Text(cache), sequence); });
}

tributary_code tributary_fork_sequence(tributary_client* client, const char* cache, uint64_t parent,
                                       int64_t length, uint64_t* sequence,
                                       tributary_error** error) {
  return GuardedWith(client, "client", error, [&] {
    const auto shared = length < 0 ? std::nullopt : std::optional<int64_t>(length);
    return Take(client->client->ForkSequence(Text(cache), parent, shared), sequence);
  });
}

tributary_code tributary_truncate_sequence(tributary_client* client, const char* cache,
                                           uint64_t sequence, int64_t length, int64_t* held,
                                           tributary_error** error) {
  return GuardedWith(client, "client", error, [&] {
    return Take(client->client->TruncateSequence(Text(cache), sequence, length), held);
  });
}

tributary_code tributary_close_sequence(tributary_client* client, const char* cache,
                                        uint64_t sequence, tributary_error** error) {
  return GuardedWith(client, "client", error,
                     [&] { return client->client->CloseSequence(Text(cache), sequence); });
}

tributary_code tributary_update_sequences(tributary_client* client, const char* cache,
                                          tributary_update* updates, int32_t count,
                                          tributary_error** error) {
  using Kind = tributary::client::SequenceUpdate::Kind;
  return GuardedWith(client, "client", error, [&]() -> absl::Status {
    if (count > 0 && updates == nullptr) return Present(updates, "updates");
    std::vector<tributary::client::SequenceUpdate> changes;
    for (int32_t i = 0; i < count; ++i) {
      const tributary_update& update = updates[i];
      if (update.kind < TRIBUTARY_OPEN || update.kind > TRIBUTARY_CLOSE) {
        return tributary::InvalidField(absl::StrCat("updates[", i, "].kind"), "is unknown");
      }
      changes.push_back({.kind = static_cast<Kind>(update.kind - TRIBUTARY_OPEN),
                         .sequence_id = update.sequence,
                         .parent_id = update.parent});
      const bool whole_fork = update.kind == TRIBUTARY_FORK && update.length < 0;
      if (!whole_fork) changes.back().length = update.length;
    }
    const auto sequences = client->client->UpdateSequences(Text(cache), changes);
    if (!sequences.ok()) return sequences.status();
    for (int32_t i = 0; i < count; ++i) updates[i].sequence = (*sequences)[i];
    return absl::OkStatus();
  });
}

tributary_code tributary_append(tributary_client* client, const tributary_call* call,
                                tributary_error** error) {
  return GuardedWith(client, "client", error, [&]() -> absl::Status {
    const auto append = ToAppend(call);
    return append.ok() ? client->client->Append(*append) : append.status();
  });
}

tributary_code tributary_attend(tributary_client* client, const tributary_call* call,
                                tributary_error** error) {
  return GuardedWith(client, "client", error, [&]() -> absl::Status {
    const auto attend = ToAttend(call);
    return attend.ok() ? client->client->Attend(*attend) : attend.status();
  });
}

uint64_t tributary_attend_async(tributary_client* client, const tributary_call* call,
                                tributary_done done, void* context) {
  if (done == nullptr) return 0;  // nobody to be told, of the call's end or of anything else
  uint64_t id = 0;
  tributary_error* error = nullptr;
  const tributary_code code = GuardedWith(client, "client", &error, [&]() -> absl::Status {
    const auto attend = ToAttend(call);
    if (!attend.ok()) return attend.status();
    id = client->client->AttendAsync(*attend, [done, context](absl::Status status) {
      tributary_error* why = nullptr;
      const tributary_code outcome = Report(status, &why);
      done(context, outcome, why);
      tributary_error_free(why);
    });
    return absl::OkStatus();
  });
  if (code == TRIBUTARY_OK) return id;
  done(context, code, error);
  tributary_error_free(error);
  return 0;
}

uint64_t tributary_output_bytes(tributary_dtype dtype, uint64_t elements) {
  return OutputBytes(static_cast<tributary::v1::DType>(dtype), elements);
}

void tributary_cancel(tributary_client* client, uint64_t call) {
  if (client != nullptr) client->client->Cancel(call);
}
