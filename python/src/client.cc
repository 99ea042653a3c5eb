#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <optional>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "core.h"
#include "session.h"

namespace tributary::python {
namespace {

// The shape must be [rows, heads, dim]; where `heads` and `dim` are 0 they are whatever they are.
void CheckShape(const char* field, size_t ndim, const int64_t* shape, int64_t rows, int64_t heads,
                int64_t dim) {
  const bool fits = ndim == 3 && shape[0] == rows && (heads == 0 || shape[1] == heads) &&
                    (dim == 0 || shape[2] == dim);
  if (fits) return;
  std::string given;
  for (size_t i = 0; i < ndim; ++i) given += (i > 0 ? ", " : "") + std::to_string(shape[i]);
  const auto wanted = [](int64_t n) { return n == 0 ? std::string("any") : std::to_string(n); };
  Fail(TRIBUTARY_INVALID_ARGUMENT,
       std::string(field) + ": must be [" + std::to_string(rows) + ", " + wanted(heads) + ", " +
           wanted(dim) + "], is [" + given + "]",
       std::string(field) + ".shape");
}

using Input = nb::ndarray<nb::ro, nb::c_contig, nb::device::cpu>;
using Output = nb::ndarray<nb::c_contig, nb::device::cpu>;
using MaybeInput = std::optional<Input>;
using MaybeOutput = std::optional<Output>;
// Of an output: its dtype (0: q's), its scale (None: the layer's), and dimensions of a head.
using OutputKind = std::tuple<int, nb::object, int32_t>;

MaybeInput TakeMaybe(nb::handle given, const char* field) {
  if (given.is_none()) return std::nullopt;
  return Tensor<Input>(given, field, /*may_copy=*/true);
}

// The tensors of a call, which it borrows.
struct Tensors {
  Tensors(nb::handle q, nb::handle k, nb::handle v, nb::handle out, nb::handle lse)
      : q(Tensor<Input>(q, "q", /*may_copy=*/true)),
        k(TakeMaybe(k, "k")),
        v(TakeMaybe(v, "v")),
        out(Tensor<Output>(out, "out", /*may_copy=*/false)) {
    if (!lse.is_none()) this->lse = Tensor<Output>(lse, "lse", /*may_copy=*/false);
  }
  Input q;
  MaybeInput k, v;
  Output out;
  MaybeOutput lse;
};

constexpr const char* kWantedEntry = "must be (sequence, first_position, rows, new_tokens)";

// Entries of a call; of an append, with tokens for rows.
std::vector<tributary_entry> TakeEntries(nb::handle given, bool append) {
  std::vector<tributary_entry> entries;
  const size_t count = Length(given, "entries", "must be a sequence of entries");
  entries.reserve(count);
  for (size_t i = 0; i < count; ++i) {
    const auto field = [i](const char* part) { return Field("entries", i, part); };
    const nb::object of = Item(given, i);
    if (Length(of, field(""), kWantedEntry) < (append ? 3U : 4U)) {
      Refuse(field(""), kWantedEntry, of);
    }
    tributary_entry& entry = entries.emplace_back();
    entry.sequence = Integer<uint64_t>(Item(of, 0), field("sequence"));
    entry.first_position = Integer<int64_t>(Item(of, 1), field("first_position"));
    entry.rows = Integer<int32_t>(Item(of, 2), field("rows"));
    if (!append) entry.new_tokens = Integer<int32_t>(Item(of, 3), field("new_tokens"));
    if (entry.rows < 0) Refuse(field("rows"), "must be >= 0", Item(of, 2));
    if (entry.new_tokens < 0) Refuse(field("new_tokens"), "must be >= 0", Item(of, 3));
  }
  return entries;
}

// A call's structure and the entries that it points to.
struct Call {
  Call(nb::handle cache, nb::handle layer, nb::handle given, bool append)
      : entries(TakeEntries(given, append)) {
    for (const tributary_entry& entry : entries) {
      rows += entry.rows;
      new_tokens += entry.new_tokens;
    }
    c.size = sizeof c;
    c.cache = Text(cache, "cache_id");
    c.layer = Integer<int32_t>(layer, "layer");
    c.entries = entries.data();
    c.entry_count = entries.size();
  }
  void SetKv(const Input& k, const Input& v, int64_t tokens, int64_t head_dim) {
    CheckShape("k", k.ndim(), k.shape_ptr(), tokens, 0, head_dim);
    CheckShape("v", v.ndim(), v.shape_ptr(), tokens, k.shape(1), 0);
    if (DTypeOf(k.dtype(), "k") != c.dtype) Refuse("k", "must have the dtype of q");
    if (DTypeOf(v.dtype(), "v") != c.dtype) Refuse("v", "must have the dtype of k");
    c.kv_heads = static_cast<int32_t>(k.shape(1));
    c.value_head_dim = static_cast<int32_t>(v.shape(2));
    c.k = k.data();
    c.v = v.data();
  }
  void SetAttend(int mode, const Tensors& tensors, nb::handle yield_ms, const OutputKind& kind) {
    const auto& [q, k, v, out, lse] = tensors;
    CheckShape("q", q.ndim(), q.shape_ptr(), rows, 0, 0);
    c.mode = static_cast<tributary_mode>(mode);
    c.yield_ms = Integer<int32_t>(yield_ms, "yield_ms");
    c.dtype = DTypeOf(q.dtype(), "q");
    c.q_heads = static_cast<int32_t>(q.shape(1));
    c.head_dim = static_cast<int32_t>(q.shape(2));
    c.q = q.data();
    if (new_tokens > 0) {
      if (!k.has_value()) Refuse("k", "is missing: entries have new tokens");
      if (!v.has_value()) Refuse("v", "is missing: entries have new tokens");
      SetKv(*k, *v, new_tokens, q.shape(2));
    }
    SetOutput(out, kind);
    if (!lse.has_value()) return;
    const bool fits = lse->ndim() == 2 && lse->shape(0) == rows && lse->shape(1) == q.shape(1) &&
                      lse->dtype() == nb::dtype<float>();
    if (!fits) Refuse("lse", "must be float32 [rows, q_heads]");
    c.lse = static_cast<float*>(lse->data());
  }

  // When q's shape is known, and v's.
  void SetOutput(const Output& out, const OutputKind& kind) {
    const auto& [dtype, scale, dim] = kind;
    c.output_dtype = static_cast<tributary_dtype>(dtype);
    if (!scale.is_none()) {  // the C interface's 0 stands for none
      c.o_scale = Real(scale, "o_scale");
      if (!(c.o_scale > 0) || std::isinf(c.o_scale)) {
        Refuse("o_scale", "must be finite and > 0", scale);
      }
    }
    c.output = out.data();
    const bool is_bytes = out.dtype() == nb::dtype<uint8_t>();
    if (c.output_dtype == TRIBUTARY_NVFP4) {
      if (c.value_head_dim == 0) c.value_head_dim = dim;
      const uint64_t elements = static_cast<uint64_t>(rows) * c.q_heads * c.value_head_dim;
      const uint64_t bytes = tributary_output_bytes(TRIBUTARY_NVFP4, elements);
      if (!is_bytes || out.ndim() != 1 || out.shape(0) != bytes) {
        Refuse("out", "must be uint8 of as many bytes as the output has");
      }
      return;
    }
    CheckShape("out", out.ndim(), out.shape_ptr(), rows, c.q_heads, c.value_head_dim);
    c.value_head_dim = static_cast<int32_t>(out.shape(2));
    if (c.output_dtype == TRIBUTARY_FP8_E4M3) {
      if (!is_bytes) Refuse("out", "must be uint8");
    } else if (DTypeOf(out.dtype(), "out") != (dtype == 0 ? c.dtype : c.output_dtype)) {
      Refuse("out", dtype == 0 ? "must have q's dtype" : "must have the output's dtype");
    }
  }

  std::vector<tributary_entry> entries;
  int64_t rows = 0, new_tokens = 0;
  tributary_call c{};
};

// A call that nobody waits for, and the tensors that it borrows.
struct Flight {
  nb::object done;
  Tensors tensors;
};

// Whether this thread runs a callback: a connection that ends here would wait for itself.
thread_local bool landing = false;

void Land(void* context, tributary_code code, const tributary_error* error) {
  const nb::gil_scoped_acquire with_python;
  const std::unique_ptr<Flight> flight(static_cast<Flight*>(context));
  landing = true;
  try {
    flight->done(code == TRIBUTARY_OK ? nb::none() : ExceptionOf(FailureOf(code, error)));
  } catch (nb::python_error& raised) {
    raised.discard_as_unraisable("tributary: the callback of a call");
  }
  flight->done.reset();
  landing = false;
}

// A layer of a cache's spec, whose lists of numbers go to `values`.
tributary_layer TakeLayer(nb::handle of, size_t index, std::vector<std::vector<float>>& values) {
  const auto field = [index](const char* name) { return Field("spec.layer_specs", index, name); };
  const auto number = [&](const char* name) {
    return Integer<int32_t>(of.attr(name), field(name));
  };
  const auto real = [&](const char* name) { return Real(of.attr(name), field(name)); };
  const auto code = [&](const char* name) { return nb::cast<int>(of.attr(name)); };
  const auto floats = [&](const char* name, int32_t& count) {
    std::vector<float> list;
    if (!nb::try_cast(of.attr(name), list)) {
      Refuse(field(name), "must be a sequence of numbers", of.attr(name));
    }
    count = static_cast<int32_t>(list.size());
    values.push_back(std::move(list));
    return values.back().data();  // stays where it is when `values` grows
  };
  // Whether it is stated.
  const auto tokens = [&](const char* name, int64_t& count) {
    const nb::object given = of.attr(name);
    if (given.is_none()) return false;
    count = Integer<int64_t>(given, field(name));
    return true;
  };
  tributary_layer layer{};
  layer.size = sizeof layer;
  layer.has_window_left = tokens("window_left", layer.window_left);
  layer.has_window_right = tokens("window_right", layer.window_right);
  layer.has_soft_cap = !of.attr("soft_cap").is_none();
  if (layer.has_soft_cap != 0) layer.soft_cap = real("soft_cap");
  layer.window_base = static_cast<tributary_window_base>(code("_window_base_code"));
  layer.causal_block = Truth(of.attr("causal_block"), field("causal_block"));
  layer.o_scale = real("o_scale");
  layer.sinks = floats("sinks", layer.sink_count);
  layer.k_scale = floats("k_scale", layer.k_scale_count);
  layer.v_scale = floats("v_scale", layer.v_scale_count);
  layer.sm_scale = real("sm_scale");
  layer.kv_dtype = static_cast<tributary_dtype>(code("_kv_dtype_code"));
  layer.q_heads = number("q_heads");
  layer.kv_heads = number("kv_heads");
  layer.head_dim = number("head_dim");
  layer.value_head_dim = number("value_head_dim");
  return layer;
}

class Client {
 public:
  Client(nb::handle target, nb::handle timeout, nb::handle shared_memory_bytes,
         nb::handle max_attempts, nb::handle certificate, nb::handle key, nb::handle authorities,
         nb::handle token_file, nb::handle lease) {
    CheckNotForked();
    tributary_options options{};
    options.size = sizeof options;
    options.target = Text(target, "target");
    options.timeout_ms = Milliseconds(timeout, "timeout");
    options.shared_memory_bytes = Integer<uint64_t>(shared_memory_bytes, "shared_memory_bytes");
    options.max_attempts = Integer<int32_t>(max_attempts, "max_attempts");
    options.tls_certificate = Text(certificate, "tls_certificate");
    options.tls_key = Text(key, "tls_key");
    options.tls_authorities = Text(authorities, "tls_authorities");
    options.token_file = Text(token_file, "token_file");
    options.lease = Text(lease, "lease");
    tributary_client* client = nullptr;
    Wait([&](tributary_error** error) { return tributary_connect(&options, &client, error); });
    client_ = Own(client);
  }

  // Also of calls in flight, which nobody ends in another process.
  void CheckProcess() const { process_.Check("client"); }

  std::string Options() const {
    const Handle client = Open(nb::none());
    std::string text(tributary_client_options(client.get(), nullptr, 0), '\0');
    tributary_client_options(client.get(), text.data(), text.size() + 1);
    return text;
  }

  // The connection goes when the last call of another thread has ended.
  void Close() { client_.reset(); }

  std::tuple<int, int, int64_t> CreateCache(nb::handle id, nb::handle spec, nb::handle timeout) {
    std::vector<std::vector<float>> values;  // what the layers point to
    std::vector<tributary_layer> layers;
    const nb::object specs = spec.attr("layer_specs");
    const size_t count = Length(specs, "spec.layer_specs", "must be a sequence of LayerSpec");
    for (size_t i = 0; i < count; ++i) layers.push_back(TakeLayer(Item(specs, i), i, values));
    const auto number = [&](const char* name) {
      return Integer<int64_t>(spec.attr(name), Field("spec", name));
    };
    const auto small = [&](const char* name) {
      return Integer<int32_t>(spec.attr(name), Field("spec", name));
    };
    const auto real = [&](const char* name) { return Real(spec.attr(name), Field("spec", name)); };
    const auto truth = [&](const char* name) {
      return Truth(spec.attr(name), Field("spec", name));
    };
    tributary_cache_spec c{};
    c.size = sizeof c;
    c.layers = small("layers");
    c.q_heads = small("q_heads");
    c.kv_heads = small("kv_heads");
    c.head_dim = small("head_dim");
    c.value_head_dim = small("value_head_dim");
    c.page_size = small("page_size");
    c.kv_dtype = static_cast<tributary_dtype>(nb::cast<int>(spec.attr("_kv_dtype_code")));
    c.sm_scale = real("sm_scale");
    c.soft_cap = real("soft_cap");
    c.capacity_tokens = number("capacity_tokens");
    c.window_capacity_tokens = number("window_capacity_tokens");
    c.rollback_tokens = number("rollback_tokens");
    std::vector<tributary_mode> modes;
    for (const int mode : nb::cast<std::vector<int>>(spec.attr("_mode_codes"))) {
      modes.push_back(static_cast<tributary_mode>(mode));
    }
    c.modes = modes.data();
    c.mode_count = static_cast<int32_t>(modes.size());
    c.interleave = small("interleave");
    c.fp8_queries = truth("fp8_queries");
    c.fp8_weights = truth("fp8_weights");
    if (!spec.attr("replicas").is_none()) {
      c.has_replicas = 1;
      c.replicas = small("replicas");
    }
    c.layer_specs = layers.data();
    c.layer_count = static_cast<int32_t>(layers.size());
    tributary_cache_info info{};
    info.size = sizeof info;
    const char* name = Text(id, "cache_id");
    const Handle client = Open(timeout);
    Wait([&](tributary_error** error) {
      return tributary_create_cache(client.get(), name, &c, &info, error);
    });
    return {info.ranks, info.page_size, info.capacity_tokens};
  }

  void DeleteCache(nb::handle id, nb::handle timeout) {
    const char* name = Text(id, "cache_id");
    const Handle client = Open(timeout);
    Wait(
        [&](tributary_error** error) { return tributary_delete_cache(client.get(), name, error); });
  }
  uint64_t OpenSequence(nb::handle cache, nb::handle timeout) {
    const char* name = Text(cache, "cache_id");
    const Handle client = Open(timeout);
    uint64_t sequence = 0;
    Wait([&](tributary_error** e) {
      return tributary_open_sequence(client.get(), name, &sequence, e);
    });
    return sequence;
  }
  void ReopenSequence(nb::handle cache, nb::handle sequence, nb::handle timeout) {
    const char* name = Text(cache, "cache_id");
    const auto number = Integer<uint64_t>(sequence, "sequence");
    const Handle client = Open(timeout);
    Wait([&](tributary_error** e) {
      return tributary_reopen_sequence(client.get(), name, number, e);
    });
  }
  uint64_t ForkSequence(nb::handle cache, nb::handle parent, nb::handle length,
                        nb::handle timeout) {
    const char* name = Text(cache, "cache_id");
    const auto number = Integer<uint64_t>(parent, "parent");
    const int64_t shared = TakeLength(length, "length");
    const Handle client = Open(timeout);
    uint64_t child = 0;
    Wait([&](tributary_error** e) {
      return tributary_fork_sequence(client.get(), name, number, shared, &child, e);
    });
    return child;
  }
  int64_t TruncateSequence(nb::handle cache, nb::handle sequence, nb::handle length,
                           nb::handle timeout) {
    const char* name = Text(cache, "cache_id");
    const auto number = Integer<uint64_t>(sequence, "sequence");
    const auto most = Integer<int64_t>(length, "length");
    const Handle client = Open(timeout);
    int64_t held = 0;
    Wait([&](tributary_error** e) {
      return tributary_truncate_sequence(client.get(), name, number, most, &held, e);
    });
    return held;
  }
  void CloseSequence(nb::handle cache, nb::handle sequence, nb::handle timeout) {
    const char* name = Text(cache, "cache_id");
    const auto number = Integer<uint64_t>(sequence, "sequence");
    const Handle client = Open(timeout);
    Wait([&](tributary_error** e) {
      return tributary_close_sequence(client.get(), name, number, e);
    });
  }
  // Each update is (kind, sequence, parent, length). Returns their sequences.
  std::vector<uint64_t> UpdateSequences(nb::handle cache, const std::vector<nb::object>& given,
                                        nb::handle timeout) {
    const char* name = Text(cache, "cache_id");
    std::vector<tributary_update> updates;
    updates.reserve(given.size());
    for (size_t i = 0; i < given.size(); ++i) {
      const auto field = [i](const char* part) { return Field("updates", i, part); };
      const auto kind = static_cast<tributary_update_kind>(nb::cast<int>(Item(given[i], 0)));
      updates.push_back({kind, Integer<uint64_t>(Item(given[i], 1), field("sequence")),
                         Integer<uint64_t>(Item(given[i], 2), field("parent")),
                         TakeLength(Item(given[i], 3), field("length"))});
    }
    const Handle client = Open(timeout);
    Wait([&](tributary_error** e) {
      return tributary_update_sequences(client.get(), name, updates.data(),
                                        static_cast<int32_t>(updates.size()), e);
    });
    std::vector<uint64_t> sequences;
    for (const tributary_update& update : updates) sequences.push_back(update.sequence);
    return sequences;
  }

  void Append(nb::handle cache, nb::handle layer, nb::handle entries, nb::handle k, nb::handle v,
              nb::handle timeout) {
    const Handle client = Open(timeout);
    Call call(cache, layer, entries, /*append=*/true);
    const auto keys = Tensor<Input>(k, "k", /*may_copy=*/true);
    const auto values = Tensor<Input>(v, "v", /*may_copy=*/true);
    call.c.dtype = DTypeOf(keys.dtype(), "k");
    call.SetKv(keys, values, call.rows, 0);
    call.c.head_dim = static_cast<int32_t>(keys.shape(2));
    Wait([&](tributary_error** error) { return tributary_append(client.get(), &call.c, error); });
  }

  void Attend(nb::handle cache, nb::handle layer, int mode, nb::handle entries, nb::handle q,
              nb::handle k, nb::handle v, nb::handle out, nb::handle lse, nb::handle yield_ms,
              const OutputKind& kind, nb::handle timeout) {
    const Handle client = Open(timeout);
    Call call(cache, layer, entries, /*append=*/false);
    const Tensors tensors(q, k, v, out, lse);
    call.SetAttend(mode, tensors, yield_ms, kind);
    Wait([&](tributary_error** error) { return tributary_attend(client.get(), &call.c, error); });
  }

  // Calls done(None), or done(the exception), once, on a thread of the client. A call whose tensors
  // do not fit raises instead. Returns a number for Cancel.
  uint64_t AttendAsync(nb::handle cache, nb::handle layer, int mode, nb::handle entries,
                       nb::handle q, nb::handle k, nb::handle v, nb::handle out, nb::handle lse,
                       nb::handle yield_ms, const OutputKind& kind, nb::object done,
                       nb::handle timeout) {
    const Handle client = Open(timeout);
    Call call(cache, layer, entries, /*append=*/false);
    auto flight = std::make_unique<Flight>(std::move(done), Tensors(q, k, v, out, lse));
    call.SetAttend(mode, flight->tensors, yield_ms, kind);
    nb::gil_scoped_release others_run;  // a call that cannot be begun is told at once
    return tributary_attend_async(client.get(), &call.c, Land, flight.release());
  }

  // Whatever its timeout, a call has its number among those of the whole connection.
  void Cancel(uint64_t call) const {
    process_.Check("client");
    const Handle client = client_;
    if (client == nullptr) return;  // closing told it already
    nb::gil_scoped_release others_run;
    tributary_cancel(client.get(), call);
  }

  // `dtypes`: of q, k and v; of outputs, 0: the same.
  std::unique_ptr<Session> OpenSession(nb::handle cache, int memory, nb::handle max_rows,
                                       nb::handle max_new_tokens, std::pair<int, int> dtypes,
                                       nb::handle lse, nb::handle max_steps,
                                       nb::handle wait_timeout, nb::handle endpoints,
                                       nb::handle kv_replicated, nb::handle timeout) {
    const Handle client = Open(timeout);
    tributary_session_options options{};
    options.size = sizeof options;
    options.cache = Text(cache, "cache_id");
    options.memory = static_cast<tributary_memory>(memory);
    options.max_rows = Integer<int32_t>(max_rows, "max_rows");
    options.max_new_tokens = Integer<int32_t>(max_new_tokens, "max_new_tokens");
    options.dtype = static_cast<tributary_dtype>(dtypes.first);
    options.output_dtype = static_cast<tributary_dtype>(dtypes.second);
    options.return_lse = Truth(lse, "lse");
    options.max_steps = Integer<int32_t>(max_steps, "max_steps");
    options.wait_timeout_ms = Milliseconds(wait_timeout, "wait_timeout");
    options.endpoints = Integer<int32_t>(endpoints, "endpoints");
    options.kv_replicated = Truth(kv_replicated, "kv_replicated");
    return std::make_unique<Session>(client.get(), options);
  }

  std::unique_ptr<Session> JoinSession(nb::handle session, nb::handle secret, nb::handle number,
                                       int memory, nb::handle timeout) {
    const Handle client = Open(timeout);
    tributary_endpoint endpoint{};
    endpoint.size = sizeof endpoint;
    endpoint.session = Integer<uint64_t>(session, "invitation.session");
    if (!nb::isinstance<nb::bytes>(secret)) Refuse("invitation.secret", "must be bytes", secret);
    const auto bytes = nb::borrow<nb::bytes>(secret);
    std::memcpy(endpoint.secret, bytes.c_str(), std::min(bytes.size(), sizeof endpoint.secret));
    endpoint.endpoint = Integer<int32_t>(number, "endpoint");
    endpoint.memory = static_cast<tributary_memory>(memory);
    return std::make_unique<Session>(client.get(), endpoint);
  }

 private:
  // Kept by a call for as long as it runs.
  Handle Open(nb::handle timeout) const {
    process_.Check("client");
    if (client_ == nullptr) Fail(TRIBUTARY_CANCELLED, "the client was closed", "");
    if (timeout.is_none()) return client_;
    tributary_client* other = nullptr;
    const int64_t ms = Milliseconds(timeout, "timeout");
    Wait([&](tributary_error** e) { return tributary_with_timeout(client_.get(), ms, &other, e); });
    return Own(other);
  }

  Process process_;
  Handle client_;
};

}  // namespace

Handle Own(tributary_client* client) {
  return {client, [process = Process()](tributary_client* last) {
            // Its threads are not in a child of fork(): closing would wait for them.
            if (!process.IsThis()) return;
            if (landing) {
              std::thread(tributary_close, last).detach();
              return;
            }
            nb::gil_scoped_release others_run;
            tributary_close(last);
          }};
}

void BindClient(nb::module_& m) {
  using Object = nb::handle;
  const auto any = nb::arg().none();  // of whatever type: what it must be is said by who takes it
  nb::class_<Client>(m, "Client")
      .def(nb::init<Object, Object, Object, Object, Object, Object, Object, Object, Object>(), any,
           any, any, any, any, any, any, any, any)
      .def("check_process", &Client::CheckProcess)
      .def("close", &Client::Close)
      .def("options", &Client::Options)
      .def("create_cache", &Client::CreateCache, any, any, any)
      .def("delete_cache", &Client::DeleteCache, any, any)
      .def("open_sequence", &Client::OpenSequence, any, any)
      .def("reopen_sequence", &Client::ReopenSequence, any, any, any)
      .def("fork_sequence", &Client::ForkSequence, any, any, any, any)
      .def("truncate_sequence", &Client::TruncateSequence, any, any, any, any)
      .def("close_sequence", &Client::CloseSequence, any, any, any)
      .def("update_sequences", &Client::UpdateSequences, any, nb::arg(), any)
      .def("append", &Client::Append, any, any, any, any, any, any)
      .def("attend", &Client::Attend, any, any, nb::arg(), any, any, any, any, any, any, any,
           nb::arg(), any)
      .def("attend_async", &Client::AttendAsync, any, any, nb::arg(), any, any, any, any, any, any,
           any, nb::arg(), any, any)
      .def("cancel", &Client::Cancel)
      .def("open_session", &Client::OpenSession, any, nb::arg(), any, any, nb::arg(), any, any, any,
           any, any, any)
      .def("join_session", &Client::JoinSession, any, any, any, nb::arg(), any);
}

}  // namespace tributary::python
